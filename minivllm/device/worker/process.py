"""Build the runner of a worker process from the JSON of a wiring.

    parent  argv = fresh.command("my_executor:serve", wiring_to_json(wiring), ...);  subprocess.Popen(argv)
    worker  def serve(text, ...): runner = worker.build(text)

The parent process has selected all plug-ins.  The worker does not search for plug-ins or read package metadata.  It
imports only the targets in the wiring, from the import path of the parent; other installed packages are not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.device.hardware import prepare_environment

if TYPE_CHECKING:
    from .runner import Runner


def build(text: str, make: Any = None) -> Runner:
    """Build a runner from the JSON of a wiring: load the model and allocate its memory.

    ``make(wiring)`` builds the runner instead of ``Runner(wiring)`` if it is given.  The environment for torch is set
    before.  Raise
    ModelError, PluginError (a target cannot be imported; the message names its package) or ResourceError (not enough
    memory, or another version of minivllm wrote the JSON)."""
    prepare_environment()  # sets variables that torch reads when it is imported
    from minivllm.core.wiring import wiring_from_json

    from .runner import Runner

    return (make or Runner)(wiring_from_json(text))
