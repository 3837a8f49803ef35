"""What crosses a process border: messages, the sockets and frames that carry them, and their encodings."""
