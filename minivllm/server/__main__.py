"""``python -m minivllm.server`` is ``minivllm serve``."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    runpy.run_module("minivllm", run_name="__main__")
