"""Runners without a model, for tests and for benchmarks of everything else."""
