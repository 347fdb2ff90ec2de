"""Classes among the options of a front door: ``LLM(evictor=MyEvictor, hooks=[Watch])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.config import SEAMS
from minivllm.config.values import ALIASES, SEVERAL


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a target in the place of each class.  What is known of its source is noted now: a notebook may
    define it again, or change what it uses, before a record is written."""
    found = dict(options)
    for key, value in options.items():
        name = ALIASES.get(key, key)
        if name in SEAMS:
            found[key] = _named(value)
        elif name in SEVERAL and isinstance(value, (list, tuple)):
            found[key] = [_named(one) for one in value]
    return found


def _named(value: Any) -> Any:
    if isinstance(value, type):
        from minivllm.frontend.record.live import source_of_class
        from minivllm.registration.given import give

        return give(value, source_of_class)
    if isinstance(value, Mapping):
        held = {key: _named(one) for key, one in value.items() if key == "name"}
        prefer = value.get("prefer")
        if isinstance(prefer, (list, tuple)):
            held["prefer"] = [_named(one) for one in prefer]
        return {**value, **held}
    return value
