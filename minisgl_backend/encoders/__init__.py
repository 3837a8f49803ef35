"""Encoders of images: from pixels to the vectors that a decoder takes in place of embeddings."""
