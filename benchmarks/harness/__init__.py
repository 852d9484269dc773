"""Shared parts of the benchmarks: the model, the backends, the probes, the launcher, the report."""
