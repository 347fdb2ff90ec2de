"""The functions that run the layers of a step while a CUDA graph records them.

They read fixed tensors, which each replay fills again: the columns of the slots (decode), or a row table (mixed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import step
from .adapters import applied
from .captured import Buffers, bounds, column_tensors, read_columns
from .graph_keys import ImagedKey, TappedKey, adapted

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import GraphKey
    from minivllm.core.interfaces.model import StepTensors

    from .image_steps import ImageSteps
    from .query_store import StepQueries
    from .runner import Runner

# a function that runs the layers of a step, and the tensors of its ``Captured`` by field
LayersRun = tuple[Callable[[], None], dict[str, Any]]


def decode_run(r: Runner, key: GraphKey, b: Buffers, queries: StepQueries | None) -> LayersRun:
    """Return the function that runs a decode step in the rows of ``b``.

    ``queries`` gets the queries of all rows; None means that no KV compressor reads them."""
    lengths = bounds(key, len(r.worker.groups))
    static = column_tensors(r.state, b.slots, lengths)
    methods = _methods(r, key)

    def run() -> None:
        read = read_columns(r.state, static)
        read.queries = queries
        _tap(r, key, read)
        read.watch = r.watch(read)
        with applied(r.adapters, read.meta, methods):
            step.forward(r.model, r.backend, read, key, out=b.hidden)

    return run, {"keep": static, "queries": queries}


def mixed_run(r: Runner, imaged: ImageSteps | None, key: GraphKey, b: Buffers) -> LayersRun:
    """Return the function that runs a mixed step in the rows of ``b``.

    ``imaged`` is the memory of steps with images, None if such steps are not captured."""
    size = step.table_size(key.rows, key.tokens)
    host = bounds(key, len(r.worker.groups))
    table = torch.zeros(size, dtype=torch.int64, device=r.device)
    table[: key.rows] = r.wiring.max_num_seqs  # the spare slot
    methods = _methods(r, key)

    def run() -> None:
        read, last = step.read_rows(r.state, table, host, padded=True)
        _tap(r, key, read)
        if imaged is not None and isinstance(key, ImagedKey):
            imaged.enter(read)
        read.watch = r.watch(read)
        selected = len(last) if adapted(key) else 0
        selects = r.selects_tokens(read, selected)
        kept = last if selects else None
        with applied(r.adapters, read.meta, methods, kept):
            step.forward(r.model, r.backend, read, key, last, selects, b.hidden)

    return run, {"rows": table}


def _methods(r: Runner, key: GraphKey) -> tuple[int, ...]:
    """Return the indices of the adapter methods that a captured step computes: all, because rows of a replay may use
    any."""
    if r.adapters is None or not adapted(key):
        return ()
    return r.adapters.all


def _tap(r: Runner, key: GraphKey, read: StepTensors) -> None:
    """Set the taps of a captured step, which read and change values in the model."""
    if not isinstance(key, TappedKey):
        return
    if key.steered or key.read or key.given:
        read.taps = r.taps.captured(key.steered, key.read, read.meta, key.given)
    if r.adapters is not None:
        methods = _methods(r, key)
        read.taps = r.adapters.taps(methods, key.changed, read.taps)
