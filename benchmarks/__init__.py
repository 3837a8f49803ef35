"""Measurements and generated tasks; nothing here is needed to serve."""
