"""Importing what is not ours: a failure is an error with a name, even where it would be the end of this process.

A module may call ``os._exit``, or a library that it loads may crash, and nothing in this process can hold that.  So a
third party's module is imported in a child first, which is forked for it and imports what this process would, in some
milliseconds.  A child that ends the wrong way may have died of having been forked (of threads or a device that it does
not have); a fresh process, slower, has the last word.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

from minivllm.errors import PluginError, describe_error, shown
from minivllm.registration.fresh import command, import_target

from .deadline import deadline, seconds
from .discovery import BUILTIN

CAME_THROUGH = 77  # the status of a process that had imported it, or had an exception of it
PATIENCE = 10.0  # seconds; an import that takes longer is not tried out
on = hasattr(os, "fork") and sys.platform == "linux"  # False in a process that was itself started to try one out


def guarded_import(who: str, target: str, source: str) -> Any:
    """Import a target; any failure is a PluginError that names ``who``, and the target where ``source`` does not."""
    at = "" if repr(target) in source else f" from {shown(target)}"
    limit = 0.0
    if not source.startswith(f"{BUILTIN} "):
        limit = seconds()
        if how := ends_process(target):
            raise PluginError(f"{who} could not be imported{at}: importing it {how}")
    try:
        with deadline(limit):
            return import_target(target)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        # SystemExit too, and a panic in Rust: a module that ends when imported must not end the engine without a word
        raise PluginError(
            f"{who} could not be imported{at}: {describe_error(exc)}{_hint(exc, target, source)}"
        ) from exc


def _hint(exc: BaseException, target: str, source: str) -> str:
    """Return what to do about a failed import, or nothing."""
    if not isinstance(exc, ImportError) or not exc.name:
        return ""
    if exc.name.partition(".")[0] == "minivllm":
        return ". It was written for another minivllm: upgrade it; plug-ins import from minivllm.plugin"
    lost = isinstance(exc, ModuleNotFoundError) and exc.name == target.partition(":")[0].partition(".")[0]
    if lost and source.startswith("target "):
        return ". Put the folder it is in on PYTHONPATH (PYTHONPATH=. for the current one)"
    return ""


def ends_process(target: str) -> str:
    """How a process ends that imports this; "" if it goes on, or nobody can say."""
    if not on or target.partition(":")[0] in sys.modules:
        return ""
    status = _forked(target)
    return "" if status is None or status == CAME_THROUGH else _fresh(target)


def how_it_ended(status: int) -> str:
    """The status of a process, in words."""
    if status >= 0:
        return f"ended the process with exit code {status}"
    try:
        return f"killed the process: {signal.Signals(-status).name}"
    except ValueError:
        return f"killed the process: signal {-status}"


def _forked(target: str) -> int | None:
    """The status of a child that imports it; None if it takes too long, or there can be no child."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process has threads: see above
            child = os.fork()
    except OSError:
        return None
    if not child:
        try_out(target)
    until = time.monotonic() + PATIENCE
    wait = 0.001
    try:
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(wait)
            wait = min(2 * wait, 0.02)
        return None
    except ChildProcessError:  # the application waits for all children itself
        child = 0
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def try_out(target: str) -> None:
    """Import it and end this process."""
    try:
        os.setsid()  # a signal to its group is for nobody else
        faulthandler.disable()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        sys.stdout = sys.stderr = open(null, "w")  # noqa: SIM115  who has replaced them may write elsewhere
        with contextlib.suppress(BaseException):
            import_target(target)
    finally:
        os._exit(CAME_THROUGH)


def _fresh(target: str) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        status = subprocess.run(command(f"{__name__}:try_out", target), timeout=4 * PATIENCE).returncode
        return "" if status == CAME_THROUGH else how_it_ended(status)
    return ""
