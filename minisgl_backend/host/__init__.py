"""Starting, watching and stopping processes: the engine core, tritonserver and its stubs."""
