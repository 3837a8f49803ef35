"""Decides what each step computes and records what came out.

Knows nothing of tensors, devices or text; imports NumPy and msgspec only. See docs/scheduler.md.
"""
