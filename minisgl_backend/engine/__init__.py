"""The engine core's process: the loop around scheduler and runner, its commands, grammars and tensor-parallel ranks."""
