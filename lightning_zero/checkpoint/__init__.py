"""Sharded checkpoints on disk. Knows nothing of Lightning or of the engine."""
