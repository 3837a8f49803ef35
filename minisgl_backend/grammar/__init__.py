"""Grammars: compiled in processes of their own, followed by sequence, and filled into masks beside the device."""
