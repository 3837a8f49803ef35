"""Streaming parsers of model output: reasoning, tool calls and content."""
