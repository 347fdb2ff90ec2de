"""``minivllm zygote``: run commands in forks of a process (the zygote) that has already imported torch and minivllm."""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from minivllm.cli.common import report
from minivllm.errors import ConfigError, ResourceError

IDLE = 3600.0  # seconds
PASSED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")
START = "`minivllm zygote start` starts one"


def add_commands(command: Any) -> None:
    """Add the command ``zygote``; ``command(name, ...)`` makes its parser."""
    text = "Start commands faster: in forks of a process that has imported torch already (Linux)."
    sub = command("zygote", "cli.zygote:zygote", text)
    sub.add_argument("verb", choices=["start", "stop", "status", "run"], help="run: `zygote run generate TEXT`")
    sub.add_argument("--idle", type=float, default=IDLE, help="seconds without a command to its end (default 3600)")
    sub.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="of run: a command and its arguments")


def zygote(args: argparse.Namespace) -> int:
    """Run ``minivllm zygote`` and return its exit code.  ConfigError for a command after a verb other than ``run``."""
    from minivllm.runtime.processes import zygote as server

    server.check_system()
    if args.verb == "run":
        return run(args.words)
    if args.words:
        raise ConfigError(f"zygote {args.verb} takes no command; `minivllm zygote run COMMAND` runs one")
    if args.verb == "start":
        return start(args.idle)
    found = ask(args.verb)
    if found is None:
        report(f"no zygote is running; {START}")
        return 1
    if args.verb == "status":
        counts = f"{found['served']} commands started, {found['running']} running"
        print(f"process {found['pid']}, for {found['seconds']:.0f} s, {counts}")
    return 0


def ask(verb: str) -> dict[str, Any] | None:
    """Send "stop" or "status" to the zygote process and return its answer; None if no zygote is running.  ResourceError
    if it ends the connection without an answer."""
    from minivllm.runtime.processes import zygote as server

    end = server.connect()
    if end is None:
        return None
    with end:
        server.send(end, {"do": verb})
        try:
            return server.receive(end)[0]
        except (EOFError, ConnectionResetError):
            raise ResourceError("the zygote did not answer; see `minivllm zygote status`") from None


def start(idle: float) -> int:
    """Start the zygote process (a warm process that is forked for each command), and return the exit code 0 once it can
    run commands.  ConfigError if ``idle``, in seconds, is not positive.  ResourceError if the process cannot start."""
    from minivllm.registration import fresh

    if not 0 < idle < float("inf"):
        raise ConfigError(f"--idle {idle}: expected a positive number of seconds")
    found = ask("status")
    if found is not None:
        report(f"a zygote is running already: process {found['pid']}")
        return 0
    read, write = os.pipe()
    command = fresh.command("minivllm.runtime.processes.zygote:main", str(write), str(idle))
    null = subprocess.DEVNULL
    with os.fdopen(read) as lines:
        process = subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, pass_fds=[write], start_new_session=True, cwd="/"
        )
        os.close(write)
        answer = lines.read()
    if answer != "ready":
        process.wait()
        raise ResourceError(f"the zygote could not start: {answer or f'exit status {process.returncode}'}")
    process.returncode = 0  # keeps Python from warning that the process still runs
    return 0


def run(words: list[str]) -> int:
    """Run a command of minivllm in a fork of the zygote, and return its exit code.  ConfigError if no command is given.
    ResourceError if no zygote is running, if it refuses, or if it ends first."""
    from minivllm.runtime.processes import zygote as server

    if not words or words[0] == "zygote":
        raise ConfigError("zygote run: expected a command of minivllm, such as `minivllm zygote run generate TEXT`")
    end = server.connect()
    if end is None:
        raise ResourceError(f"no zygote is running; {START}")
    mask = os.umask(0)
    os.umask(mask)
    message = {"do": "run", "words": words, "folder": os.getcwd(), "umask": mask, "environ": dict(os.environ)}
    sys.stdout.flush()
    with end:
        try:
            server.send(end, message, (0, 1, 2))
            answer = waited(end)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise ResourceError("the zygote ended the connection before the command ended") from None
    if "error" in answer:
        problem = f"the zygote refuses the command: {answer['error']}"
        raise ResourceError(f"{problem}; use `minivllm zygote stop`, then `minivllm zygote start`")
    return ended(answer["status"])


def waited(end: socket.socket) -> dict[str, Any]:
    """Return the zygote's last message; until then pass the signals of this process to the command."""
    from minivllm.runtime.processes import zygote as server

    def passed(number: int, _: Any) -> None:
        end.send(bytes([number]))

    def stopped(number: int, _: Any) -> None:
        """Stop the command, then this process; after SIGCONT continue both."""
        end.send(bytes([signal.SIGSTOP]))
        os.kill(os.getpid(), signal.SIGSTOP)
        end.send(bytes([signal.SIGCONT]))

    for name in PASSED:
        signal.signal(getattr(signal, name), passed)
    signal.signal(signal.SIGTSTP, stopped)
    select.select([end], [], [])
    return server.receive(end)[0]


def ended(status: int) -> int:
    """Return the exit code of a command; if a signal ended the command, end this process by the same signal."""
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status
