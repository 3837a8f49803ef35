"""Executes plans on one device: row table, batches, sampling, graphs.

Knows nothing of queues, of who owns which page, or of clients.
"""
