"""Decides what each step computes and records what came out.

See docs/scheduler.md.
"""
