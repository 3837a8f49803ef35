"""Processes of one machine: how they start, report that they live, handle signals, and share cores and ports."""
