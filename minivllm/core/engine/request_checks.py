"""Check a new request before anything changes.  Each refusal is a RequestError."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from minivllm.core import checks, declared_params
from minivllm.core.external_calls import call_foreign
from minivllm.core.interfaces.plan import STOP_IDS
from minivllm.core.timing import processor_seams
from minivllm.errors import RequestError, describe_error, suggest

from .compression import BUDGET
from .pooling import check_pooling
from .prompt_scores import check_logprobs
from .stops import StopRule
from .strategies import branches, own_names
from .taps import check_taps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.sampling import Column, Processor, Row, Sampler
    from minivllm.core.interfaces.strategy import Branch, DecodingStrategy
    from minivllm.core.timing import StepClock

    from .cache import KVCache
    from .compression import Compression
    from .parts import HostSampler
    from .request import Request, Seq
    from .speculation import Speculation

    Processors = Sequence[tuple[str, Processor]]
    Strategies = Sequence[tuple[str, DecodingStrategy]]


def check_prompt(
    request: Request,
    wiring: Wiring,
    vocab: int,
    cache: KVCache,
    compression: Compression | None = None,
) -> None:
    """Check the prompt, the stop ids and the size of a request.  Set ``end``, the number of tokens at which it ends at
    the latest, and ``held``, how many of them the KV cache must hold.  RequestError if the request cannot be served."""
    p = request.params
    limit = wiring.max_model_len
    n = len(request.prompt)
    if not n:
        raise RequestError("the prompt is empty; expected at least one token", "prompt")
    low = int(request.prompt.min())
    high = int(request.prompt.max())
    if low < 0 or high >= vocab:
        raise RequestError(
            f"prompt token id {low if low < 0 else high} is out of range; expected 0 to {vocab - 1}",
            "prompt",
        )
    pools = request.pooling is not None
    most = limit if pools else limit - 1
    if n > most:
        why = "" if pools else " less one to generate"
        raise RequestError(
            f"the prompt has {n} tokens; expected at most {most} (max_model_len={limit}{why})",
            "prompt",
        )
    for i in p.stop_token_ids or ():
        if i >= vocab:
            raise RequestError(
                f"stop_token_ids: {i} is out of range; expected 0 to {vocab - 1}", "stop_token_ids"
            )
    wide = next((name for name in ("beam_width", "best_of") if getattr(p, name) is not None), "n")
    if p.width > wiring.max_num_seqs:
        raise RequestError(
            f"{wide}={p.width} is more than max_num_seqs={wiring.max_num_seqs}", wide
        )

    def held(end: int) -> int:
        return end if compression is None else compression.hold(request, end, wiring.block)

    request.end = n + 1 if pools else _end(n, p, limit, cache, held)
    if compression is not None:
        compression.settle(request)
    request.held = held(request.end)
    if not cache.fits_alone(n, request.stored, p.width):
        room = (min(pool.total for pool in cache.pools) - 1) * wiring.block
        todo = "shorten it" if pools else "shorten it, lower max_tokens,"
        if request.keep:
            todo = "shorten it, lower kv_budget or max_tokens, set kv_budget=0,"
        raise RequestError(
            f"the request needs the KV cache of up to {request.stored} tokens for each of {wide}={p.width}, but the "
            f"whole cache holds {room}; {todo} or raise num_kvcache_blocks",
            "prompt" if pools else "max_tokens",
        )


def _end(n: int, p: SamplingParams, limit: int, cache: KVCache, held: Callable[[int], int]) -> int:
    """Return the number of tokens, prompt included, at which a request with a prompt of ``n`` tokens ends at the
    latest.

    Without ``max_tokens`` that is the model's limit, or less if the KV cache holds less.  ``held(end)`` is the number
    of tokens that the cache must hold for a row of ``end`` tokens."""
    if p.max_tokens is not None:
        return min(n + p.max_tokens, limit)

    def fits(end: int) -> bool:
        return cache.fits_alone(n, held(end), p.width)

    if fits(limit):
        return limit
    lengths = range(n + 1, limit)
    fitting = bisect_left(lengths, True, key=lambda end: not fits(end))
    return lengths[fitting - 1] if fitting else limit


def check_read(
    p: SamplingParams,
    strategies: Strategies,
    processors: Processors,
    compression: Compression | None = None,
) -> None:
    """Raise RequestError if the request has a parameter that no logits processor, sampler or decoding strategy of this
    engine reads."""
    if p.extra:
        p.check_extra()
    requested = p.changed_parameters()
    known = (
        own_names(strategies).union(*(made.reads for _, made in processors)) if requested else set()
    )
    if compression is not None or p.extra.get(BUDGET) == 0:
        known.add(BUDGET)
    for name in requested:
        if name not in known:
            what = f"{name} is set, but no processor, sampler or strategy in the config reads it"
            if name == BUDGET:
                what = f"{name} is set, but compressor=none compresses nothing"
            does = f"add one that does{''.join(f', {who}' for who in declared_params.readers(name)[:4])}"
            raise RequestError(f"{what}; {does}.{suggest(name, sorted(known))}", name)


class Binder(NamedTuple):
    """A logits processor or the sampler, which receives the parameters of each new request once (``bind``)."""

    seam: str  # name under which the time of the plug-in's calls is counted
    name: str
    made: Processor
    columns: Mapping[str, Column]

    def bind(self, request: Request) -> Row | None:
        """Call the processor's ``bind`` with the parameters of a request, and return its result, a Row, after a check.
        None if the processor does not apply to the request.  RequestError if the call fails; only this request is
        refused."""
        try:
            prompt = request.prompt.view()
            # a copy, because a processor must not change the prompt that is computed
            prompt.flags.writeable = False
            row = call_foreign(self.made.bind_prompt, request.params, prompt)
            return checks.bound(row, self.columns)
        except RequestError:
            raise
        except Exception as e:
            raise RequestError(
                f"{self.name} failed on this request: {describe_error(e, self.made)}"
            ) from e


class Salting(Protocol):
    """Adds the version of the model's weights to the salts of requests."""

    def salted(self, salt: tuple[str, ...]) -> tuple[str, ...]:
        """Return a salt with which a request only shares cached prefixes that the current weights have computed."""
        ...


class Intake(Protocol):
    """The attributes of an engine that are needed to check a new request."""

    wiring: Wiring
    executor: Executor
    capacity: Capacity
    cache: KVCache
    clock: StepClock
    eos_ids: tuple[int, ...]
    processors: Processors
    strategies: Strategies
    binders: list[Binder]
    speculation: Speculation | None
    compression: Compression | None
    host_sampler: HostSampler | None

    @property
    def weights(self) -> Salting: ...


def binders(processors: Processors) -> list[Binder]:
    seams = processor_seams([name for name, _ in processors])
    return [
        Binder(seam, name, made, dict(made.columns()))
        for seam, (name, made) in zip(seams, processors, strict=True)
    ]


def host_draw(engine: Intake, seq: Seq) -> Any:
    """Return the function that draws the tokens of a sequence on the host, or None if its request has no
    ``logits_processors``.  RequestError if this engine cannot run them."""
    functions = seq.request.params.logits_processors
    sampler = cast("Sampler", engine.processors[-1][1])
    if not functions:
        return None
    if engine.host_sampler is None:
        raise RequestError(
            "logits_processors: this engine has nothing that runs them", "logits_processors"
        )
    return engine.host_sampler(seq, functions, sampler, seq.request.rows[-1])


def prepare(engine: Intake, request: Request) -> list[Branch]:
    """Check a new request, pass its parameters to the plug-ins, and return its branches (one for each answer)."""
    p = request.params
    compression = engine.compression
    check_read(p, engine.strategies, engine.processors, compression)
    if compression is not None:
        compression.bind(request)
    check_prompt(request, engine.wiring, engine.capacity.vocab_size, engine.cache, compression)
    if p.structured_outputs is not None and request.grammar is None:
        raise RequestError(
            "structured_outputs: the grammar was not compiled before the request was added",
            "structured_outputs",
        )
    constrained = request.grammar is not None
    request.stops = StopRule.of(p, engine.eos_ids, len(request.prompt), request.end, constrained)
    if (n := len(request.stops.ids)) > STOP_IDS:
        raise RequestError(
            f"{n} stop ids with the model's own; expected at most {STOP_IDS}", "stop_token_ids"
        )
    run = engine.clock.seams.run
    request.rows = tuple(run(one.seam, one.bind, request) for one in engine.binders)
    request.speculates = engine.speculation is not None and engine.speculation.serves(request)
    started = run("strategy", branches, engine.strategies, request)
    if compression is not None:
        compression.check(request, any(branch.guide is not None for branch in started))
    check_logprobs(request, engine.wiring, engine.capacity.vocab_size)
    check_taps(request, engine.wiring, engine.capacity, engine.executor)
    check_pooling(request, engine.capacity.hidden, engine.executor)
    return started


def salt_of_prompt(ids: np.ndarray, params: SamplingParams, wiring: Wiring) -> tuple[str, ...]:
    """Return the salt of a request that generates one token after the prompt ``ids`` i32 [n].  Only requests with an
    equal salt share cached prefixes."""
    from .request import Request

    request = Request("", ids, params, 0.0, end=len(ids) + 1)
    return salt_of(request, wiring)


def salt_of(request: Request, wiring: Wiring) -> tuple[str, ...]:
    """Return the strings that must be equal for two requests to share a cached prefix: the client's salt, the rotary
    embedding in use, the adapter, and a digest of the steering vectors and given routes."""
    switch = wiring.rope_switch
    taps = request.tapped
    longer = switch is not None and request.end - 1 > switch
    salt = (*request.params.salt, "longer") if longer else request.params.salt
    if request.adapter is not None:
        salt = (*salt, "adapter", request.adapter.files.stamp)
    return salt if taps is None or not taps.changes else (*salt, taps.salt)
