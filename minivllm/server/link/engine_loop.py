"""The engine's loop behind a link to its client: receive commands, run a step, send a frame, without text or clients.

    link.receive(seconds)   [Frame(kind, header, columns), ...]; waits at most ``seconds`` for the first
    turn                    commands, engine.step(), link.send(header, columns)

Aborts, cuts, stops and questions are handled as they come, before any new request.  So an aborted request costs nothing
more.  New requests wait in a ``FairQueue`` in which owners take turns.

A turn sends one frame, or several if it has many scores.  The size of each frame is limited, so that its reader can do
other work between two.  A frame has entries for each branch that got tokens or ended in the turn, for all requests
together (``frames.encode`` gives the columns these dtypes):

    stream i64 [R], sample i32 [R], count i32 [R], end u8 [R] (frames.ENDS), stop_id i32 [R] (-1 means none)
    tokens i32 [sum(count)]
    scored u8 [R]: 1 for rows whose tokens have log-probabilities.  For each of these tokens, in order:
    chosen f32, rank i32, tops i32 (number of best tokens), and for each best token: top_ids i32, top f32
    first i64, first_at f64, cached i32, entered f64    requests whose first token came; ``entered`` is the time at
                                           which they left the queue
    prompts i64 [4 P]: (stream, first position, tokens, best of each) of scored parts of these requests' prompts
    prompt_chosen f32, prompt_rank i32 for each token of a part, prompt_top_ids i32, prompt_top f32
    tap_rows i64 [3 B], tap_values f32     values that branches read at points of the model (``taps``), embeddings
    done i64, done_at f64                  requests that ended, after their last rows; with joules f64 if the engine
                                           reads a counter of joules, NaN if unknown

Rare facts are in the header: accepted and refused requests, errors of branches, requests that failed after their
branches had ended, answers to questions, the end of the engine.
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
from minivllm.core.engine.request_checks import salt_of_prompt
from minivllm.core.engine.scores import Scores
from minivllm.core.external_calls import refusal
from minivllm.core.interfaces.adapters import LoRARequest
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LogProbs
from minivllm.errors import EngineDeadError, RequestError, describe_error, shown
from minivllm.frontend.loop import TurnLoop
from minivllm.frontend.pooling import PromptPooling
from minivllm.server.fair_queue import FairQueue

from . import state
from .compiling import LOOK, Compiling
from .frames import ENDS, ROW, Frame
from .images import images_of
from .pace import FIRST, LEAST, SHARED_FOR, SHARED_LEAST, SHARED_LEAST_ELSE, SHARED_TURN, TURN, TurnPace
from .routes import RouteColumns, routes_read
from .snapshot import Snapshots
from .taps import PooledTaps, PooledValues, embedded, fault, pooled

if TYPE_CHECKING:
    from minivllm.core.engine.flight import Flight
    from minivllm.core.interfaces.plan import StepPlan, StepResult

END = {reason: code for code, reason in enumerate(ENDS)}
HEARTBEAT = 1.0  # seconds after which an idle loop sends an empty frame
COMMANDS = frozenset(("add", "abort", "cut", "ask", "stop"))
# weight of the content of a full frame, which is about 0.5 MB and is read in some milliseconds: each log-probability
# weighs 1, and each token ``TOKEN``
FRAME = 1 << 16
TOKEN = 32  # weight of a token in a frame, because its reader must convert the token to text
NO_VECTORS = np.empty(0, np.float32)
NO_IMAGES = np.empty(0, np.int64)
PATIENCE = 0.005  # seconds of a turn for new requests, because running requests wait meanwhile
log = logging.getLogger("minivllm")


class Link(Protocol):
    """The connection to the client: a queue in the same process (``LocalClient``) or a socket (``SocketLink``)."""

    def receive(self, seconds: float) -> list[Frame]:
        """Return received frames, waiting at most ``seconds`` for the first.

        Raise EngineDeadError if the client is gone.
        """

    def send(self, header: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        """Send a frame."""


class _Live:
    """A request in the engine.

    ``number`` is the number of its stream on the link.  ``ended`` has the samples of branches whose end was reported.
    ``reads`` are the reads of ``PooledTaps``.  With ``energy``, the end of the request is reported only when its joules
    are known.
    """

    __slots__ = ("ended", "energy", "number", "reads", "request", "started")

    def __init__(
        self, number: int, request: Request, reads: Sequence[tuple[str, str]] = (), energy: bool = False
    ) -> None:
        self.number = number
        self.request = request
        self.reads = reads
        self.energy = energy
        self.ended: set[int] = set()
        self.started = False  # whether the first token of the stream was reported


class EngineLoop(TurnLoop):
    """Runs the engine.

    ``run`` returns after the command to stop, when the link is closed or, with ``ends``, when the engine is dead.
    """

    longest = HEARTBEAT

    def __init__(self, engine: Engine, link: Link, ends: bool = False) -> None:
        super().__init__(engine)
        self.link = link
        self.ends = ends
        self.live: dict[int, _Live] = {}
        self.stopping = False
        self.turned = time.monotonic()  # time at which the last turn began
        self.accepted = 0  # number of requests that the engine accepted; as many have finished once none runs
        self.turns = 0  # number of turns with a frame
        self.own_seconds = 0.0  # seconds of commands and frames in the turns with a frame
        self.arriving: FairQueue[Frame] = FairQueue()  # new requests that have not been read
        budget = engine.planner.max_tokens
        device = engine.wiring.device
        first = FIRST if device == "cpu" else budget
        # learned costs of prompt tokens: for steps without, and with, log-probabilities of the prompt
        self.paces = TurnPace(budget, first), TurnPace(budget, first)
        self.shared_until = 0.0  # time.monotonic until which steps are short because several owners were served
        self.shared_least = SHARED_LEAST.get(device, SHARED_LEAST_ELSE)
        self.prompt_tokens = 0  # computed prompt tokens
        self.decode_seconds = 0.0  # time of the last step without prompt tokens
        self.decode_rows = 1  # number of rows of the last step without prompt tokens
        self._collected: list[StepPlan] = []  # plans of the steps whose results were collected in this turn
        engine.events.publishing.subscribe(self._published)
        grammars = engine.grammars
        self.compiling = Compiling(
            lambda params: grammars.find(params.structured_outputs, params.salt),
            lambda params: grammars.compile(params.structured_outputs, params.salt),
            getattr(grammars, "workers", 1),
            lambda params: grammars.stop(params.structured_outputs, params.salt),
        )
        self.snapshots = Snapshots(engine)
        self._sent = 0.0  # time.monotonic() of the last sent frame
        self._dead_sent = False  # whether the end of the engine was reported
        engine.events.tokens_streamed.subscribe(self._add_tokens)
        self.frames: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []  # unsent complete messages of this turn
        self._clear()

    @property
    def over(self) -> bool:
        return self.stopping or (self.ends and self._dead_sent)

    def leave(self, error: BaseException | None) -> None:
        self.compiling.close()
        if not isinstance(error, EngineDeadError):  # such an error means that the link is closed
            self._flush()

    def patience(self) -> float:
        wait = 0.0 if self.arriving else super().patience() or 0.0
        return min(wait, LOOK) if self.compiling else wait

    def turn(self, wait: float | None = 0.0) -> bool:
        """Handle commands, run a step, and send its frames.  Return False if the engine was idle."""
        self.turned = time.monotonic()
        commands = self.link.receive(wait or 0.0)
        begin = time.perf_counter()
        self._handle(commands, begin + PATIENCE)
        for live, error in self.compiling.ready():
            self._enter(live, error)
        handling = time.perf_counter() - begin
        worked = not self.engine.dead and self.engine.busy and self._step()
        after = time.perf_counter()
        if self._flush():
            self.turns += 1
            self.own_seconds += time.perf_counter() - after + handling
        return worked

    def _published(self, publish: Callable[[Flight, StepResult], None], flight: Flight, result: StepResult) -> None:
        """Publish the result of a step, and store the step's plan, with which ``_step`` measures the cost of tokens."""
        self._collected.append(flight.plan)
        publish(flight, result)

    def _step(self) -> bool:
        """Run a step with a limit on its prompt tokens, and update the measured cost of a token with the step's time.

        Return whether the engine had work.
        """
        start = time.perf_counter()
        self.engine.planner.most_prefill = self._most_prefill()
        worked = self.engine.step()
        if self._collected:
            plans = self._collected
            self._collected = []
            self._note(plans, time.perf_counter() - start)
        return worked

    def _note(self, plans: Sequence[StepPlan], seconds: float) -> None:
        """Update the costs of decodes and prompts with collected steps, which took ``seconds`` in all."""
        q_len = np.concatenate([plan.q_len for plan in plans]).astype(np.int64)
        chunk = q_len > 1
        rows = len(q_len) - int(np.count_nonzero(chunk))
        if rows == len(q_len):  # no prompts
            self.decode_seconds = seconds / len(plans)
            self.decode_rows = max(rows // len(plans), 1)
            return
        tokens = q_len[chunk]
        context = np.concatenate([plan.computed for plan in plans])[chunk] + tokens / 2
        # time of the prompts: the time of the step minus the time of its decodes
        decodes = self.decode_seconds * min(rows / self.decode_rows, 1.0)
        prompts = max(seconds - decodes, 0.2 * seconds)
        scored = any(len(plan.prompt) for plan in plans)
        total = int(tokens.sum())
        self.prompt_tokens += total
        self.paces[scored].note(total, float(tokens @ context) / total, prompts)

    def _most_prefill(self) -> int:
        """Return the maximum number of prompt tokens of the next step, from the measured pace of prompts.  It is
        smaller while several owners share the engine."""
        planner = self.engine.planner
        slots = planner.slots
        if not planner.n_waiting and planner.steady is not None and planner.steady.changes == slots.changes:
            return planner.most_prefill  # the same rows go on decoding, and none has a prompt to compute
        heads = planner.waiting.heads() if planner.n_waiting else []
        prefilling = slots.running[planner.need(slots.running) > 1]
        context = int(slots.computed[prefilling].max(initial=0))
        if heads:
            context = max(context, int(planner.cache.hints(heads).max()))
        scored = slots.asking > 0 or any(seq.request.prompt_topk >= 0 for seq in heads)
        now = time.monotonic()
        if planner.shared and owner_count(slots, slots.running, heads) > 1:
            self.shared_until = now + SHARED_FOR
        if now < self.shared_until:
            return self.paces[scored].most(context, SHARED_TURN, self.shared_least)
        return self.paces[scored].most(context, TURN, LEAST)

    # ---- commands ------------------------------------------------------------------------------------------------

    def _handle(self, commands: list[Frame], until: float) -> None:
        """Handle commands, and read new requests until ``until`` (``time.perf_counter``), at least one.
        EngineDeadError for an unknown command."""
        for command in commands:
            if command.kind not in COMMANDS:
                raise EngineDeadError(f"{command.kind!r} is not a command; expected one of {sorted(COMMANDS)}")
            if command.kind == "add":
                self.arriving.push(command.header.get("owner", ""), command.header["number"], command)
            else:
                getattr(self, f"_do_{command.kind}")(**command.header, **command.columns)
        while (next_up := self.arriving.pop()) is not None:
            _, _, command = next_up
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
        pooling: str | None = None,
        lora: Sequence[Any] | None = None,
        images: np.ndarray = NO_IMAGES,
        pixels: np.ndarray = NO_VECTORS,
        digests: np.ndarray = NO_IMAGES,
    ) -> None:
        """Read a new request, and add it to the engine or first compile its grammar."""
        try:
            if params.get("logit_bias"):  # the keys of a JSON object are strings
                params = {**params, "logit_bias": {int(i): by for i, by in params["logit_bias"].items()}}
            sampling = SamplingParams.make(**params)
            _check_remote(sampling)
            pooled_taps = PooledTaps.of(taps, reads, vectors)
            live: _Live
            request = Request(
                id,
                np.asarray(prompt, np.int32),
                sampling,
                arrival,
                owner=owner,
                watch=watch,
                stream=number if sampling.logprobs is None else 0,
                sink=lambda seq, ids, ended: self._sink(live, seq, ids, ended),
                on_done=lambda request: self._ended(live),
                taps=pooled_taps.taps,
                pooling=None if pooling is None else PromptPooling(pooling),
                lora=None if lora is None else LoRARequest(*lora),
                images=images_of(images, pixels, digests),
            )
            if self.engine.grammars is not None:
                self.engine.grammars.gates.add(request, self.engine.eos_ids, self.engine.capacity.vocab_size)
            live = _Live(number, request, pooled_taps.reads, energy)
        except BaseException as e:
            self._refuse(number, e)
            return
        if sampling.structured_outputs is None or self.engine.grammars is None or self.engine.dead:
            self._enter(live)
        else:
            self.compiling.begin(number, live)

    def _enter(self, live: _Live, error: BaseException | None = None) -> None:
        """Add a request to the engine, or refuse it because of ``error`` or the engine's own error."""
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
        """Report the refusal of a request."""
        why = refusal(error)
        row = [number, type(why).__name__, str(why), getattr(why, "param", None)]
        self.header.setdefault("refused", []).append(row)

    def _do_abort(self, number: int) -> None:
        """Abort a request, wherever it is.  Unknown numbers are ignored."""
        if self.arriving.remove(number) is not None or self.compiling.cancel(number):
            self._refuse(number, RequestError("the request was aborted"))
            return
        live = self.live.get(number)
        if live is not None:
            self.engine.abort(live.request.id)

    def _do_cut(self, number: int, sample: int, stop: str) -> None:
        """End a branch whose text has ended on the client's side.

        ``stop`` is the stop string that was found.  "" means that the reader needs no more text.
        """
        live = self.live.get(number)
        if live is None:
            return
        for seq in live.request.sequences:
            if seq.sample == sample and seq.finish_reason is None:
                live.ended.add(sample)
                self.engine.finish(seq, "stop", stop_reason=stop or None)

    def _do_ask(self, ask: int, what: str, args: dict[str, Any]) -> None:
        """Answer question ``ask`` with the result or error of the method ``_ask_`` + ``what``.

        ``load_adapter`` is answered later, by ``_loaded``."""
        try:
            if what == "load_adapter":  # the answer is sent after the adapter is loaded
                self.engine.load_adapter(LoRARequest(*args["lora"]), lambda error: self._loaded(ask, error))
                return
            answer = [ask, getattr(self, f"_ask_{what}")(**args), None]
        except BaseException as e:
            answer = [ask, None, describe_error(e).split(": ", 1)]
        self.header.setdefault("answers", []).append(answer)

    def _loaded(self, ask: int, error: str) -> None:
        """Answer the question ``ask`` after the load of an adapter.  ``error`` "" means that the adapter is loaded."""
        answer = [ask, not error, [RequestError.__name__, error, "lora_path"] if error else None]
        self.header.setdefault("answers", []).append(answer)

    def _ask_unload_adapter(self, name: str) -> bool:
        return self.engine.unload_adapter(name)

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

    def _ask_snapshot(self, owner: str | None, steps: int, ended: int) -> dict[str, Any]:
        return self.snapshots.take(owner, steps, ended, len(self.arriving) + len(self.compiling))

    def _ask_reset_prefix_cache(self) -> bool:
        self.engine.reset_prefix_cache()
        return True

    def _ask_weights(self, do: str, args: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the engine's weights, and return their state."""
        weights = self.engine.weights
        method = getattr(weights, do)
        method(**args)
        return weights.stats()

    def _ask_prefixes(self) -> dict[str, Any]:
        self.engine.settle()
        named = self.engine.named_prefixes()
        store = self.engine.wiring.cache.stores[named.tier]
        return {"tokens": named.tokens(), "store": store.name, "options": dict(store.options)}

    def _ask_save_prefix(self, name: str, ids: list[int], tenant: str, cache_salt: str | None) -> int:
        self.engine.settle()
        params = SamplingParams(max_tokens=1, tenant=tenant, cache_salt=cache_salt)
        tokens = np.array(ids, np.int32)
        salt = self.engine.weights.salted(salt_of_prompt(tokens, params, self.engine.wiring))
        return self.engine.save_prefix(name, tokens, salt)

    def _ask_drop_prefix(self, name: str) -> None:
        self.engine.settle()
        self.engine.drop_prefix(name)

    def _ask_profile(self, start: bool, path: str) -> str:
        if start:
            self.engine.call("profile_start")
        else:
            self.engine.call("profile_stop", {"path": path})
        return path

    def _do_stop(self) -> None:
        self.stopping = True

    # ---- frames --------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Begin a new frame."""
        self.header: dict[str, Any] = {}
        # Rows of branches that have new tokens or have ended; a branch may have several.  Columns: number of the
        # stream, number of the sample, count of new tokens (0 for an end alone), index of the finish reason in ``ENDS``
        # (0 if the branch runs on), id of the stop token that ended it or -1, whether ``scores`` has the tokens' scores
        self.rows: list[tuple[int, int, int, int, int, int]] = []
        self.tokens: list[int] = []  # token ids of all ``rows``, row after row
        # Earlier rows of the frame, in parts of two arrays each: rows i64 [6, R] with the same columns, and token ids.
        self.parts: list[tuple[np.ndarray, np.ndarray]] = []
        self.scores = Scores()
        # requests whose first token came: stream, time of the token, cached prompt tokens, time of leaving the queue
        self.firsts: list[tuple[int, float, int, float]] = []
        self.prompts: list[tuple[int, int, Any]] = []  # scored prompts: stream, first position, plan.LogProbs
        self.dones: list[tuple[int, float, float]] = []  # ended requests: stream, time of the end, joules
        self.tapped = PooledValues()
        self.routes = RouteColumns()
        self.weight = 0

    def _add_tokens(self, stream: np.ndarray, sample: np.ndarray, token: np.ndarray) -> None:
        """Add one token to each of many running branches.  Arrays are used, because most tokens are added by this
        method."""
        self._close_part()
        rows = np.empty((6, len(token)), np.int64)
        rows[0], rows[1], rows[2], rows[3], rows[4], rows[5] = stream, sample, 1, 0, -1, 0
        self.parts.append((rows, token))

    def _close_part(self) -> None:
        """Move ``rows`` and ``tokens`` to a new part of ``parts``, so that the order of rows is kept."""
        if self.rows:
            rows = np.array(self.rows, np.int64).T
            self.parts.append((rows, np.array(self.tokens, np.int32)))
            self.rows = []
            self.tokens = []

    def _sink(self, live: _Live, seq: Seq, ids: list[int], ended: Finish | None) -> None:
        """Add tokens of a branch, and its end if it has ended, in rows that each fit into a frame."""
        if seq.sample in live.ended:
            return
        if not live.started and (ids or live.request.pooling is not None):
            live.started = True
            request = live.request
            at = request.first_token or self.engine.now()
            self.firsts.append((live.number, at, request.cached_tokens, request.scheduled or at))
            self._add_prompt_scores(live)
        end, stop_id = 0, -1
        if ended is not None:
            live.ended.add(seq.sample)
            end = END[ended.reason]
            stop_id = ended.stop if isinstance(ended.stop, int) else -1  # the client finds stop strings itself
        scored = live.request.params.logprobs is not None and bool(ids)
        weight = TOKEN + live.request.logprobs if scored else TOKEN
        most = FRAME // weight or 1
        begin = seq.emitted - len(ids)
        while len(ids) > most:
            self._add_row(live, seq, ids[:most], 0, -1, begin if scored else None)
            ids = ids[most:]
            begin += most
        self._add_row(live, seq, ids, end, stop_id, begin if scored else None)

    def _add_row(self, live: _Live, seq: Seq, ids: list[int], end: int, stop_id: int, begin: int | None) -> None:
        """Add a row with tokens of a branch.

        ``begin`` is the index of the first token in the scores of the sequence.  None means that the row has no scores.
        """
        self.rows.append((live.number, seq.sample, len(ids), end, stop_id, begin is not None))
        self.tokens += ids
        weight = TOKEN * len(ids)
        if begin is not None:
            part = seq.logprobs[begin : begin + len(ids)]
            self.scores.extend(part)  # whole columns are sent, because an answer may arrive with all of its scores
            weight += len(ids) * live.request.logprobs
        self._weigh(weight)

    def _add_prompt_scores(self, live: _Live) -> None:
        """Add the scores of a request's prompt, in parts that each fit into a frame."""
        for first, scores in live.request.prompt_parts:
            count, best = scores.top_ids.shape
            most = FRAME // (best + 1) or 1
            for at in range(0, count, most):
                rows = slice(at, at + most)
                part = LogProbs(scores.chosen[rows], scores.rank[rows], scores.top_ids[rows], scores.top[rows])
                self.prompts.append((live.number, first + at, part))
                self._weigh(part.top_ids.size + len(part.rank))

    def _weigh(self, weight: int) -> None:
        """Add the weight of new content (``FRAME``) to that of the present frame, and begin a new frame if it is full.
        All frames are sent at the end of the turn."""
        self.weight += weight
        if self.weight >= FRAME:
            self._close_part()
            self.frames.append((self.header, self._columns()))
            self._clear()

    def _ended(self, live: _Live) -> None:
        """Report the end of a request, after its joules are known if it requests them."""
        if live.energy and self.engine.energy is not None:
            self.engine.energy.when_known(live.request, lambda: self._done(live))
        else:
            self._done(live)

    def _done(self, live: _Live) -> None:
        """Add the end of a request to the frame: the values that it has read, the ends of branches that were not
        reported yet, errors, the order of its outputs, the version of the weights, and its joules."""
        request = live.request
        self.live.pop(live.number, None)
        try:
            self._add_values(live)
        except Exception as e:  # the client would wait forever for the end of the request
            log.exception("request %s: its values cannot be sent", request.id)
            problem = f"the values that the request has read cannot be sent: {describe_error(e)}"
            self.header.setdefault("failed", []).append([live.number, problem])
        for seq in request.sequences:
            if seq.sample not in live.ended:  # aborted or failed, which is not passed to the sink
                self.rows.append((live.number, seq.sample, 0, END[seq.finish_reason or "abort"], -1, 0))
                if seq.error:
                    self.header.setdefault("errors", []).append([live.number, *fault(self.engine, seq)])
            elif seq.error:  # the last row of the sequence was already sent, so the whole answer fails
                self.header.setdefault("failed", []).append([live.number, seq.error])
        if request.params.width > 1 and not self.engine.dead:
            order = [seq.sample for seq in self.engine.answer(request)]
            self.header.setdefault("order", []).append([live.number, order])
        version = request.weights_version
        if version:
            self.header.setdefault("weights", []).append([live.number, version])
        self.dones.append((live.number, request.finished or self.engine.now(), joules_of(request)))
        request.release()

    def _add_values(self, live: _Live) -> None:
        """Add the tap values, the embedding and the expert routes of a request that has ended."""
        for sample, values in (*pooled(live.request, live.reads), *embedded(live.request)):
            self._weigh(self.tapped.add(live.number, sample, values))
        for sample, routes in routes_read(live.request):
            self._weigh(self.routes.add(live.number, sample, routes))

    def _flush(self) -> bool:
        """Send the frames of this turn, or an empty one if none was sent for ``HEARTBEAT``.

        Return whether the turn had frames to send.
        """
        now = time.monotonic()
        if self.engine.dead and not self._dead_sent:
            self._dead_sent = True
            self.header["dead"] = self.engine.dead
        self._close_part()
        full = bool(self.parts or self.header or self.dones or self.frames)
        if not full and now - self._sent < HEARTBEAT:
            return False
        frames = [*self.frames, (self.header, self._columns())]
        self.frames = []
        self._clear()
        self._sent = now
        for header, columns in frames:
            self.link.send(header, columns)
        return full

    def _columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the present frame."""
        columns = self.tapped.columns() | self.routes.columns()
        if self.parts:
            rows = np.concatenate([rows for rows, _ in self.parts], axis=-1)
            columns |= zip(ROW, rows, strict=True)
            columns["tokens"] = np.concatenate([tokens for _, tokens in self.parts])
        if self.scores:
            scores = self.scores
            columns["chosen"] = np.array(scores.chosen, np.float32)
            columns["top"] = np.array(scores.top, np.float32)
            columns["rank"] = np.array(scores.rank, np.int32)
            columns["top_ids"] = np.array(scores.top_ids, np.int32)
            columns["tops"] = np.diff(scores.ends).astype(np.int32)
        if self.firsts:
            number, at, cached, entered = zip(*self.firsts, strict=True)
            columns["first"] = np.array(number, np.int64)
            columns["first_at"] = np.array(at, np.float64)
            columns["cached"] = np.array(cached, np.int32)
            columns["entered"] = np.array(entered, np.float64)
        if self.prompts:
            sizes = [(number, first, *part.top_ids.shape) for number, first, part in self.prompts]
            columns["prompts"] = np.array(sizes, np.int64).ravel()
            for name in ("chosen", "rank", "top_ids", "top"):
                flat = np.concatenate([getattr(part, name).ravel() for _, _, part in self.prompts])
                columns[f"prompt_{name}"] = flat.astype(np.float32 if name in ("chosen", "top") else np.int32)
        if self.dones:
            number, at, joules = zip(*self.dones, strict=True)
            columns["done"] = np.array(number, np.int64)
            columns["done_at"] = np.array(at, np.float64)
            if self.engine.energy is not None:
                columns["joules"] = np.array(joules, np.float64)
        return columns


def joules_of(request: Request) -> float:
    """Return the energy of a request in joules, NaN if it is not known."""
    if request.energy is None or request.energy.joules is None:
        return np.nan
    return request.energy.joules


def _check_remote(params: SamplingParams) -> None:
    """Raise RequestError for parameters that need the text in the engine, because text is made on the client's side."""
    if params.beam_width is not None and params.stop:
        problem = f"stop={shown(params.stop)} with beam_width"
        raise RequestError(f"{problem}: expected stop_token_ids, or an LLM in this process", "stop")
