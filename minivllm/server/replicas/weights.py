"""Changes of the weights of all replicas: one at a time, with one version, repeated by engines that start later.

change ──► Replica 0 ──► done      ──► version + 1, the change is kept
           Replica 1 ──► error     ──► outdated: the replica gets no requests until its weights are the same
a new engine ──► repeats the kept changes ──► serves
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.errors import EngineDeadError, MinivllmError, RequestError, describe_error
from minivllm.server.logs import event

from .replica import Replica

STATS, UPDATE, SLEEP, WAKE, PAUSE = "stats", "update", "sleep", "wake", "pause"
# number of turns of an engine that an update may wait for, each of at most ``stuck_after`` seconds: the running step,
# and the change
TURNS = 2
STARTING = "the replica starts, and repeats the changes of the weights before it serves"


@dataclass(frozen=True)
class Change:
    """A change that a new engine repeats.  ``files`` are the files of an update's folder when it was accepted."""

    do: str
    args: dict[str, Any]
    files: dict[str, tuple[int, int]]


class ReplicatedWeights:
    """The state of the weights that all replicas share.

    ``version`` counts the changes of the weights since the start of the server.  Engines count for themselves, and
    replicas translate their versions.  ``kept`` are the changes that a new engine repeats: the last update of all
    weights, later partial updates, and the sleep.  ``stuck_after`` is the longest time of an engine's turn in seconds.
    """

    def __init__(self, replicas: Sequence[Replica], stuck_after: float) -> None:
        self.replicas = replicas
        self.seconds = TURNS * stuck_after
        self.lock = asyncio.Lock()  # held during a change, and while a new engine repeats the changes
        self.version = 0
        self.paused = False
        self.kept: list[Change] = []

    @property
    def level(self) -> int:
        """Return the level of sleep, 0 while the engines are awake."""
        levels = [change.args["level"] for change in self.kept if change.do == SLEEP]
        return levels[-1] if levels else 0

    @property
    def _drops(self) -> bool:
        """Return whether ``wake`` reads the files of the model, because no update followed a sleep of level 2."""
        return self.level == 2 and self.kept[-1].do == SLEEP

    # ---- changes -------------------------------------------------------------------------------------------------

    async def change(self, do: str, args: dict[str, Any]) -> tuple[dict[int, Any], dict[int, str]]:
        """Change all replicas at the same time.  Return the states of the changed ones, and the reasons for those left
        out.

        Replicas that are left out receive no requests before they have the same weights.  RequestError names replicas
        that refused an update which others accepted.  If no replica changes, the first error is raised.
        """
        async with self.lock:
            partial = args.get("partial", False)
            chosen = [one for one in self.replicas if one.runs and not (partial and one.outdated)]
            if not chosen:
                raise EngineDeadError("no replica runs")
            serving = {one.number for one in chosen if one.accepts}
            files = model_files(args["path"]) if do == UPDATE else {}
            answers = await asyncio.gather(*(self._change_one(one, do, args) for one in chosen), return_exceptions=True)
            states = {}
            errors = {}
            for one, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, BaseException):
                    errors[one.number] = answer
                else:
                    states[one.number] = answer
            if not states:
                raise next(iter(errors.values()))
            await self._accept_repeated(do, args, states, errors)
            refused = {number: e for number, e in errors.items() if not isinstance(e, EngineDeadError)}
            if do == UPDATE and serving & refused.keys() and not serving & states.keys():
                self._leave_out(dict.fromkeys(states, "the serving replicas refused the weights of the replica"))
                raise next(iter(refused.values()))
            self._keep(Change(do, args, files), states)
            self._leave_out({number: describe_error(e) for number, e in errors.items()})
            for number, state in states.items():
                self.replicas[number].outdated = self._disagreement(state)
        _raise_refusal(do, refused)
        return states, self.left_out()

    async def _change_one(self, one: Replica, do: str, args: dict[str, Any]) -> dict[str, Any]:
        """Change a replica, and return its state.  If an engine does not answer in time, kill it and raise
        EngineDeadError; it is started again."""
        before = one.versions
        one.expect(do == WAKE and self._drops, self._next(do))
        try:
            return await asyncio.wait_for(one.weights(do, **args), self.seconds)
        except asyncio.TimeoutError:
            one.kill()
            raise EngineDeadError(
                f"the engine did not answer within {self.seconds:g} s; the engine is started again"
            ) from None
        except Exception:
            one.versions = before
            raise

    def _next(self, do: str) -> int:
        """Return the version of the weights after a change ``do``.  Weights that are read from the files of the model
        again keep version 0."""
        return 0 if do == WAKE and not self.version else self.version + 1

    async def _accept_repeated(
        self, do: str, args: dict[str, Any], states: dict[int, Any], errors: dict[int, BaseException]
    ) -> None:
        """Move replicas that slept or were awake already from ``errors`` to ``states``."""
        if do not in (SLEEP, WAKE):
            return
        level = args.get("level", 0)
        for number, error in list(errors.items()):
            if not isinstance(error, RequestError):
                continue
            try:
                state = await asyncio.wait_for(self.replicas[number].weights(STATS), self.seconds)
            except (asyncio.TimeoutError, EngineDeadError):
                continue
            if state["sleep_level"] == level:
                states[number] = state
                del errors[number]

    def _keep(self, change: Change, states: dict[int, Any]) -> None:
        """Keep a change that replicas have made, without earlier changes that it undoes, so that new engines can repeat
        it."""
        newest = max(state["version"] for state in states.values())
        sleeps = [kept for kept in self.kept if kept.do == SLEEP]
        updates = [kept for kept in self.kept if kept.do == UPDATE]
        if change.do == UPDATE:
            before = self.kept if change.args.get("partial") else sleeps
            self.kept = [*before, change]
        elif change.do == SLEEP and not sleeps:
            self.kept = [*self.kept, change]
        elif change.do == WAKE:
            reloaded = self._drops or newest > self.version
            self.kept = [] if reloaded else updates
        self.version = max(self.version, newest)
        if change.do != UPDATE:
            self.paused = next(iter(states.values()))["paused"]

    def _disagreement(self, state: dict[str, Any]) -> str:
        """Return how the state of a replica differs from the shared one, "" if it does not."""
        shared = {"version": self.version, "paused": self.paused, "sleep_level": self.level}
        different = [name for name, value in shared.items() if state[name] != value]
        words = [f"{name} is {state[name]}, expected {shared[name]}" for name in different]
        return "; ".join(words)

    def _leave_out(self, reasons: dict[int, str]) -> None:
        """Send no requests to replicas before they have the shared weights."""
        for number, reason in reasons.items():
            self.replicas[number].outdated = reason
            event("a replica is outdated", logging.WARNING, replica=number, reason=reason)

    def left_out(self) -> dict[int, str]:
        """Return why replicas do not have the shared state, by their number."""
        reasons = {one.number: one.outdated if one.runs else STARTING for one in self.replicas}
        return {number: reason for number, reason in reasons.items() if reason}

    # ---- new engines ---------------------------------------------------------------------------------------------

    async def repeat(self, one: Replica) -> None:
        """Repeat the kept changes in a new engine.  The replica is outdated if the engine refuses one.

        EngineDeadError if the engine ends or does not answer.
        """
        async with self.lock:
            updated = any(change.do == UPDATE for change in self.kept)
            one.outdated = ""
            one.engine_version = 0
            one.start_versions(0 if updated else self.version)
            pause = [Change(PAUSE, {}, {})] if self.paused else []
            try:
                for change in [*self.kept, *pause]:
                    if change.do == UPDATE and model_files(change.args["path"]) != change.files:
                        raise RequestError(f"the files in {change.args['path']} have changed since the update")
                    await asyncio.wait_for(one.weights(change.do, **change.args), self.seconds)
            except asyncio.TimeoutError:
                raise EngineDeadError(f"the new engine did not answer within {self.seconds:g} s") from None
            except EngineDeadError:
                raise
            except MinivllmError as e:
                self._leave_out({one.number: f"the new engine could not repeat an update: {describe_error(e)}"})
                return
            one.start_versions(self.version)

    async def rebase(self) -> None:
        """Forget the updates, because new engines read other files of the model."""
        async with self.lock:
            self.kept = [change for change in self.kept if change.do == SLEEP]
            if self.version:
                self.version += 1


def _raise_refusal(do: str, refused: dict[int, BaseException]) -> None:
    """Raise the error of replicas that refused a change that other replicas have made."""
    if not refused:
        return
    error = next(iter(refused.values()))
    if do != UPDATE or not isinstance(error, Exception):
        raise error
    numbers = ", ".join(map(str, refused))
    raise RequestError(f"replicas {numbers} kept their weights and were drained: {describe_error(error)}")


def model_files(model: str) -> dict[str, tuple[int, int]]:
    """Return the size and the time of change of each file in the folder of a model, {} for a model without one."""
    if not os.path.isdir(model):
        return {}
    found = {}
    with os.scandir(model) as entries:
        for entry in entries:
            if entry.is_file():
                stat = entry.stat()
                found[entry.name] = (stat.st_size, stat.st_mtime_ns)
    return found
