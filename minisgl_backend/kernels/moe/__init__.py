"""Mixtures of experts in the Triton language: routing, alignment to blocks, grouped GEMMs by the number of tokens."""
