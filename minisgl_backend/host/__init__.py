"""Starts, watches and stops processes: the engine cores, tritonserver and its stubs."""
