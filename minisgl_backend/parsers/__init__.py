"""What models write, as it arrives: thoughts, tool calls and content."""
