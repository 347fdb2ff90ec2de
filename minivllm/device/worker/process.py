"""What a worker process does first: from the JSON of a wiring to a runner on its device.

    parent  argv = fresh.command("my_executor:serve", wiring_to_json(wiring), ...);  subprocess.Popen(argv)
    worker  def serve(text, ...): runner = worker.build(text)

The choices were made in the parent.  Here no catalog is asked and no metadata read: exactly the targets in the wiring
are imported, from the parent's import path, and a package that is installed beside them is not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.device.hardware import prepare_environment

if TYPE_CHECKING:
    from .runner import Runner


def build(text: str, make: Any = None) -> Runner:
    """Load the model and take the memory; ``make(wiring)`` is called in place of ``Runner`` once torch may be imported.
    ModelError, PluginError (names the package of a target that cannot be imported here) or ResourceError (also if
    another version of minivllm made the wiring)."""
    prepare_environment()  # before torch is imported
    from minivllm.core.wiring import wiring_from_json

    from .runner import Runner

    return (make or Runner)(wiring_from_json(text))
