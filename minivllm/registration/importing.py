"""Import external modules so that every failure becomes an error with a name, even a failure that ends the process.

A module may call ``os._exit``, or a library that it loads may crash.  Nothing can prevent that in the same process.  An
external module is therefore first imported in a forked child process, which takes a few milliseconds.  A forked child
may also die because of the fork itself, as threads and devices do not survive it.  If it dies, the import is repeated
in a new process, which is slower, and that result counts.
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

from minivllm.errors import PluginError, describe_error, from_signal, shown
from minivllm.registration.fresh import command, import_target

from .deadline import TooSlow, deadline, seconds
from .discovery import BUILTIN

CAME_THROUGH = 77  # exit status of a child process whose import returned or raised an exception
PATIENCE = 10.0  # seconds after which the trial of an import is abandoned
on = hasattr(os, "fork") and sys.platform == "linux"  # whether imports are tried in a child process first


def guarded_import(label: str, target: str, source: str) -> Any:
    """Import and return a target.  PluginError for any failure.

    The message begins with ``label``, the label of the plug-in.  It names the target unless ``source`` contains it.
    """
    at = "" if repr(target) in source else f" from {shown(target)}"
    limit = 0.0
    if not source.startswith(f"{BUILTIN} "):
        limit = seconds()
        outcome = ends_process(target)
        if outcome:
            raise PluginError(f"{label} could not be imported{at}: importing it {outcome}")
    try:
        with deadline(limit):
            return import_target(target)
    except BaseException as exc:
        # SystemExit and Rust panics too: a module must not end the engine without a message.
        if from_signal(exc) and not isinstance(exc, TooSlow):
            raise
        hint = _hint(exc, target, source)
        raise PluginError(f"{label} could not be imported{at}: {describe_error(exc)}{hint}") from exc


def _hint(exc: BaseException, target: str, source: str) -> str:
    """Return a hint for a failed import: that the plug-in was written for another minivllm, or that its folder is not
    on the import path; else ""."""
    if not isinstance(exc, ImportError) or not exc.name:
        return ""
    if exc.name.partition(".")[0] == "minivllm":
        return ". It was written for another minivllm: upgrade it; plug-ins import from minivllm.plugin"
    lost = isinstance(exc, ModuleNotFoundError) and exc.name == target.partition(":")[0].partition(".")[0]
    if lost and source.startswith("target "):
        return ". Add its folder to PYTHONPATH (PYTHONPATH=. for the current folder)"
    return ""


def ends_process(target: str) -> str:
    """Return how a process ends when it imports a target.  "" means that it survives, or that this could not be
    determined."""
    if not on or target.partition(":")[0] in sys.modules:
        return ""
    status = _forked(target)
    return "" if status is None or status == CAME_THROUGH else _fresh(target)


def how_it_ended(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"ended the process with exit code {status}"
    try:
        return f"killed the process: {signal.Signals(-status).name}"
    except ValueError:
        return f"killed the process: signal {-status}"


def _forked(target: str) -> int | None:
    """Import a target in a forked child, and return the exit status of the child.

    None if the import takes too long or no child can be created.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about forking a process with threads
            child = os.fork()
    except OSError:
        return None
    if not child:
        try_out(target)
    deadline_at = time.monotonic() + PATIENCE
    wait = 0.001
    try:
        while time.monotonic() < deadline_at:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(wait)
            wait = min(2 * wait, 0.02)
        return None
    except ChildProcessError:  # the application has already waited for all children
        child = 0
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def try_out(target: str) -> None:
    """Import a target, and end this process with ``CAME_THROUGH`` if the import does not end it."""
    try:
        # a session of its own, so that a signal that the module sends to its process group reaches no other process
        os.setsid()
        faulthandler.disable()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        sys.stdout = sys.stderr = open(null, "w")  # noqa: SIM115  (replaced streams may write elsewhere)
        with contextlib.suppress(BaseException):
            import_target(target)
    finally:
        os._exit(CAME_THROUGH)


def _fresh(target: str) -> str:
    """Import a target in a new process, and return how the process ended, or "".

    The result is "" if the process survives the import or takes too long.
    """
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        status = subprocess.run(command(f"{__name__}:try_out", target), timeout=4 * PATIENCE).returncode
        return "" if status == CAME_THROUGH else how_it_ended(status)
    return ""
