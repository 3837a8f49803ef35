"""`python -m minisgl_backend.serving.drain`: the documented command, kept where manifests call it."""

import sys

from minisgl_backend.host.drain import main

if __name__ == "__main__":
    sys.exit(main())
