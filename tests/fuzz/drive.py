"""The engines of a case, driven by whole calls, interleaved streams and tasks that are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import pictures
from .adapters import lora_of
from .cases import Ask, Case
from .configs import VOCAB, device_defaults
from .functions import sampling_params, taps_of
from .models import draft_of, path_of
from .weights import FIRST_TURNS, NOT_FINITE, Call, EngineWeights, refusal_of

STRATEGIES = ["single", "parallel", "beam", "guidance"]
REST_SECONDS = 20.0  # seconds until an engine must be at rest after its clients have left
Stage = Callable[[str], None]
Change = tuple[int, str, list[Call]]  # number of an engine, kind, calls


@dataclass
class Output:
    index: int
    tokens: list[int]
    text: str
    finish: str | None
    stop: int | str | None
    cumulative: float | None
    score: float | None
    logprobs: list[list[tuple[int, float, int | None]]] | None  # (id, log-probability, rank) for each token
    taps: dict[str, Any] | None = None  # values that were read, f32 [positions, width] by point
    versions: list[int] = field(default_factory=list)  # of the weights that drew each token, and of the last one
    version: int = 0


@dataclass
class Answer:
    """The answer to a request.  ``pieces`` are the streamed tokens of each output, and ``texts`` their text."""

    outputs: list[Output] = field(default_factory=list)
    error: str | None = None
    refused: str | None = None
    prompt_logprobs: list[Any] | None = None
    pieces: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    streamed: bool = False
    left: bool = False
    ended: bool = False
    mixed: bool = False  # other weights came while the request ran
    drafted: int = 0
    accepted: int = 0
    cached: int = 0

    def take(self, output: Any) -> None:
        """Store the whole answer of a ``RequestOutput``."""
        self.ended, self.error = True, output.error
        self.outputs = [
            Output(
                o.index,
                list(o.token_ids),
                o.text,
                o.finish_reason,
                o.stop_reason,
                o.cumulative_logprob,
                o.score,
                None if o.logprobs is None else [_entries(step) for step in o.logprobs],
                o.taps,
                list(o.weights_versions),
                o.weights_version,
            )
            for o in output.outputs
        ]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None if step is None else _entries(step) for step in output.prompt_logprobs]
        m = output.metrics
        self.drafted, self.accepted, self.cached = m.drafted_tokens, m.accepted_tokens, m.cached_tokens

    def piece(self, piece: Any) -> bool:
        """Store a piece of a stream, and return True if it was the last."""
        self.streamed = True
        self.pieces.setdefault(piece.index, []).extend(piece.token_ids)
        self.texts[piece.index] = self.texts.get(piece.index, "") + piece.delta
        if piece.finished:
            self.take(piece.output)
        return piece.finished


def _entries(step: Any) -> list[tuple[int, float, int | None]]:
    return [(int(t), float(lp.logprob), lp.rank) for t, lp in step.items()]


def engine_options(options: dict[str, Any], case_device: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Return the keywords of ``LLM`` for plain options."""
    made = {k: v for k, v in options.items() if v is not None}
    model, weights = made["model"], made.pop("weights", 0)
    if made.get("drafter") == "model":
        made["drafter"] = {"name": "model", "options": {"model": draft_of(folder, model)}}
    made["model"] = path_of(folder, model, weights)
    own: dict[str, Any] = {"skip_tokenizer_init": model != "pocket", "strategies": STRATEGIES}
    if "encoder" in made:
        own["allow_targets"] = [pictures.__name__]
    return {**device_defaults(case_device), "dtype": dtype, **own, **made}


def _draft_despite_doubts(engine: Any, rng: random.Random) -> None:
    """Let most engines with native drafts make all drafts.  Those of random heads would end at once otherwise."""
    native = getattr(getattr(engine.executor, "runner", None), "native", None)
    if native is not None and native.drafts is not None:
        native.drafts.least = rng.choice([0.0, 0.0, 0.01, native.drafts.least])


class Run:
    """A run of a case.  ``prompt_of(index)`` returns the prompt of a request.

    ``broken`` has the faults of engines themselves, as (kind, message).
    """

    def __init__(self, case: Case, folder: Path, prompt_of: Callable[[int], list[int]], stage: Stage) -> None:
        self.case, self.folder, self.prompt_of, self.stage = case, folder, prompt_of, stage
        self.answers = [Answer() for _ in case.asks]
        self.broken: list[tuple[str, str]] = []
        self.stats: list[dict[str, Any]] = []
        self.captured: Counter[str] = Counter()  # number of steps that ran as captures, by kind
        self.engines: list[Any] = []
        self.rng = random.Random(f"drive {case.seed}")
        self.changes = random.Random(f"changes {case.seed}")
        self.weights = [EngineWeights(folder, options, case.device, self.changes) for options in case.engines]
        self.changed: Counter[str] = Counter()  # number of changes of weights, by kind

    def play(self) -> None:
        from minivllm import LLM, AsyncLLM, EngineDeadError

        made: type = AsyncLLM if self.case.drive == "async" else LLM
        try:
            for i, options in enumerate(self.case.engines):
                self.stage(f"engine {i}")
                engine = made(**engine_options(options, self.case.device, self.case.dtype, self.folder))
                engine.engine.checked = self.case.walk
                _draft_despite_doubts(engine.engine, random.Random(f"doubts {self.case.seed} {i}"))
                self._count_captured(engine.engine)
                self.engines.append(engine)
            with contextlib.suppress(EngineDeadError):  # said below
                if self.case.drive == "async":
                    asyncio.run(self._tasks())
                else:
                    self._waves(self._call if self.case.drive == "generate" else self._streams)
            for i, engine in enumerate(self.engines):
                self.stage(f"rest {i}")
                self._look(engine.engine)
        finally:
            for engine in self.engines:
                engine.close()
            self.engines.clear()

    def _count_captured(self, engine: Any) -> None:
        graphs = getattr(getattr(engine.executor, "runner", None), "graphs", None)
        if graphs is None:
            return
        from minivllm.device.worker.graphs import TappedKey  # needs triton

        forward, sample = graphs.forward, graphs.sample

        def counting(key: Any, *args: Any) -> Any:
            made = forward(key, *args)
            self.captured[key.kind] += made is not None
            self.captured["tapped"] += made is not None and isinstance(key, TappedKey)
            return made

        def drawing(*args: Any) -> Any:
            made = sample(*args)
            self.captured["draw"] += made is not None
            return made

        graphs.forward, graphs.sample = counting, drawing

    # ---- by hand -------------------------------------------------------------------------------------------------

    def _waves(self, drive: Callable[[list[int]], None]) -> None:
        for wave in sorted({a.wave for a in self.case.asks}):
            for on, kind, calls in self._before(wave):
                self._do(on, kind, calls)
            self.stage(f"{self.case.drive}, wave {wave}")
            drive([i for i, a in enumerate(self.case.asks) if a.wave == wave])
        for i, llm in enumerate(self.engines):
            self.stage(f"engine {i} comes to rest")
            _settle(llm.engine)

    def _before(self, wave: int) -> Iterator[Change]:
        """Yield the changes before a wave: a reset of the prefix cache, a calm one, and the set of the wave."""
        for on, own in enumerate(self.weights):
            if wave in self.case.resets:
                yield on, "reset", [("reset_prefix_cache", {})]
                yield on, *own.calm()
            sets = self.case.weights
            yield on, "other weights", own.to(sets[wave] if wave < len(sets) else 0)

    def _within(self, wave: int) -> list[Change]:
        """Return the changes while the requests of a wave run, with marks for those that get other weights."""
        made: list[Change] = []
        for _ in range(self.case.changes):
            on = self.changes.randrange(len(self.weights))
            made.append((on, *self.weights[on].calm()))
        if wave in self.case.mixed:
            on = self.changes.randrange(len(self.weights))
            if calls := self.weights[on].to(1 - self.weights[on].set):
                made.append((on, "mixed weights", calls))
        for i, ask in enumerate(self.case.asks):
            self.answers[i].mixed |= ask.wave == wave and (ask.engine, "mixed weights") in [one[:2] for one in made]
        return made

    def _do(self, on: int, kind: str, calls: list[Call]) -> None:
        """Make a change, with an engine that is driven by hand."""
        from minivllm import RequestError

        self.stage(f"{kind}, engine {on}")
        llm = self.engines[on]
        try:
            for name, args in calls:
                getattr(llm, name)(**args)
            self._count(kind, calls)
        except RequestError as e:
            self._refused(on, kind, e)
            if llm.engine.weights.paused:
                llm.resume()

    def _count(self, kind: str, calls: list[Call]) -> None:
        """Count a change that was made."""
        self.changed[kind] += bool(calls)
        if kind == "refused":
            self.broken.append(("weights", "an update with a number that is not finite was accepted"))

    def _refused(self, on: int, kind: str, error: Exception) -> None:
        """Raise a refusal without a reason that is known."""
        if (reason := refusal_of(kind, str(error))) is None:
            raise error
        self.changed["refused"] += reason == NOT_FINITE
        if self.engines[on].engine.weights.level:
            self.broken.append(("weights", f"the engine still sleeps: {error}"))

    def _params(self, ask: Ask) -> Any:
        return sampling_params(ask.params, VOCAB[self.case.engines[ask.engine]["model"]])

    def _prompt(self, i: int) -> dict[str, Any]:
        """Return the prompt of a request with its images."""
        ask = self.case.asks[i]
        return pictures.prompt_of(self.prompt_of(i), ask.params, self.case.engines[ask.engine])

    def _taps(self, ask: Ask) -> list[Any]:
        return taps_of(ask.params, self.engines[ask.engine].engine.capacity.taps)

    def _lora(self, ask: Ask) -> Any:
        return lora_of(ask.params, self.folder, self.case.engines[ask.engine]["model"])

    def _call(self, which: list[int]) -> None:
        from minivllm import RequestError

        for on, llm in enumerate(self.engines):
            mine = [i for i in which if self.case.asks[i].engine == on]
            if not mine:
                continue
            asks = [self.case.asks[i] for i in mine]
            prompts = [self._prompt(i) for i in mine]
            try:
                taps = [self._taps(a) for a in asks]
                loras = [self._lora(a) for a in asks]
                made = [self._params(a) for a in asks]
                got = llm.generate(prompts, made, use_tqdm=False, taps=taps, lora_request=loras)
            except RequestError as e:
                for i in mine:
                    self.answers[i].refused = str(e)
                continue
            for i, output in zip(mine, got, strict=True):
                self.answers[i].take(output)

    def _streams(self, which: list[int]) -> None:
        """Read streams of all engines in a random order; some clients leave."""
        from minivllm import RequestError

        open_: dict[int, Any] = {}
        waiting, turn, pieces = list(which), 0, dict.fromkeys(which, 0)
        changes = self._within(self.case.asks[which[0]].wave)
        turns = sorted(self.changes.randrange(1, FIRST_TURNS) for _ in changes)
        while waiting or open_:
            while turns and turns[0] <= turn:
                turns.pop(0)
                self._do(*changes.pop(0))
            for i in [i for i in waiting if self.case.asks[i].delay <= turn or not open_]:
                waiting.remove(i)
                ask = self.case.asks[i]
                prompt = self._prompt(i)
                try:
                    open_[i] = self.engines[ask.engine].stream(
                        prompt, self._params(ask), self._taps(ask), self._lora(ask)
                    )
                except RequestError as e:
                    self.answers[i].refused = str(e)
            turn += 1
            if not open_:
                continue
            i = self.rng.choice(list(open_))
            try:
                last = self.answers[i].piece(next(open_[i]))
            except StopIteration:
                last = True
            pieces[i] += 1
            leaves = not last and self.case.asks[i].leave is not None and pieces[i] >= self.case.asks[i].leave
            if leaves:
                self.answers[i].left = True
            if last or leaves:
                open_.pop(i).close()
        for change in changes:
            self._do(*change)

    # ---- tasks ---------------------------------------------------------------------------------------------------

    async def _tasks(self) -> None:
        for wave in sorted({a.wave for a in self.case.asks}):
            for change in self._before(wave):
                await self._ask_for(*change)
            self.stage(f"async, wave {wave}")
            which = [i for i, a in enumerate(self.case.asks) if a.wave == wave]
            await asyncio.gather(*(self._task(i) for i in which), self._change(self._within(wave)))
        for i, llm in enumerate(self.engines):
            self.stage(f"engine {i} comes to rest")
            until = time.monotonic() + REST_SECONDS
            while llm.engine.busy and not llm.engine.dead and time.monotonic() < until:
                await asyncio.sleep(0.002)
            await llm._ask(lambda: None)  # the engine's thread may still run its last step

    async def _change(self, changes: list[Change]) -> None:
        """Make changes one after another while requests run."""
        for change in changes:
            await asyncio.sleep(self.changes.uniform(0, 0.03))
            await self._ask_for(*change)

    async def _ask_for(self, on: int, kind: str, calls: list[Call]) -> None:
        """Make a change, with an engine that runs in its own thread; steps may run between the calls."""
        from minivllm import RequestError

        llm = self.engines[on]
        try:
            for name, args in calls:
                if name == "reset_prefix_cache":
                    await llm._ask(llm.engine.reset_prefix_cache)
                else:
                    await getattr(llm, name)(**args)
                await asyncio.sleep(self.changes.choice([0, 0, 0.005]))
            self._count(kind, calls)
        except RequestError as e:
            self._refused(on, kind, e)
            if llm.engine.weights.paused:
                await llm.resume()

    async def _task(self, i: int) -> None:
        from minivllm import RequestError

        ask, answer, pieces = self.case.asks[i], self.answers[i], 0
        await asyncio.sleep(0.003 * ask.delay)
        prompt = self._prompt(i)
        more = {"taps": self._taps(ask), "lora_request": self._lora(ask)}
        stream = self.engines[ask.engine].generate(prompt, self._params(ask), **more)
        task = asyncio.current_task()
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    pieces += 1
                    if answer.piece(piece):
                        return
                    if ask.leave is not None and pieces == ask.leave:
                        answer.left = True
                        if ask.leave % 2:  # odd numbers cancel the task while it waits, even ones stop reading
                            assert task is not None
                            asyncio.get_running_loop().call_soon(task.cancel)
                        else:
                            return
        except RequestError as e:
            answer.refused = str(e)
        except asyncio.CancelledError:
            if not answer.left:
                raise

    # ---- afterwards ----------------------------------------------------------------------------------------------

    def _look(self, engine: Any) -> None:
        """Check that an engine without clients has released everything."""
        if engine.dead:
            self.broken.append(("dead", engine.dead))
            return
        self.stats.append(engine.stats())
        reported = {
            "requests": len(engine.requests),
            "steps in flight": len(engine.in_flight),
            "running": len(engine.slots.running),
            "waiting": engine.planner.n_waiting,
            "departed": len(engine.planner.departed),
        }
        if engine.images is not None:
            contents = engine.images.contents.values()
            reported |= {"rows of images": len(engine.images.held), "images": sum(one.requests for one in contents)}
        left = {name: n for name, n in reported.items() if n}
        for g, pool in enumerate(engine.cache.pools):
            if pool.held or pool.free + pool.idle != pool.total - 1:
                left[f"blocks of pool {g}"] = pool.held
        if left:
            self.broken.append(("leak", ", ".join(f"{n} {name}" for name, n in left.items()) + " left behind"))
        try:
            engine.check()
        except AssertionError as e:
            self.broken.append(("leak", f"the walk over the cache: {e}"))


def _settle(engine: Any) -> None:
    """Collect the steps in flight whose rows have left."""
    until = time.monotonic() + REST_SECONDS
    while engine.busy and not engine.dead and time.monotonic() < until:
        if not engine.step():
            time.sleep(engine.idle())
