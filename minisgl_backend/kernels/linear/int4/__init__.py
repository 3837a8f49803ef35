"""GEMMs with 4-bit weights."""
