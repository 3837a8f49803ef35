"""Numbers of tokens that steps are made of; without torch, for the null runner's start."""

# GEMMs on a GPU round the token count up to tiles: a step of 402 tokens costs the same as one of 512.
TILE_TOKENS = 128
# Prompt tokens of a step where neither the user nor the model (see `resolve`) asks for others.
PREFILL_LENGTH = 8192
