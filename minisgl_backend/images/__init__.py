"""Images as input, in the front: digests, sizes, pixels and placeholder tokens. Pillow is in the workers alone."""
