"""A configuration file in another format, read by a hook that is enabled already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_by_hook(path: str, enabled: Any, allow_targets: Any) -> Mapping[str, Any] | None:
    """What the first of the ``enabled`` hooks (as in the configuration) that knows the file reads in it; None if none
    does."""
    if not enabled:
        return None
    from minivllm.registry import Catalog
    from minivllm.runtime.hooks.manager import ask_config

    from .resolve import choose_hooks
    from .values import EngineConfig

    config = EngineConfig(hooks=enabled, allow_targets=allow_targets or [])
    found = ask_config(choose_hooks(config, Catalog.discover()), path)
    return None if found is None else found[1]
