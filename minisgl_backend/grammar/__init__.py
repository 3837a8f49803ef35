"""Guided decoding: compiles grammars in other processes, and fills token bitmasks while the device computes."""
