"""Imported by every Python that has this folder on PYTHONPATH."""

import walk_recorder  # noqa: F401
