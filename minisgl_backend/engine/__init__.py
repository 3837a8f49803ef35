"""The engine: the loop that joins scheduler and runner, its process, and the handles to it."""
