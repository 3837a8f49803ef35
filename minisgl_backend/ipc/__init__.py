"""Messages between processes, the sockets and frames that carry them, and their encodings."""
