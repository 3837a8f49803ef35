"""Executes plans on one device: row table, batches, sampling, graphs."""
