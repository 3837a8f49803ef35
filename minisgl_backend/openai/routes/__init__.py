"""The endpoint's routes: a file for each family of them, and a table."""
