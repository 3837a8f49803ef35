"""GEMMs of published packages, where they are installed."""
