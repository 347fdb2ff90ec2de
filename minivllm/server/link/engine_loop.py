"""The engine's loop behind a link: commands in, one frame a turn out.  It knows neither text nor clients.

    link.receive(seconds)   [Frame(kind, header, columns), ...]; waits for the first at most that long
    turn                    commands, engine.step(), link.send(FRAME, header, columns)

What ends something (an abort, a cut, a stop) and questions are obeyed as they come, before a new request is looked at:
who has left costs nothing more.  New requests wait in a ``FairQueue`` in which owners take turns.

A turn sends one frame, or several where answers come with much to say: each is bounded, so that who reads them can do
something else between two.  A frame has a column entry for each branch that got tokens or ended in this turn, for all
requests together (of these types once ``frames.encode`` has it):

    stream i64 [R], sample i32 [R], count i32 [R], end u8 [R] (frames.ENDS), stop_id i32 [R] (-1: none)
    tokens i32 [sum(count)]
    scored u8 [R]: the rows that come with log-probabilities; for each of their tokens, in order:
    chosen f32, rank i32, tops i32 (how many of the best follow), and for those top_ids i32, top f32
    first i64, first_at f64, cached i32, entered f64 (they left the queue)    requests whose first token came
    prompts i64 [4 P]: (stream, first position, tokens, best of each) of scored parts of prompts of these requests; and
    prompt_chosen f32, prompt_rank i32, a token each, prompt_top_ids i32, prompt_top f32
    tap_rows i64 [3 B], tap_values f32     what branches read at points of the model (``taps``)
    done i64, done_at f64                  requests that ended, which is said after their last rows; joules f64 of them
                                           where a counter is read, NaN: not known

and in its header what is rare: accepted and refused requests, errors of branches, requests that failed once their
branches had ended, answers to questions, the engine's end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.owners import owner_count
from minivllm.core.engine.request import Request, Seq
from minivllm.core.engine.scores import Scores
from minivllm.core.external_calls import refusal
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.errors import EngineDeadError, RequestError, describe_error, shown
from minivllm.frontend.loop import TurnLoop
from minivllm.server.fair_queue import FairQueue

from . import state
from .compiling import LOOK, Compiling
from .frames import ENDS, ROW, Frame
from .pace import FIRST, LEAST, SHARED_FOR, SHARED_LEAST, SHARED_LEAST_ELSE, SHARED_TURN, TURN, Pace
from .taps import PooledTaps, PooledValues, fault, pooled

if TYPE_CHECKING:
    from minivllm.core.engine.flight import Flight
    from minivllm.core.interfaces.plan import StepPlan, StepResult

END = {reason: code for code, reason in enumerate(ENDS)}
HEARTBEAT = 1.0  # seconds after which a frame is sent though there is nothing to say
COMMANDS = frozenset(("add", "abort", "cut", "ask", "stop"))
FRAME = 1 << 16  # scores and tokens of a frame, after which the next begins: 0.5 MB, some milliseconds for who reads it
TOKEN = 32  # what a token weighs: text is made of it
NO_VECTORS = np.empty(0, np.float32)
PATIENCE = 0.005  # seconds of a turn for new requests: the running ones wait meanwhile
log = logging.getLogger("minivllm")


class Link(Protocol):
    """Two ends of it: a deque in this process, or a socket (``process_client``)."""

    def receive(self, seconds: float) -> list[Frame]:
        """What has come; waits for the first at most that long.  EngineDeadError if the other side is gone."""

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray]) -> None: ...


class _Live:
    """A request in the engine: its number on the link and which of its branches have been told to have ended."""

    __slots__ = ("ended", "energy", "number", "reads", "request", "started")

    def __init__(
        self, number: int, request: Request, reads: Sequence[tuple[str, str]] = (), energy: bool = False
    ) -> None:
        self.number, self.request, self.reads = number, request, reads
        self.energy = energy  # its end is told once its joules are known
        self.ended: set[int] = set()
        self.started = False


class EngineLoop(TurnLoop):
    """``run`` returns when the link says stop, is gone, or (``ends``) the engine is dead."""

    longest = HEARTBEAT

    def __init__(self, engine: Engine, link: Link, ends: bool = False) -> None:
        super().__init__(engine)
        self.link, self.ends = link, ends
        self.live: dict[int, _Live] = {}
        self.stopping = False
        self.turned = time.monotonic()  # when the last turn began
        self.accepted = 0  # requests that the engine took: at rest, as many as have finished
        self.turns, self.own_seconds = 0, 0.0  # turns with a frame, and what commands and frames took in them
        self.arriving: FairQueue[Frame] = FairQueue()  # requests that nobody has looked at
        budget = engine.planner.max_tokens
        device = engine.wiring.device
        first = FIRST if device == "cpu" else budget
        self.paces = Pace(budget, first), Pace(budget, first)  # of prompts, and of those that are scored
        self.shared_until = 0.0  # time.monotonic until which steps are short, as several owners were served
        self.shared_least = SHARED_LEAST.get(device, SHARED_LEAST_ELSE)  # tokens, where several owners are served
        self.prompt_tokens = 0  # that were computed
        self.decode_seconds, self.decode_rows = 0.0, 1  # of the last step without prompt tokens
        self._came_back: list[StepPlan] = []  # plans of the steps that came back in this turn
        engine.events.publishing.subscribe(self._published)
        made = engine.grammars
        self.compiling = Compiling(
            lambda params: made.find(params.structured_outputs, params.salt),
            lambda params: made.compile(params.structured_outputs, params.salt),
            getattr(made, "workers", 1),
            lambda params: made.stop(params.structured_outputs, params.salt),
        )
        self._sent = 0.0
        self._told_dead = False
        engine.events.tokens_streamed.subscribe(self._tell)
        self.frames: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []  # of this turn, full
        self._clear()

    @property
    def over(self) -> bool:
        return self.stopping or (self.ends and self._told_dead)

    def leave(self, error: BaseException | None) -> None:
        self.compiling.close()
        if not isinstance(error, EngineDeadError):  # of the link, at whose other end nobody is
            self._flush()

    def patience(self) -> float:
        wait = 0.0 if self.arriving else super().patience() or 0.0
        return min(wait, LOOK) if self.compiling else wait

    def turn(self, wait: float | None = 0.0) -> bool:
        """Commands, one step, one frame; False if the engine found nothing to do."""
        self.turned = time.monotonic()
        came = self.link.receive(wait or 0.0)
        begin = time.perf_counter()
        self._obey(came, begin + PATIENCE)
        for live, error in self.compiling.ready():
            self._enter(live, error)
        middle = time.perf_counter()
        worked = not self.engine.dead and self.engine.busy and self._step()
        after = time.perf_counter()
        if self._flush():
            self.turns += 1
            self.own_seconds += time.perf_counter() - after + middle - begin
        return worked

    def _published(self, publish: Callable[[Flight, StepResult], None], flight: Flight, result: StepResult) -> None:
        """Remember the plan of a step that has come back, for ``_step``."""
        self._came_back.append(flight.plan)
        publish(flight, result)

    def _step(self) -> bool:
        """Run a step with as many prompt tokens as end in time, and learn what it took."""
        engine, start = self.engine, time.perf_counter()
        engine.planner.most_prefill = self._most_prefill()
        worked = engine.step()
        if self._came_back:
            plans, self._came_back = self._came_back, []
            self._note(plans, time.perf_counter() - start)
        return worked

    def _note(self, plans: Sequence[StepPlan], seconds: float) -> None:
        """Steps of these plans have come back after so many seconds in all."""
        q_len = np.concatenate([plan.q_len for plan in plans]).astype(np.int64)
        chunk = q_len > 1
        rows = len(q_len) - int(np.count_nonzero(chunk))
        if rows == len(q_len):
            self.decode_seconds, self.decode_rows = seconds / len(plans), max(rows // len(plans), 1)
            return
        tokens = q_len[chunk]
        context = np.concatenate([plan.computed for plan in plans])[chunk] + tokens / 2
        # prompts are not to blame for what decodes take anyway
        decodes = self.decode_seconds * min(rows / self.decode_rows, 1.0)
        scored = any(len(plan.prompt) for plan in plans)
        total = int(tokens.sum())
        self.prompt_tokens += total
        self.paces[scored].note(total, float(tokens @ context) / total, max(seconds - decodes, 0.2 * seconds))

    def _most_prefill(self) -> int:
        """Return the most prompt tokens that the next step may have."""
        p, s = self.engine.planner, self.engine.planner.slots
        if not p.n_waiting and p.steady is not None and p.steady.changes == s.changes:
            return p.most_prefill  # rows go on as they did: none of them has a prompt to compute
        heads = p.waiting.heads() if p.n_waiting else []
        context = int(s.computed[s.running[p.need(s.running) > 1]].max(initial=0))
        if heads:
            context = max(context, int(p.cache.hints(heads).max()))
        scored = s.asking > 0 or any(seq.request.prompt_topk >= 0 for seq in heads)
        now = time.monotonic()
        if p.shared and owner_count(s, s.running, heads) > 1:
            self.shared_until = now + SHARED_FOR
        several = now < self.shared_until
        turn, least = (SHARED_TURN, self.shared_least) if several else (TURN, LEAST)
        return self.paces[scored].most(context, turn, least)

    # ---- commands ------------------------------------------------------------------------------------------------

    def _obey(self, came: list[Frame], until: float) -> None:
        for command in came:
            if command.kind not in COMMANDS:
                raise EngineDeadError(f"{command.kind!r} is no command; want one of {sorted(COMMANDS)}")
            if command.kind == "add":
                self.arriving.push(command.header.get("owner", ""), command.header["number"], command)
            else:
                getattr(self, f"_do_{command.kind}")(**command.header, **command.columns)
        while (next_up := self.arriving.pop()) is not None:
            command = next_up[2]
            self._do_add(**{**command.header, **command.columns})
            if time.perf_counter() > until:
                break

    def _do_add(
        self,
        number: int,
        id: str,
        params: dict[str, Any],
        prompt: np.ndarray,
        arrival: float,
        watch: bool,
        owner: str = "",
        taps: Sequence[Sequence[Any]] = (),
        reads: Sequence[Sequence[str]] = (),
        vectors: np.ndarray = NO_VECTORS,
        energy: bool = False,
    ) -> None:
        try:
            if params.get("logit_bias"):  # the keys of a JSON object are strings
                params = {**params, "logit_bias": {int(i): by for i, by in params["logit_bias"].items()}}
            made = SamplingParams.make(**params)
            _travels(made)
            asked = PooledTaps.of(taps, reads, vectors)
            live: _Live  # whom the request tells
            request = Request(
                id,
                np.asarray(prompt, np.int32),
                made,
                arrival,
                owner=owner,
                watch=watch,
                stream=number if made.logprobs is None else 0,
                sink=lambda seq, ids, ended: self._sink(live, seq, ids, ended),
                on_done=lambda request: self._ended(live),
                taps=asked.taps,
            )
            live = _Live(number, request, asked.reads, energy)
        except BaseException as e:
            self._refuse(number, e)
            return
        if made.structured_outputs is None or self.engine.grammars is None or self.engine.dead:
            self._enter(live)
        else:
            self.compiling.begin(number, live)

    def _enter(self, live: _Live, error: BaseException | None = None) -> None:
        """The engine takes a request, or it is refused."""
        try:
            if error is not None:
                raise error
            self.engine.add(live.request)
        except BaseException as e:
            self._refuse(live.number, e)
        else:
            self.live[live.number] = live
            self.accepted += 1
            self.header.setdefault("accepted", []).append(live.number)

    def _refuse(self, number: int, error: BaseException) -> None:
        why = refusal(error)
        words = [number, type(why).__name__, str(why), getattr(why, "param", None)]
        self.header.setdefault("refused", []).append(words)

    def _do_abort(self, number: int) -> None:
        if self.arriving.remove(number) is not None or self.compiling.cancel(number):
            self._refuse(number, RequestError("the request was aborted"))
        elif (live := self.live.get(number)) is not None:
            self.engine.abort(live.request.id)

    def _do_cut(self, number: int, sample: int, stop: str) -> None:
        """End a branch whose text, which is made elsewhere, has ended: by a stop string, or (empty) for its reader."""
        if (live := self.live.get(number)) is None:
            return
        for seq in live.request.sequences:
            if seq.sample == sample and seq.finish_reason is None:
                live.ended.add(sample)
                self.engine.finish(seq, "stop", stop_reason=stop or None)

    def _do_ask(self, ask: int, what: str, args: dict[str, Any]) -> None:
        try:
            answer = [ask, getattr(self, f"_ask_{what}")(**args), None]
        except BaseException as e:
            answer = [ask, None, describe_error(e).split(": ", 1)]
        self.header.setdefault("answers", []).append(answer)

    def _ask_stats(self) -> dict[str, Any]:
        turns = max(self.turns, 1)
        return {
            **self.engine.stats(),
            "prompt_tokens": self.prompt_tokens,
            "loop_turns": self.turns,
            "loop_ms": 1e3 * self.own_seconds / turns,
        }

    def _ask_state(self, trim: bool) -> dict[str, Any]:
        tables = {"live": len(self.live), "compiling": len(self.compiling), "arriving": len(self.arriving)}
        return state.engine(self.engine, tables, self.accepted, trim)

    def _ask_reset_prefix_cache(self) -> bool:
        self.engine.reset_prefix_cache()
        return True

    def _ask_profile(self, start: bool, path: str) -> str:
        self.engine.call("profile_start") if start else self.engine.call("profile_stop", {"path": path})
        return path

    def _do_stop(self) -> None:
        self.stopping = True

    # ---- frames --------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self.header: dict[str, Any] = {}
        self.rows: list[tuple[int, int, int, int, int, int]] = []  # stream, sample, count, end, stop_id, scored
        self.tokens: list[int] = []
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []  # such rows [6, R], their tokens; before ``rows``
        self.scores = Scores()
        self.firsts: list[tuple[int, float, int, float]] = []
        self.prompts: list[tuple[int, int, Any]] = []  # stream, first position, plan.LogProbs
        self.dones: list[tuple[int, float, float]] = []  # number, end, joules
        self.tapped = PooledValues()
        self.weight = 0

    def _tell(self, stream: np.ndarray, sample: np.ndarray, token: np.ndarray) -> None:
        """A token each for branches that go on: by far the most of what there is to say, so in no row's Python."""
        self._part()
        rows = np.empty((6, len(token)), np.int64)
        rows[0], rows[1], rows[2], rows[3], rows[4], rows[5] = stream, sample, 1, 0, -1, 0
        self.parts.append((rows, token))

    def _part(self) -> None:
        """What came row by row takes its place in the order."""
        if self.rows:
            self.parts.append((np.array(self.rows, np.int64).T, np.array(self.tokens, np.int32)))
            self.rows, self.tokens = [], []

    def _sink(self, live: _Live, seq: Seq, ids: list[int], ended: Finish | None) -> None:
        if seq.sample in live.ended:
            return
        if not live.started and ids:
            live.started = True
            r = live.request
            at = r.first_token or self.engine.now()
            self.firsts.append((live.number, at, r.cached_tokens, r.scheduled or at))
            self._scored_prompt(live)
        end, stop_id = 0, -1
        if ended is not None:
            live.ended.add(seq.sample)
            end = END[ended.reason]
            stop_id = ended.stop if isinstance(ended.stop, int) else -1  # stop strings are found on the other side
        scored = live.request.params.logprobs is not None and bool(ids)
        begin, each = seq.emitted - len(ids), FRAME // (TOKEN + live.request.logprobs * scored) or 1
        while len(ids) > each:
            self._row(live, seq, ids[:each], 0, -1, begin if scored else None)
            ids, begin = ids[each:], begin + each
        self._row(live, seq, ids, end, stop_id, begin if scored else None)

    def _row(self, live: _Live, seq: Seq, ids: list[int], end: int, stop_id: int, begin: int | None) -> None:
        """A part of an answer; the scores of its tokens begin at ``begin`` of the sequence's, None: it has none."""
        self.rows.append((live.number, seq.sample, len(ids), end, stop_id, begin is not None))
        self.tokens += ids
        weight = TOKEN * len(ids)
        if begin is not None:
            part = seq.logprobs[begin : begin + len(ids)]
            self.scores.extend(part)  # whole columns at once: an answer may come with all of its scores
            weight += len(ids) * live.request.logprobs
        self._weigh(weight)

    def _scored_prompt(self, live: _Live) -> None:
        for first, part in live.request.prompt_parts:
            count, best = part.top_ids.shape
            each = FRAME // (best + 1) or 1
            for at in range(0, count, each):
                some = slice(at, at + each)
                cut = LogProbs(part.chosen[some], part.rank[some], part.top_ids[some], part.top[some])
                self.prompts.append((live.number, first + at, cut))
                self._weigh(cut.top_ids.size + len(cut.rank))

    def _weigh(self, weight: int) -> None:
        """A frame that is full waits for the end of the turn."""
        self.weight += weight
        if self.weight >= FRAME:
            self._part()
            self.frames.append((self.header, self._columns()))
            self._clear()

    def _ended(self, live: _Live) -> None:
        if live.energy and self.engine.energy is not None:
            self.engine.energy.when_known(live.request, lambda: self._done(live))
        else:
            self._done(live)

    def _done(self, live: _Live) -> None:
        request = live.request
        self.live.pop(live.number, None)
        for sample, values in pooled(request, live.reads):
            self._weigh(self.tapped.add(live.number, sample, values))
        for seq in request.sequences:
            if seq.sample not in live.ended:  # aborted or failed: no sink was told
                self.rows.append((live.number, seq.sample, 0, END[seq.finish_reason or "abort"], -1, 0))
                if seq.error:
                    self.header.setdefault("errors", []).append([live.number, *fault(self.engine, seq)])
            elif seq.error:  # its last row has been sent: what failed is the answer as a whole
                self.header.setdefault("failed", []).append([live.number, seq.error])
        if request.params.width > 1 and not self.engine.dead:
            order = [seq.sample for seq in self.engine.answer(request)]
            self.header.setdefault("order", []).append([live.number, order])
        self.dones.append((live.number, request.finished or self.engine.now(), joules_of(request)))

    def _flush(self) -> bool:
        """Send what this turn gave, or a sign of life if nothing was sent for a while."""
        now = time.monotonic()
        if self.engine.dead and not self._told_dead:
            self._told_dead, self.header["dead"] = True, self.engine.dead
        self._part()
        full = bool(self.parts or self.header or self.dones or self.frames)
        if not full and now - self._sent < HEARTBEAT:
            return False
        frames, self.frames = [*self.frames, (self.header, self._columns())], []
        self._clear()
        self._sent = now
        for header, columns in frames:
            self.link.send(header, columns)
        return full

    def _columns(self) -> dict[str, np.ndarray]:
        columns = self.tapped.columns()
        if self.parts:
            rows, tokens = (np.concatenate(some, axis=-1) for some in zip(*self.parts, strict=True))
            columns |= dict(zip((*ROW, "tokens"), (*rows, tokens), strict=True))
        if self.scores:
            found = self.scores
            columns["chosen"], columns["top"] = np.array(found.chosen, np.float32), np.array(found.top, np.float32)
            columns["rank"], columns["top_ids"] = np.array(found.rank, np.int32), np.array(found.top_ids, np.int32)
            columns["tops"] = np.diff(found.ends).astype(np.int32)
        if self.firsts:
            number, at, cached, entered = zip(*self.firsts, strict=True)
            columns["first"], columns["first_at"] = np.array(number, np.int64), np.array(at, np.float64)
            columns["cached"], columns["entered"] = np.array(cached, np.int32), np.array(entered, np.float64)
        if self.prompts:
            sizes = [(number, first, *part.top_ids.shape) for number, first, part in self.prompts]
            columns["prompts"] = np.array(sizes, np.int64).ravel()
            for name in ("chosen", "rank", "top_ids", "top"):
                flat = np.concatenate([getattr(part, name).ravel() for _, _, part in self.prompts])
                columns[f"prompt_{name}"] = flat.astype(np.float32 if name in ("chosen", "top") else np.int32)
        if self.dones:
            number, at, joules = zip(*self.dones, strict=True)
            columns["done"], columns["done_at"] = np.array(number, np.int64), np.array(at, np.float64)
            columns |= {} if self.engine.energy is None else {"joules": np.array(joules, np.float64)}
        return columns


def joules_of(request: Request) -> float:
    joules = None if request.energy is None else request.energy.joules
    return np.nan if joules is None else joules


def _travels(params: SamplingParams) -> None:
    """RequestError for what is decided by the text, which is made on the client's side."""
    if params.beam_width is not None and params.stop:
        raise RequestError(
            f"stop={shown(params.stop)} beside beam_width: want stop_token_ids, or an LLM in this process", "stop"
        )
