"""Statistics of use, kept on this machine for its owner: off until ``minivllm stats on``, and sent nowhere.

    $XDG_DATA_HOME/minivllm/usage.json     (default ~/.local/share; it is there only while they were switched on once)

    totals, models[NAME], days[DATE]   runs, requests, prompt_tokens, output_tokens, seconds, joules
    parts[SEAM][NAME]                  runs, output_tokens

Sums alone: no prompt, no text, no time of a request, no name of a user or a host.  Who writes takes a lock, reads, adds
what it has counted since it wrote last, and puts a new file in the place of the old one, so several processes can.  The
file is bounded: of models and parts the least used become "others", days are the last ``DAYS``.

Nothing here can fail a run: what cannot be written is logged once.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.core.engine.request import Request

FORMAT, VERSION = "minivllm-usage", 1
SUMS = ("runs", "requests", "prompt_tokens", "output_tokens", "seconds", "joules")
MOST, DAYS, LONGEST = 100, 366, 200  # names of models, and of parts of a seam; days; characters of a name
OTHERS = "others"
EVERY = 300.0  # seconds between writes of a process that lives long
PATIENCE = 1.0  # seconds that the end of a run waits for others who write
log = logging.getLogger("minivllm")


def path() -> Path:
    """Where they are, whether or not they are switched on."""
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"  # a relative one counts not
    return folder / "minivllm" / "usage.json"


def empty() -> dict[str, Any]:
    today = datetime.date.today().isoformat()
    return {"format": FORMAT, "version": VERSION, "on": False, "since": today,
            "totals": {}, "models": {}, "days": {}, "parts": {}}  # fmt: skip


def read() -> dict[str, Any] | None:
    """What is kept; None if there is nothing.  ConfigError for a file that is not of this form."""
    at = path()
    if not at.exists():
        return None
    found = files.read_json(at, files.LARGE)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ConfigError(f"{at}: no usage statistics of this version; want it away: `minivllm stats delete`")
    return {**empty(), **found}


def is_on() -> bool:
    """Whether a run is to be counted.  One look at the file system where they never were."""
    try:
        return bool((read() or {}).get("on"))
    except (ConfigError, OSError, RuntimeError) as e:  # RuntimeError: nobody knows the home folder
        log.warning("usage is not counted: %s", e)
        return False


def switch(on: bool) -> None:
    """ConfigError if that cannot be written."""
    with _locked(PATIENCE) as held:
        if not held:
            raise ConfigError(f"{path()}: another process writes it; try again")
        _write({**(read() or empty()), "on": on})


def delete() -> bool:
    """Everything goes, the switch as well; whether there was anything."""
    at = path()
    if not at.parent.exists():
        return False
    with _locked(PATIENCE):  # who has read it puts it back otherwise
        there = at.exists()
        try:
            for one in (at, _lock_of(at)):
                one.unlink(missing_ok=True)
        except OSError as e:
            raise ConfigError(f"{at}: cannot be deleted: {e.strerror}") from None
    with contextlib.suppress(OSError):  # something else lies there
        at.parent.rmdir()
    return there


def add(kept: dict[str, Any], counted: Mapping[str, float], model: str, parts: Mapping[str, Sequence[str]]) -> None:
    """Add what a run has counted to what is kept."""
    today = datetime.date.today().isoformat()
    _sum(kept["totals"], counted)
    _sum(kept["models"].setdefault(model[-LONGEST:], {}), counted)
    _sum(kept["days"].setdefault(today, {}), counted)
    for seam, names in parts.items():
        for name in names:
            some = {key: counted[key] for key in ("runs", "output_tokens")}
            _sum(kept["parts"].setdefault(seam, {}).setdefault(name[-LONGEST:], {}), some)
    kept["models"] = _bounded(kept["models"])
    kept["parts"] = {seam: _bounded(found) for seam, found in list(kept["parts"].items())[:MOST]}
    kept["days"] = dict(sorted(kept["days"].items())[-DAYS:])


def _sum(to: dict[str, float], counted: Mapping[str, float]) -> None:
    for key, value in counted.items():
        to[key] = round(to.get(key, 0) + value, 3)


def _bounded(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """At most ``MOST`` names; the least used together under ``OTHERS``."""
    if len(found) <= MOST:
        return found
    rest = found.pop(OTHERS, {})
    order = sorted(found, key=lambda name: -found[name].get("output_tokens", 0))
    for name in order[MOST - 1 :]:
        _sum(rest, found[name])
    return {**{name: found[name] for name in order[: MOST - 1]}, OTHERS: rest}


def _lock_of(at: Path) -> Path:
    return at.with_suffix(".lock")


@contextlib.contextmanager
def _locked(seconds: float) -> Iterator[bool]:
    """Whether nobody else writes meanwhile; waits for that at most so long."""
    at = path()
    try:
        at.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = _lock_of(at).open("a")
    except OSError as e:
        raise ConfigError(f"{at.parent}: usage statistics cannot be kept there: {e.strerror}") from None
    with file:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.01)
        yield True  # the lock ends with the file


def _write(kept: Mapping[str, Any]) -> None:
    at = path()
    part = at.with_name(f"{at.name}.{os.getpid()}.part")
    try:
        try:
            part.touch(0o600)
            part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            os.replace(part, at)
        finally:
            part.unlink(missing_ok=True)
    except OSError as e:
        raise ConfigError(f"{at}: cannot be written: {e.strerror}") from None


class UsageCounter:
    """Counts the requests of one engine, on the thread of its loop; writes at its end and each ``EVERY`` seconds."""

    def __init__(self, engine: Engine, model: str, parts: Mapping[str, Sequence[str]]) -> None:
        self.engine, self.model, self.parts = engine, model, parts
        self._counted: dict[str, float] = {**dict.fromkeys(SUMS, 0), "runs": 1}
        self._written = time.monotonic()
        self._joules = 0.0
        self._failed = False
        engine.events.request_finished.subscribe(self._request_finished)
        engine.events.engine_stopped.subscribe(lambda error: self.write(PATIENCE))

    def _request_finished(self, request: Request) -> None:
        c = self._counted
        c["requests"] += 1
        c["prompt_tokens"] += len(request.prompt)
        c["output_tokens"] += sum(seq.emitted for seq in request.sequences)
        if time.monotonic() - self._written >= EVERY:
            self.write(0.0)

    def write(self, seconds: float) -> None:
        """Add what was counted since it was written last, unless they were switched off meanwhile."""
        now, energy = time.monotonic(), self.engine.energy
        self._counted["seconds"] += now - self._written
        self._written = now
        if energy is not None:
            self._counted["joules"] += energy.busy - self._joules
            self._joules = energy.busy
        try:
            kept = read()  # deleted or switched off: nothing is made anew
            if kept is None or not kept["on"]:
                return
            with _locked(seconds) as held:
                kept = read() if held else None
                if kept is not None and kept["on"]:
                    add(kept, self._counted, self.model, self.parts)
                    _write(kept)
                    self._counted = dict.fromkeys(SUMS, 0)
        except Exception as e:  # of a file that anybody may have changed
            if not self._failed:
                self._failed = True
                log.warning("usage is not counted: %s", e)
