"""Names of models: in Ollama a name ends with a tag, and the tag ``latest`` may be left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.server.errors import ApiError, printable

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

LATEST = ":latest"


def tagged(name: str) -> str:
    """Return a name with its tag, which is ``latest`` if the name has none."""
    last = name.rpartition("/")[2]
    return name if ":" in last else name + LATEST


def served_name(service: Service, name: str | None) -> str:
    """Return the served name of the model that a client names.  Without a name it is the server's model.

    ApiError (404) for a model that is not served, with the text that clients of Ollama look for.
    """
    if not name:
        return service.names[0]
    wanted = tagged(name)
    for served in service.names:
        if tagged(served) == wanted:
            return served
    raise ApiError(404, f"model '{printable(name, 100)}' not found", "model")
