"""`python -m client`: the command `minisgl` where it is not installed."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
