"""Experts in MXFP4, 4 bits a number with a scale for each 32 inputs."""
