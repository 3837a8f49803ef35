"""Models without a native family: transformers' own code runs them, with this engine's attention."""
