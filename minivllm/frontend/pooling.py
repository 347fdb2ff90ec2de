"""The pooling of embeddings: the hidden states that a request reads, and the default of a checkpoint.

The default comes from the files of sentence-transformers in the checkpoint's folder:

modules.json             [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}, ...]
1_Pooling/config.json    {"pooling_mode_lasttoken": true, ...}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minivllm import files
from minivllm.errors import MinivllmError, ModelError, RequestError, brief, shown

MEAN, LAST, CLS = POOLINGS = ("mean", "last", "cls")
AUTO = "auto"
MODULES, CONFIG = "modules.json", "config.json"
# keys of a Pooling module's config.json that are true for a pooling, and values of its "pooling_mode"
MODES = {"pooling_mode_cls_token": CLS, "pooling_mode_mean_tokens": MEAN, "pooling_mode_lasttoken": LAST}
NAMED_MODES = {"cls": CLS, "mean": MEAN, "lasttoken": LAST}
COMPUTED = ("Transformer", "Pooling", "Normalize")  # modules that this engine computes
INSTEAD = f"pass the pooling, one of {', '.join(POOLINGS)}"


class PromptPooling:
    """The pooling of one request (``core.engine.pooling.Pooling``): mean, last or cls, the first token.

    ``embedding`` is f32 [hidden] once the request has ended well.  A position that comes from the prefix cache has no
    hidden state.  Each position is read once, although it may be computed again after a preemption."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.embedding: np.ndarray | None = None
        self.restart()

    def restart(self) -> None:
        """Forget all values that were read, for a prompt that is computed again with other weights."""
        self._upto = 0  # number of leading positions whose computation was planned
        self._sum: np.ndarray | float = 0.0

    def most_cached(self, most: int) -> int:
        """Return how many of the first ``most`` tokens may come from the prefix cache."""
        return most if self.kind == LAST else min(most, 1 + self._upto)

    def read(self, at: int, n: int, ends: bool) -> tuple[int, int]:
        """Return (first, count) of the tokens to read in a step that computes the positions [at, at + n)."""
        before = self._upto
        self._upto = max(before, at + n)
        if self.kind == LAST:
            return n - 1, int(ends)
        if self.kind == CLS:
            return 0, int(before == 0)
        first = min(max(before - at, 0), n)
        return first, n - first

    def add(self, values: np.ndarray) -> None:
        """Add the sum f64 [hidden] of tokens that were read."""
        self._sum = self._sum + values

    def end(self, tokens: int) -> bool:
        """Compute the embedding of a prompt of ``tokens`` tokens.  Return whether all values are finite numbers."""
        count = tokens if self.kind == MEAN else 1
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.asarray(self._sum / count, np.float32)
        finite = bool(np.isfinite(values).all())
        self.embedding = values if finite else None
        return finite


class DefaultPooling(NamedTuple):
    """The pooling that a checkpoint names: ``name``, or "" with the ``fault`` that explains why none can be used."""

    name: str
    fault: str = ""

    def chosen(self, pooling: Any, field: str = "pooling") -> str:
        """Return the pooling that a request uses.  RequestError for an unknown one, or for "auto" without a default."""
        if pooling is None or pooling == AUTO:
            if self.fault:
                raise RequestError(f"{field}: {self.fault}; {INSTEAD}", field)
            return self.name
        if pooling not in POOLINGS:
            raise RequestError(f"{field}={shown(pooling)}: expected {AUTO}, {', '.join(POOLINGS)}", field)
        return str(pooling)


def default_pooling(folder: str | os.PathLike[str]) -> DefaultPooling:
    """Return the pooling of the checkpoint in a folder.

    It is the last token's hidden state if the folder has no modules.json, as for a model that generates text."""
    modules = Path(folder) / MODULES
    if not os.path.isfile(modules):
        return DefaultPooling(LAST)
    try:
        return DefaultPooling(_read(Path(folder), files.read_json(modules, files.PART, ModelError)))
    except MinivllmError as e:
        return DefaultPooling("", str(e))


def _read(folder: Path, modules: Any) -> str:
    """Return the pooling that the parsed modules.json names.  ModelError if this engine does not compute it."""
    if not isinstance(modules, list) or not all(isinstance(module, Mapping) for module in modules):
        raise ModelError(f"{MODULES} is not a list of modules")
    path = None
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in COMPUTED:
            raise ModelError(f"{MODULES} has a module {brief(kind)}, which is not computed here")
        if kind == "Pooling":
            path = str(module.get("path"))
    if path is None:
        raise ModelError(f"{MODULES} has no module of the type Pooling")
    config = Path(os.path.normpath(folder / path / CONFIG))
    if not config.is_relative_to(os.path.normpath(folder)) or not os.path.isfile(config):
        raise ModelError(f"{MODULES} names {brief(path)}/{CONFIG}, which is missing")
    return _pooling(files.read_json(config, files.PART, ModelError), path)


def _pooling(config: Any, path: str) -> str:
    """Return the pooling that the parsed config.json of a Pooling module sets.  ModelError unless it sets exactly
    one known pooling."""
    found: list[str] = []
    if isinstance(config, Mapping):
        modes = config.get("pooling_mode")
        modes = [modes] if isinstance(modes, str) else modes or []
        found = [str(mode) for mode in modes]
        found += [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    poolings = {**MODES, **NAMED_MODES}
    names = {poolings.get(mode, "") for mode in found}
    if len(names) != 1 or "" in names:
        raise ModelError(
            f"{brief(path)}/{CONFIG} sets the poolings {brief(', '.join(found) or 'none')}; expected one that this "
            "engine computes"
        )
    return names.pop()
