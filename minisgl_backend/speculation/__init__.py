"""Speculation: tokens that are proposed, and verified several at a time. It changes no text."""
