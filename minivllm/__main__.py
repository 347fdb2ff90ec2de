"""Run the ``minivllm`` command: ``python -m minivllm``."""

import sys

from minivllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
