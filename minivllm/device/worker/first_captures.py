"""The captures of a start, whose kernels are compiled before they are made.

early   another runner, with small caches ──► rehearsals, while the attention back end tries its own kernels
start   the engine's runner               ──► rehearsals of the shapes that the early ones did not have ──► captures
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.core.interfaces.attention import GraphKey
from minivllm.device.layers.captured_sizes import long_decode

from .captured import plain_draws, sampler_variants
from .graph_keys import AdaptedKey
from .served_kernels import ServedCaptures, compile_served

if TYPE_CHECKING:
    from .build import Worker
    from .later import LaterCaptures, Shape
    from .runner import Runner

# Steps whose contexts have at most this number of tokens share their captures.  The attention back end splits longer
# contexts differently, so they have captures of their own.
SHORT = 8192


class FirstCaptures(ServedCaptures, Protocol):
    """The attributes of a runner's captures (``graphs.Graphs``) that this module uses."""

    later: LaterCaptures


# shapes to capture at the start, shapes to capture later, compilations by shape, compilations of other steps
First = tuple[list["Shape"], list["Shape"], dict[Hashable, list[Any]], list[Any]]


def rehearse_early(runner: Runner, worker: Worker) -> None:
    """Start to compile the kernels of the captures of ``runner``, which has no worker yet, by a copy of it with
    ``worker``, whose caches are small.

    Nothing is rehearsed with parts that have threads or models of their own."""
    wiring = runner.wiring
    others = worker.own_models, worker.adapters, worker.encoder, worker.states, wiring.cache.stores
    if any(others) or wiring.compressor is not None or wiring.speculation.num_speculative_tokens:
        return
    early = copy(runner)
    early.worker = worker
    early.build_state(None)
    if early.can_capture():
        rehearse_first(early.new_captures())


def rehearse_first(graphs: FirstCaptures) -> First:
    """Start to compile the kernels of captures and of other steps, except those that were rehearsed before."""
    runner = graphs.runner
    rehearsals = runner.worker.rehearsals
    variants = sampler_variants(runner.sampler)
    draws = plain_draws([*graphs.sizes, *graphs.coarse], len(runner.processors), variants)
    now, later = graphs.later.divide(_first_decodes(graphs), draws)
    whole = max(SHORT, runner.wiring.max_model_len)
    if whole > SHORT:
        queue = later if graphs.later.gradual else now
        queue += [GraphKey("decode", n, n, whole) for n in long_decode(graphs.sizes)]
    with rehearsals.held():
        compiled = rehearsals.begin_named({shape: partial(graphs.rehearse, shape) for shape in now})
        served = compile_served(graphs, sorted({SHORT, whole}), now)
    return now, later, compiled, served


def _first_decodes(graphs: FirstCaptures) -> list[GraphKey]:
    """Return the shapes of decode steps with short contexts, the largest first."""
    runner = graphs.runner
    kinds = [GraphKey]
    if runner.adapters is not None:
        kinds.append(AdaptedKey)
    decodes = []
    for n in reversed(graphs.sizes):
        decodes += [kind("decode", n, n, SHORT) for kind in kinds]
    pages = runner.shared
    if pages is not None:
        sizes = [n for n in reversed(graphs.shared_sizes) if pages.can_save(n, SHORT)]
        decodes += [GraphKey("decode", n, n, SHORT, shared=True) for n in sizes]
    return decodes
