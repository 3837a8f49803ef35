"""GEMMs with weights in GGUF's blocks on GPUs."""
