"""Toys: what the project's seams take, a file each, as tests add them."""
