"""``python -m minivllm.testing``: the conformance kit without a test file."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
