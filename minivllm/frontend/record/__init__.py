"""The bill of materials of a run: its plug-ins with their packages, sources and options, and why they were chosen.

``bill``      makes the bill       ``sources``  hashes the source of implementations and models
``tally``     counts results       ``machine``  reads versions, machine and git
``recorder``  writes run.json      ``nodes``    divides a bill into comparable values, each with its causes
``diff``      compares two bills   ``replay``   repeats a run from its run.json

Importing ``minivllm`` imports nothing of this package.
"""

from collections.abc import Mapping
from typing import Any

JsonObject = Mapping[str, Any]  # a bill of materials, or an object in it
Entries = dict[str, Any]  # a bill of materials, or an object in it, that is being filled
