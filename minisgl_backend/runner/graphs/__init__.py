"""CUDA graphs: whole decode steps, prompts in pieces, single prompts."""
