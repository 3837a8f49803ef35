"""Runners without a model, for tests and for measuring everything else."""
