"""Kernels of steps and draws that ordinary requests may need, compiled before these requests come.

A captured step compiles its kernels when it is captured.  Other steps are captured, or run as separate launches, while
requests run, and a compilation would then delay these requests by some tenths of a second.  So a first start also
rehearses one step for each set of their kernels before the engine is ready.  Threads compile them, and may end after
that.  A launch whose kernel a thread compiles waits for it:

    decode     numbers of rows for which kernels of products and of attention may differ, short and long contexts, with
               shared prefixes, and with adapters if the engine has any
    mixed      numbers of rows for which attention differs, with few and with many tokens
    separate   numbers of rows of a step that is longer than the longest capture
    draws      all limits of the sampler, processors, log-probabilities and token masks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.params import SamplingParams
from minivllm.device.kernels.launch import power
from minivllm.device.layers.captured_sizes import MOST_TOKENS, WHOLE_TOKENS, token_size

from .captured import Drawn, SampleOperations
from .graph_keys import AdaptedKey
from .trial_launches import separate_step

if TYPE_CHECKING:
    from .distinct_layers import DistinctLayers
    from .later import Shape
    from .runner import Runner

PROMPT = 128  # tokens of the prompt in a rehearsed (not launched) step of separate launches
# Up to FEW rows each captured size may have kernels of its own, and above only multiples of FEW.
FEW = 64
# Parameters of the draws.  The first uses all limits of the built-in sampler, the others each kind of top-k.
LIMITS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.0, top_k=1000),
)
PROCESSED = SamplingParams(
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={0: 1.0},
)
BEST = (0, 1, 2, 4, 8, 16, 32)  # numbers of likeliest tokens whose log-probabilities are returned


class ServedCaptures(Protocol):
    """The attributes of a runner's captures (``graphs.Graphs``) that this module uses."""

    runner: Runner
    sizes: list[int]  # numbers of rows for which decode steps are captured, ascending
    coarse: list[int]  # numbers of rows for which mixed steps are captured, ascending
    shared_sizes: list[int]  # numbers of rows of captured steps with shared prefixes, ascending
    mixed: bool  # whether mixed steps are captured
    layers: DistinctLayers
    draw_bits: dict[bool, int]  # logits are float32 -> variant bits of the compiled limits

    def late_masks(self) -> Any: ...
    def rehearse(self, shape: Shape) -> None: ...


def compile_served(graphs: ServedCaptures, spans: Sequence[int], known: Collection[GraphKey | Drawn]) -> list[Any]:
    """Start to compile the kernels of the steps and draws that ordinary requests may need; return the compilations.

    ``spans`` are the longest contexts of captures, ascending.  The kernels of the shapes ``known`` are queued already.
    Nothing is done if an earlier start has compiled all kernels."""
    runner = graphs.runner
    rehearsals = runner.worker.rehearsals
    if not rehearsals.active:
        return []
    graphs.late_masks()  # the memory of token masks, which some of the draws read
    steps = [*served_steps(graphs, spans)]
    mixed = [key for key in steps if key.kind == "mixed"]  # first, because the start itself captures some of them
    decodes = [key for key in steps if key.kind != "mixed"]
    shapes: list[GraphKey | Drawn] = [*mixed, *served_draws(runner, graphs.sizes), *decodes]
    runs: dict[Hashable, Callable[[], Any]] = {
        shape: partial(graphs.rehearse, shape) for shape in shapes if shape not in known
    }
    for number, run in enumerate(separate_steps(runner)):
        runs["separate", number] = partial(graphs.layers.shortened, run)
    begun = rehearsals.begin_named(runs)
    return [job for jobs in begun.values() for job in jobs]


def finish_served(graphs: ServedCaptures, jobs: Sequence[Any]) -> None:
    """End the rehearsals of a start.  The compilations of ``compile_served`` continue in threads while the engine
    serves its first requests.

    Draws with all limits count as compiled for both dtypes of logits, unless kernels are compiled at their first
    launch."""
    rehearsals = graphs.runner.worker.rehearsals
    if rehearsals.ready or rehearsals.active:
        graphs.draw_bits = {False: -1, True: -1}
    rehearsals.done(jobs)


def served_steps(graphs: ServedCaptures, spans: Sequence[int]) -> Iterator[GraphKey]:
    """Yield the shapes of captured steps, one for each set of kernels."""
    kinds = [GraphKey]
    if graphs.runner.adapters is not None:
        kinds.append(AdaptedKey)
    for span in spans:
        for rows in distinct(graphs.sizes):
            for kind in kinds:
                yield kind("decode", rows, rows, span)
        pages = graphs.runner.shared
        for rows in graphs.shared_sizes:
            if pages is not None and pages.can_save(rows, span):
                yield GraphKey("decode", rows, rows, span, shared=True)
    if not graphs.mixed:
        return
    budget = graphs.runner.wiring.max_num_batched_tokens
    least = token_size(1)
    most = token_size(min(budget, MOST_TOKENS))
    by_power = {power(rows): rows for rows in graphs.coarse}
    for rows in by_power.values():
        sizes = {max(least, rows), max(most, rows)}
        for tokens in sorted(sizes):
            longest = spans
            if tokens >= WHOLE_TOKENS:
                longest = spans[-1:]
            for span in longest:
                for kind in kinds:
                    yield kind("mixed", rows, tokens, span)


def distinct(sizes: Sequence[int]) -> list[int]:
    """Return the numbers of rows for which kernels of products and of the head may differ."""
    few = [n for n in sizes if n <= FEW]
    many = [n for n in sizes if n > FEW]
    whole = [n for n in many if n % FEW == 0]
    return sorted({*few, *whole, *many[-1:]})


def served_draws(runner: Runner, sizes: Sequence[int]) -> Iterator[Drawn]:
    """Yield draws with each set of kernels: in the dtype of the model and in float32, with and without
    log-probabilities and token masks.

    ``sizes`` are the numbers of rows of captures.  The kernels of draws do not depend on the number of rows, and those
    of the head do, so draws without limits have many numbers of rows, and other draws one."""
    unused = _variants(runner, False)
    processed = _variants(runner, True)
    greedy = _limits(runner, LIMITS[:1])
    plain = SampleOperations((*unused[:-1], greedy), False, -1, False)
    for rows in distinct(sizes):
        yield Drawn(rows, plain)
    middle = min(3, len(sizes) - 1)
    few = sizes[middle]
    for late in (False, True):
        yield Drawn(few, SampleOperations(unused, False, -1, late))
        yield Drawn(few, SampleOperations(processed, True, -1, late))
    for k in BEST:
        yield Drawn(few, SampleOperations(unused, False, k, False))
    yield Drawn(few, SampleOperations(processed, True, 1, False))


def _variants(runner: Runner, used: bool) -> tuple[int, ...]:
    """Return the variant bits of each processor, the sampler last with all limits.

    With ``used`` every graph-safe processor that PROCESSED needs is used, else none."""
    found = []
    prompt = np.zeros(1, np.int32)
    for i, processor in enumerate(runner.processors[:-1]):
        row = None
        if used and runner.graph_safe[i]:
            row = processor.bind_prompt(PROCESSED, prompt)
        found.append(-1 if row is None else row.variant)
    return (*found, _limits(runner, LIMITS))


def _limits(runner: Runner, params: tuple[SamplingParams, ...]) -> int:
    """Return the variant bits of the sampler for rows with these parameters, combined."""
    bits = 0
    prompt = np.zeros(1, np.int32)
    for one in params:
        row = runner.sampler.bind_prompt(one, prompt)
        if row is not None:
            bits |= row.variant
    return bits


def separate_steps(runner: Runner) -> list[Callable[[], Any]]:
    """Return functions that run steps of separate launches, with powers of two as their numbers of rows.

    All rows but one decode.  There are none for a model with recurrent states, which a step would change."""
    wiring = runner.wiring
    if runner.state.recurrent is not None:
        return []
    tokens = min(PROMPT, wiring.max_model_len, wiring.max_num_batched_tokens)
    rows = 1
    found: list[Callable[[], Any]] = []
    while rows < wiring.max_num_seqs:
        rows = min(2 * rows, wiring.max_num_seqs)
        q_len = np.ones(rows, np.int32)
        q_len[-1] = tokens
        found.append(partial(separate_step, runner, q_len))
    return found
