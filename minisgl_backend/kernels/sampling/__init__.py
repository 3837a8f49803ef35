"""Sampling in the Triton language, one module a stage; `launch` runs them in order."""
