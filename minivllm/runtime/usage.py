"""Usage statistics on this machine, for its owner: off until ``minivllm stats on``, and never sent anywhere.

    $XDG_DATA_HOME/minivllm/usage.json     (default ~/.local/share; the file exists only after ``minivllm stats on``)

    totals, models[NAME], days[DATE]   runs, requests, prompt_tokens, output_tokens, seconds, joules
    parts[SEAM][NAME]                  runs, output_tokens

The file has only sums: no prompt, no text, no time of a request, no name of a user or a host.  Several processes may
write it: each takes a lock, reads the file, adds its sums since its last write, and replaces the file.  The size of the
file is bounded: the least used models and parts are summed as "others", and only the last ``DAYS`` days are kept.

A failure never ends a run.  It is logged once.
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
# largest numbers: of names of models, and of plug-ins of one kind; of days; of characters of a name
MOST, DAYS, LONGEST = 100, 366, 200
OTHERS = "others"
EVERY = 300.0  # seconds between writes of a running process
PATIENCE = 1.0  # seconds that the end of a run waits for the lock
log = logging.getLogger("minivllm")


def path() -> Path:
    """Return the path of the file, whether or not it exists."""
    base = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share"  # a relative path is ignored
    return folder / "minivllm" / "usage.json"


def empty() -> dict[str, Any]:
    """Return statistics without any run, switched off."""
    today = datetime.date.today().isoformat()
    return {"format": FORMAT, "version": VERSION, "on": False, "since": today,
            "totals": {}, "models": {}, "days": {}, "parts": {}}  # fmt: skip


def read() -> dict[str, Any] | None:
    """Return the statistics, or None without a file.  ConfigError for a file in another format."""
    at = path()
    if not os.path.exists(at):
        return None
    found = files.read_json(at, files.LARGE)
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ConfigError(f"{at}: no usage statistics of this version; remove it with `minivllm stats delete`")
    return {**empty(), **found}


def is_on() -> bool:
    """Return whether runs are counted.  Without a file this is a single look at the file system."""
    try:
        return bool((read() or {}).get("on"))
    except (ConfigError, OSError, RuntimeError) as e:  # RuntimeError means that the home folder is unknown
        log.warning("usage is not counted: %s", e)
        return False


def switch(on: bool) -> None:
    """Switch the statistics on or off.  ConfigError if the file cannot be written."""
    with _locked(PATIENCE) as held:
        if not held:
            raise ConfigError(f"{path()}: another process writes it; try again")
        _write({**(read() or empty()), "on": on})


def delete() -> bool:
    """Delete the file, which also switches the statistics off, and return whether it existed.  ConfigError."""
    at = path()
    if not os.path.exists(at.parent):
        return False
    with _locked(PATIENCE):  # without the lock, a process that has read the file would write the old content again
        existed = os.path.exists(at)
        try:
            at.unlink(missing_ok=True)
            _lock_of(at).unlink(missing_ok=True)
        except OSError as e:
            raise ConfigError(f"{at}: cannot be deleted: {e.strerror}") from None
    with contextlib.suppress(OSError):  # the folder still has other files
        at.parent.rmdir()
    return existed


def add(kept: dict[str, Any], counted: Mapping[str, float], model: str, parts: Mapping[str, Sequence[str]]) -> None:
    """Add the counts of a run to the statistics: the totals and those of its model, day and plug-ins.  Old days and
    rare names are dropped."""
    today = datetime.date.today().isoformat()
    _sum(kept["totals"], counted)
    _sum(kept["models"].setdefault(model[-LONGEST:], {}), counted)
    _sum(kept["days"].setdefault(today, {}), counted)
    for seam, names in parts.items():
        for name in names:
            of_part = {key: counted[key] for key in ("runs", "output_tokens")}
            _sum(kept["parts"].setdefault(seam, {}).setdefault(name[-LONGEST:], {}), of_part)
    kept["models"] = _bounded(kept["models"])
    kept["parts"] = {seam: _bounded(found) for seam, found in list(kept["parts"].items())[:MOST]}
    kept["days"] = dict(sorted(kept["days"].items())[-DAYS:])


def _sum(to: dict[str, float], counted: Mapping[str, float]) -> None:
    """Add counts to the sums of a model, a day or a part."""
    for key, value in counted.items():
        to[key] = round(to.get(key, 0) + value, 3)


def _bounded(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the sums of at most ``MOST`` names.  The least used names are summed as ``OTHERS``."""
    if len(found) <= MOST:
        return found
    rest = found.pop(OTHERS, {})
    order = sorted(found, key=lambda name: -found[name].get("output_tokens", 0))
    for name in order[MOST - 1 :]:
        _sum(rest, found[name])
    return {**{name: found[name] for name in order[: MOST - 1]}, OTHERS: rest}


def _lock_of(at: Path) -> Path:
    """Return the path of the lock of a file."""
    return at.with_suffix(".lock")


@contextlib.contextmanager
def _locked(seconds: float) -> Iterator[bool]:
    """Hold the lock of the file, and yield whether it could be acquired within ``seconds``.  ConfigError if the folder
    or file cannot be written."""
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
        yield True  # closing the file releases the lock


def _write(kept: Mapping[str, Any]) -> None:
    """Replace the file by ``kept``, in one step.  ConfigError if it cannot be written."""
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
    """Counter of an engine's requests, used on the thread of its loop.

    It writes the sums at the engine's end and every ``EVERY`` seconds."""

    def __init__(self, engine: Engine, model: str, parts: Mapping[str, Sequence[str]]) -> None:
        self.engine, self.model, self.parts = engine, model, parts
        self._counted: dict[str, float] = {**dict.fromkeys(SUMS, 0), "runs": 1}
        self._written = time.monotonic()
        self._joules = 0.0
        self._failed = False
        engine.events.request_finished.subscribe(self._request_finished)
        engine.events.engine_stopped.subscribe(lambda error: self.write(PATIENCE))

    def _request_finished(self, request: Request) -> None:
        """Count an ended request."""
        counted = self._counted
        counted["requests"] += 1
        counted["prompt_tokens"] += len(request.prompt)
        counted["output_tokens"] += sum(seq.emitted for seq in request.sequences)
        if time.monotonic() - self._written >= EVERY:
            self.write(0.0)

    def write(self, seconds: float) -> None:
        """Add the sums since the last write to the file, unless the statistics are switched off.

        Wait at most ``seconds`` for the lock."""
        now = time.monotonic()
        energy = self.engine.energy
        self._counted["seconds"] += now - self._written
        self._written = now
        if energy is not None:
            self._counted["joules"] += energy.busy - self._joules
            self._joules = energy.busy
        try:
            kept = read()  # None if the file was deleted, which must not be created again
            if kept is None or not kept["on"]:
                return
            with _locked(seconds) as held:
                kept = read() if held else None
                if kept is not None and kept["on"]:
                    add(kept, self._counted, self.model, self.parts)
                    _write(kept)
                    self._counted = dict.fromkeys(SUMS, 0)
        except Exception as e:  # the file may have any content
            if not self._failed:
                self._failed = True
                log.warning("usage is not counted: %s", e)
