"""Take the stand-in where kvpress is not installed."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("kvpress") is None:
    sys.path.insert(0, str(Path(__file__).parent / "stand_in"))
