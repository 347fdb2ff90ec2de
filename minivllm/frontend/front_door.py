"""The common base of ``LLM`` and ``AsyncLLM``: load a configuration, build its engine, record its run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.config import SEAMS, EngineConfig, Loaded, RunConfig, load_config
from minivllm.config.values import ALIASES, SEVERAL
from minivllm.core.interfaces.params import SamplingParams
from minivllm.device import early
from minivllm.device.hardware import prepare_environment
from minivllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from minivllm.runtime.images.files import FileDecoder
    from minivllm.runtime.text.tokenizer import Tokenizer


def load(config: Any, options: Mapping[str, Any], stacklevel: int = 3) -> Loaded:
    """Return a configuration with ``options`` over it.  ``config`` is a path, a list of paths, a mapping, an
    EngineConfig, a Loaded or None.

    Notes, such as dropped options of another plug-in, become warnings.  ConfigError for a config of another type.
    """
    if isinstance(config, Loaded):
        if options:
            raise ConfigError(f"options {sorted(options)} with a loaded config; pass them to load_config")
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
        raise ConfigError(f"config of type {type(config).__name__}; expected a path, a mapping or an EngineConfig")
    for note in loaded.notes:
        warnings.warn(note, stacklevel=stacklevel)
    return replace(loaded, run=RunConfig())  # the caller passes the prompts


def named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which each class, as in ``LLM(evictor=MyEvictor, hooks=[Watch])``, is replaced by its target
    (the name by which it can be imported).

    The source code of each class is read now, because a notebook may change it before a record is written."""
    found = dict(options)
    for key, value in options.items():
        name = ALIASES.get(key, key)
        if name in SEAMS:
            found[key] = _named(value)
        elif name in SEVERAL and isinstance(value, (list, tuple)):
            found[key] = [_named(choice) for choice in value]
    return found


def _named(value: Any) -> Any:
    """Return an option value with each class replaced by its target, a text such as "module:Class".

    In a table, the class may be the ``name``, or among the names in ``prefer``."""
    if isinstance(value, type):
        from minivllm.frontend.record.live import source_of_class
        from minivllm.registration.given import give

        return give(value, source_of_class)
    if not isinstance(value, Mapping):
        return value
    table = dict(value)
    if "name" in table:
        table["name"] = _named(table["name"])
    prefer = table.get("prefer")
    if isinstance(prefer, (list, tuple)):
        table["prefer"] = [_named(name) for name in prefer]
    return table


class FrontDoor:
    """The engine of a configuration, with its tokenizer and record.  ``resolved`` holds the chosen plug-ins and the
    reasons."""

    live = False  # whether requests arrive in real time; an executor with a simulated clock is then refused

    def __init__(
        self, model: Any, config: Any, record: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> None:
        """Load the configuration and build the engine.  ``record`` is the file to which the run is recorded, or
        None."""
        if model is not None:
            options = {**options, "model": model}
        prepare_environment()  # must run before the libraries of torch are loaded
        early.open_torch()
        self._loaded = load(config, options, stacklevel=4)  # a warning names the line of the caller
        from minivllm.frontend.record.recorder import RunRecorder

        from .building import build_engine, image_reader
        from .garbage import exclude_present

        self.config = self._loaded.engine
        self._recorder = RunRecorder(self._loaded, record)
        self.engine, self.resolved, self.tokenizer = build_engine(self._loaded, self.live)
        self.images = image_reader(self.resolved, self.engine.capacity)
        if self._recorder.path is not None and not self.images.why_not:
            self.images.why_not = "a record keeps the requests of a run, and no images; leave record out"
        self._files: FileDecoder | None = None
        if not self.images.why_not:
            from minivllm.runtime.images.files import FileDecoder

            self._files = FileDecoder()
            self.images.decode = self._files.decode
        self._recorder.begin(self.resolved, self.engine)
        self._end_exclusion = exclude_present(self)

    def _close_pool(self) -> None:
        """End the threads and processes that convert text and decode images."""
        if self.tokenizer is not None:
            self.tokenizer.pool.close()
        if self._files is not None:
            self._files.close()

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer.  RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer; drop skip_tokenizer_init", "tokenizer")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of a call without parameters.

        They are those of the model's generation_config.json (option ``generation_config``), overridden by the
        ``[sampling]`` table.
        """
        return SamplingParams.make(**{**self.resolved.sampling, **self._loaded.sampling})

    def tap_points(self) -> dict[str, int]:
        """Return the width of each tap point (named tensor of the model) that a ``Tap`` may read.

        It is empty for a model without tap points.
        """
        return dict(self.engine.capacity.taps or {})
