"""Model folders and architectures: reading config.json, and the modules built from it."""
