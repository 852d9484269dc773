"""Bytes between device, host and disk. Knows nothing of units, optimizers or processes."""
