"""The engine core's process: the loop that joins scheduler and runner, its commands, grammars and followers."""
