"""GEMMs with FP8 weights."""
