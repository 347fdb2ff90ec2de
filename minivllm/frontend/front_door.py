"""What the front doors of Python share: a configuration is loaded, its engine built, its run recorded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minivllm.config import EngineConfig, Loaded, RunConfig, load_config
from minivllm.errors import ConfigError
from minivllm.hardware import prepare_environment

from .classes import named


def load(config: Any, options: Mapping[str, Any], stacklevel: int = 3) -> Loaded:
    """A config (a path or a list of them, a mapping, EngineConfig, Loaded or None) with options laid over it; what the
    layers have to say, as that options of another plug-in were dropped, is a warning."""
    if isinstance(config, Loaded):
        if options:
            raise ConfigError(f"options {sorted(options)} beside a loaded config; give them to load_config")
        return config
    options = named(options)
    if config is None or isinstance(config, Mapping):
        loaded = load_config(keywords={**named(config or {}), **options})
    elif isinstance(config, EngineConfig):
        loaded = load_config(keywords={**config.model_dump(exclude_unset=True), **options})
    elif isinstance(config, (str, os.PathLike)):
        loaded = load_config([config], keywords=options)
    elif isinstance(config, (list, tuple)):
        loaded = load_config(config, keywords=options)
    else:
        raise ConfigError(f"config of type {type(config).__name__}; want a path, a mapping or an EngineConfig")
    for note in loaded.notes:
        warnings.warn(note, stacklevel=stacklevel)
    return replace(loaded, run=RunConfig())  # what runs is what the caller gives


class FrontDoor:
    """An engine and what belongs to it, of a configuration.  ``resolved``: the parts that were chosen, and why."""

    live = False  # requests come at any real time: an executor with another clock is refused

    def __init__(
        self, model: Any, config: Any, record: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        named = options if model is None else {**options, "model": model}
        self._loaded = load(config, named, stacklevel=4)  # a warning names the line that made the front door
        prepare_environment()  # before torch is imported
        from minivllm.record.recorder import RunRecorder

        from .building import build_engine

        self.config = self._loaded.engine
        self._recorder = RunRecorder(self._loaded, record)
        self.engine, self.resolved, self.tokenizer = build_engine(self._loaded, self.live)
        self._recorder.begin(self.resolved, self.engine)

    def tap_points(self) -> dict[str, int]:
        """The points of the model that a ``Tap`` may name, and how wide each is; empty if it has none."""
        return dict(self.engine.capacity.taps or {})
