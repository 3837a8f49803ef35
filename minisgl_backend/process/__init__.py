"""Processes of one machine: how they start, tell that they live, take signals, and share cores and ports."""
