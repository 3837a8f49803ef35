"""Token counts by which steps are planned; without torch, for the null runner's start."""

# GEMMs on a GPU round the token count up to tiles: a step of 402 tokens costs the same as one of 512.
TILE_TOKENS = 128
# Default of a step's prompt tokens, unless the model has another (see `resolve`).
PREFILL_LENGTH = 8192
