"""Compiling grammars: in processes of their own, which threads of the engine core wait for."""
