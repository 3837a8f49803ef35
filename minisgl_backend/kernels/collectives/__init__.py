"""Collectives over memory that the ranks' GPUs share: all-reduce with norm, copy-engine sums, logits to rank 0."""
