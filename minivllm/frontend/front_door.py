"""The common base of ``LLM`` and ``AsyncLLM``: load a configuration, build its engine, record its run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig, Loaded, RunConfig, load_config
from minivllm.core.interfaces.params import SamplingParams
from minivllm.device.hardware import prepare_environment
from minivllm.errors import ConfigError, RequestError

from .classes import named

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer


def load(config: Any, options: Mapping[str, Any], stacklevel: int = 3) -> Loaded:
    """Return a config (a path or a list of paths, a mapping, EngineConfig, Loaded or None) with options laid over it.

    Notes, such as dropped options of another plug-in, become warnings.  ConfigError for a config of another type.
    """
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
    """The engine of a configuration, with tokenizer and record.  ``resolved`` has the chosen parts and the reasons."""

    live = False  # requests come at any real time: an executor with another clock is refused

    def __init__(
        self, model: Any, config: Any, record: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        named = options if model is None else {**options, "model": model}
        self._loaded = load(config, named, stacklevel=4)  # a warning names the line that made the front door
        prepare_environment()  # before torch is imported
        from minivllm.frontend.record.recorder import RunRecorder

        from .building import build_engine

        self.config = self._loaded.engine
        self._recorder = RunRecorder(self._loaded, record)
        self.engine, self.resolved, self.tokenizer = build_engine(self._loaded, self.live)
        self._recorder.begin(self.resolved, self.engine)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer; drop skip_tokenizer_init", "tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a call that gives none: those of the model's generation_config.json (option
        ``generation_config``), with the ``[sampling]`` table laid over them."""
        return SamplingParams.make(**{**self.resolved.sampling, **self._loaded.sampling})

    def tap_points(self) -> dict[str, int]:
        """Return the width of each point of the model that a ``Tap`` may name; empty for a model without points."""
        return dict(self.engine.capacity.taps or {})
