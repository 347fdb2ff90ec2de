"""Weights of a running engine: updates in place, pauses, and sleep.

    pause ──► requests wait          update ──► executor: check, write, commit ──► version + 1, cache emptied
    resume ──► they continue                        └─ error ──► restore: the old weights serve

The keys of cached prefixes contain a random tag of the update, so no request finds keys and values of older weights,
neither in the KV cache nor in a tier that another process shares.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.core.external_calls import alone
from minivllm.errors import EngineDeadError, RequestError, shown

from .request import FINISHED
from .request_checks import salt_of

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Executor, Wiring

    from .planner import Planner
    from .request import FinishSequence, Request, Seq
    from .slots import Slots

VERB = "weights"
# whether the KV of running requests is computed again or kept after an update
RECOMPUTE, KEEP = "recompute", "keep"
LEVELS = (1, 2)


class ChangingEngine(Protocol):
    """The attributes of an engine that a change of its weights uses."""

    within: str
    dead: str | None
    wiring: Wiring
    executor: Executor
    planner: Planner
    slots: Slots
    requests: dict[str, Request]

    @property
    def finish(self) -> FinishSequence: ...
    def collect_all(self) -> None: ...
    def drop_prefixes(self, keep_tiers: bool = False) -> None: ...
    def fail_all(self, message: str) -> None: ...


class Weights:
    """Changes the weights of a running engine.  ``version`` counts the updates.  ``level`` is the level of sleep, 0
    while awake.

    Its methods may not be called while the engine runs another method."""

    def __init__(self, engine: ChangingEngine) -> None:
        self.engine = engine
        self.version = 0
        self.level = 0
        self.tag = ""  # random text of the last update, part of salts; "" before the first one
        self.paused = False
        # whether ``sleep`` dropped the weights, and no update has replaced them since
        self.dropped = False

    @property
    def within(self) -> str:
        """Return the name of the engine's running method (see ``external_calls.alone``)."""
        return self.engine.within

    @within.setter
    def within(self, name: str) -> None:
        self.engine.within = name

    @property
    def held(self) -> bool:
        """Return whether the engine may not run steps, because it is paused or asleep."""
        return self.paused or self.level > 0

    def salted(self, salt: tuple[str, ...]) -> tuple[str, ...]:
        """Return a salt with which a request only shares cached prefixes that the current weights have computed."""
        return (*salt, "weights", self.tag) if self.tag else salt

    def stats(self) -> dict[str, Any]:
        """Return the version of the weights, and whether the engine is paused or asleep."""
        return {"version": self.version, "paused": self.paused, "sleep_level": self.level}

    def refuse_held(self, does: str = "runs no request") -> None:
        """Raise RequestError if the engine is paused or asleep.  It is called before waiting for results on the thread
        that would have to resume the engine, and for operators, who can do so.  ``does`` ends the message."""
        if self.level:
            raise RequestError(f"the engine sleeps, and {does}: wake it first")
        if self.paused:
            raise RequestError(f"the engine is paused, and {does}: resume it first")

    # ---- pauses --------------------------------------------------------------------------------------------------

    @alone
    def pause(self, keep_requests: bool = True) -> None:
        """Run no further steps until ``resume``.  Requests wait if ``keep_requests``, otherwise they end with the
        reason "abort"."""
        self._settle()
        self.paused = True
        if not keep_requests:
            for request in list(self.engine.requests.values()):
                for seq in list(request.sequences):
                    if seq.status != FINISHED:
                        self.engine.finish(seq, "abort")

    @alone
    def resume(self) -> None:
        """Run steps again after ``pause``.  RequestError while the engine sleeps."""
        if self.level:
            raise RequestError("the engine sleeps: wake it first; a pause continues after it")
        self.paused = False

    # ---- updates -------------------------------------------------------------------------------------------------

    @alone
    def update(
        self,
        path: str | None = None,
        tensors: Any = None,
        partial: bool = False,
        finite: bool = True,
        kv: str = RECOMPUTE,
    ) -> int:
        """Replace the weights by the tensors of a folder, or by pairs (name, tensor), and return the new version.

        RequestError leaves the old weights in place.  EngineDeadError if they cannot be restored, which ends the
        engine.  ``tensors`` are supported by executors of this process only (``Executor.takes_tensors``).
        """
        if kv not in (RECOMPUTE, KEEP):
            raise RequestError(f"kv={shown(kv)}: expected {RECOMPUTE} or {KEEP}", "kv")
        if self.level == 1:
            raise RequestError(
                "the weights are asleep in host memory: wake the engine before an update"
            )
        if self.level == 2 and partial:
            raise RequestError(
                "the weights were dropped: expected all of them, with partial=False", "partial"
            )
        if self.engine.wiring.images.max_images:
            raise RequestError(
                "an update does not reach the image encoder: set max_images=0 for this engine"
            )
        if (path is None) == (tensors is None):
            raise RequestError("expected either a path or tensors", "path")
        self._settle()
        source = {"path": path} if tensors is None else {"tensors": tensors}
        answers = self._answers("check", **source, partial=partial, finite=finite)
        self._refuse(errors_of(answers))
        if kv == RECOMPUTE and not self.level and any(answer["overwrites"] for answer in answers):
            # The tiers must read the blocks to store before, because new weights may temporarily
            # use the memory of the KV cache.
            self._leave_slots()
            self.engine.drop_prefixes(keep_tiers=True)
        errors = self._call("write", keep=kv == KEEP)
        if errors:
            self._take_back(errors[0])
        errors = self._call("commit")
        if errors:
            what = f"an update of the weights did not end: {errors[0]}"
            self.engine.fail_all(what)
            raise EngineDeadError(what)
        self.dropped = False
        self._count()
        self._renew(kv == KEEP)
        return self.version

    def _take_back(self, error: str) -> None:
        """Restore the old weights after a failed update, and raise RequestError with ``error``.  If they cannot be
        restored, end the engine and raise EngineDeadError."""
        broken = self._call("restore")
        if broken:
            what = f"an update of the weights failed ({error}), and the old weights could not be restored: {broken[0]}"
            self.engine.fail_all(what)
            raise EngineDeadError(what)
        self.dropped = self.level == 2
        kept = (
            "they are undefined until the next update"
            if self.level == 2
            else "the old weights are in place again"
        )
        raise RequestError(f"the weights were not updated, and {kept}: {error}", "weights")

    def _refuse(self, errors: list[str]) -> None:
        """Raise RequestError with the first of ``errors``, if there is one."""
        if errors:
            raise RequestError(errors[0], "weights")

    def _call(self, do: str, **args: Any) -> list[str]:
        """Run an operation on the weights in all ranks (worker processes), and return their errors.  RequestError if
        the executor does not change weights."""
        return errors_of(self._answers(do, **args))

    def _answers(self, do: str, **args: Any) -> list[Mapping[str, Any]]:
        """Run an operation on the weights in all ranks (worker processes), and return their answers.

        RequestError if the executor does not change weights.  EngineDeadError if it fails, which ends all requests."""
        executor = self.engine.executor
        try:
            answers: list[Mapping[str, Any]] = executor.call(VERB, {"do": do, **args})
            return answers
        except NotImplementedError as e:
            who = type(executor).__name__
            raise RequestError(
                f"the executor {who} does not change weights; use local, process or multiprocess"
            ) from e
        except EngineDeadError as e:
            self.engine.fail_all(str(e))
            raise

    def _renew(self, keep: bool) -> None:
        """Remove the keys and values that the old weights have computed.

        With ``keep`` those of running rows stay; otherwise the running rows are computed again."""
        engine = self.engine
        if not keep:
            self._leave_slots()
        for request in engine.requests.values():
            running = any(seq.slot >= 0 for seq in request.sequences)
            for seq in request.sequences:
                if seq.status == FINISHED:
                    continue
                if request.pooling is not None and not running:
                    request.pooling.restart()
                self._note(seq)
                if not running:
                    for one in seq.pair:
                        self._rename(one, one.request)
        engine.drop_prefixes()

    def _rename(self, seq: Seq, request: Request) -> None:
        """Give a waiting sequence a salt for the current weights, and clear its block keys, which are computed from the
        salt."""
        request.salt = self.salted(salt_of(request, self.engine.wiring))
        seq.keys.clear()
        seq.page_keys.clear()

    def _note(self, seq: Seq) -> None:
        """Record from which output token on the current weights draw the tokens of a sequence."""
        slots = self.engine.slots
        known = int(slots.known[seq.slot]) if seq.slot >= 0 else seq.known
        first = max(0, known - len(seq.request.prompt))
        seq.weights = [(version, at) for version, at in seq.weights if at < first]
        seq.weights.append((self.version, first))

    def _leave_slots(self) -> None:
        """Move all running rows back to the queue, so that their keys and values are computed again."""
        planner = self.engine.planner
        slots = self.engine.slots
        while len(slots.running):
            planner.preempt(int(slots.running[0]))

    def _settle(self) -> None:
        """Wait for the steps in flight and process their results.  EngineDeadError if the engine has ended."""
        if self.engine.dead:
            raise EngineDeadError(self.engine.dead)
        self.engine.collect_all()
        if self.engine.dead:
            raise EngineDeadError(self.engine.dead)

    # ---- sleep ---------------------------------------------------------------------------------------------------

    @alone
    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and move the weights to host memory (level 1) or drop them (level 2).  Requests wait.

        RequestError if the engine sleeps already, or if the memory cannot be freed."""
        if level not in LEVELS or isinstance(level, bool):
            raise RequestError(f"level={shown(level)}: expected 1 or 2", "level")
        if self.level:
            raise RequestError(f"the engine sleeps already, at level {self.level}")
        self._settle()
        self._refuse(self._call("check_sleep", level=level))
        self._leave_slots()
        self.engine.drop_prefixes(keep_tiers=True)
        answers = self._answers("sleep", level=level)
        errors = errors_of(answers)
        dropped = any(answer["dropped"] for answer in answers)
        self.level = level
        self.dropped = dropped
        if errors:
            self._wake(reload=dropped)
            again = "; its weights were read from the files of the model again" if dropped else ""
            raise RequestError(f"the engine did not sleep{again}: {errors[0]}")

    @alone
    def wake(self) -> None:
        """Allocate the memory of a sleeping engine again, and run steps again unless the engine is paused.

        If the weights were dropped and not updated since, they are read from the files of the model.  RequestError if
        the engine does not sleep, or if it cannot wake; it then stays asleep.  EngineDeadError if it has ended."""
        if not self.level:
            raise RequestError("the engine does not sleep")
        if self.engine.dead:
            raise EngineDeadError(self.engine.dead)
        self._wake(reload=self.dropped)

    def _wake(self, reload: bool) -> None:
        errors = self._call("wake", reload=reload)
        if errors:
            raise RequestError(f"the engine still sleeps, because it could not wake: {errors[0]}")
        self.level = 0
        self.dropped = False
        if reload and self.version:
            self._count()
            self._renew(keep=False)

    def _count(self) -> None:
        """Count a change of the weights, and choose a new random tag for salts."""
        self.version += 1
        self.tag = secrets.token_hex(8)


def errors_of(answers: list[Mapping[str, Any]]) -> list[str]:
    """Return the error messages in the answers of the ranks, without None."""
    return [answer["error"] for answer in answers if answer["error"] is not None]
