"""A helper process that tries out grammars: ``Helper`` is the engine's end, and ``main`` runs in the process.

They exchange lines of JSON.  The helper compiles a grammar and draws a few tokens with it before the engine's process
compiles it.  A child that the helper forks in advance does this, because a library may take seconds to start.  A
grammar that exceeds its limit of CPU time, real time or memory, or crashes the library, ends only the child.  A plug-in
that started threads cannot be forked; then the helper itself is killed and replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from minivllm.core.interfaces.executor import Part
from minivllm.core.interfaces.grammar import GrammarContext, GrammarSource
from minivllm.errors import PluginError, ResourceError, describe_error

if TYPE_CHECKING:
    from minivllm.core.interfaces.grammar import Grammar

START = 60.0  # longest time in seconds for the start of a process, because imports are slow on a busy machine
STOP = signal.SIGUSR1  # signal that ends the process that compiles a grammar; other processes ignore it
LEFT = 3  # exit status of a child whose helper receives no more requests
DRAWS = 4  # largest number of tokens that the process draws with a new grammar on trial, before a request uses it
BY_THE_CLOCK = 5  # limit of real time of a grammar as a multiple of its limit of CPU time, for loaded machines
GRACE = 5.0  # seconds after the limit until a helper that has not ended its child is killed


class Stopped(ResourceError):
    """Error about a grammar that no request needs any more."""

    def __init__(self) -> None:
        super().__init__("the requests for it have ended")


class Helper:
    """One helper process, started on demand and replaced after it was killed.

    One thread at a time may use it, except for ``stop``."""

    def __init__(self, part: Part, ctx: GrammarContext, seconds: float, megabytes: int) -> None:
        self.name, self.seconds, self.megabytes = part.name, seconds, megabytes
        tokens = [token.decode("latin-1") for token in ctx.tokens]
        hello = {
            "part": dataclasses.asdict(part),
            "tokens": tokens,
            "vocab_size": ctx.vocab_size,
            "eos_ids": list(ctx.eos_ids),
            "seconds": seconds,
            "megabytes": megabytes,
        }
        self._hello = json.dumps(hello).encode() + b"\n"
        self._process: subprocess.Popen | None = None
        self._ready = self._forks = self._stopped = False

    def stop(self) -> None:
        """End the check that another thread runs, if there is one."""
        process = self._process
        self._stopped = True
        if self._ready and process is not None and process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, STOP)

    def start(self) -> None:
        """Start a process if there is none, and return at once."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minivllm.runtime.structured.helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # signals reach only this process and its child
        )
        self._ready = False
        self._rest = b""

    def make_ready(self) -> None:
        """Start a process, and wait until it has loaded its plug-in."""
        self.start()
        self._send_hello()

    def check(self, source: GrammarSource) -> None:
        """Try out a grammar in the process: compile it and draw up to DRAWS tokens with it.

        ValueError if the plug-in refuses the grammar or it exceeds the limits, PluginError if the plug-in fails,
        ResourceError if no process can be started, Stopped after ``stop``."""
        try:
            self._check(source)
        finally:
            self._stopped = False

    def _check(self, source: GrammarSource) -> None:
        """Compile a grammar in the process, and raise the errors that ``check`` describes: too slow, too large, failed
        or refused."""
        answer = self._answer(source)
        ended = answer.get("ended")
        if ended == "stopped":
            raise Stopped
        if ended == "time":
            raise ValueError(
                f"the grammar takes more than {self.seconds:g} s to compile: simplify it, or raise "
                "grammar_compile_seconds"
            )
        if ended:
            raise ValueError(
                f"the grammar takes more than {self.megabytes} MB of memory to compile, or is more than the "
                "library can hold: simplify it, or raise grammar_compile_mb"
            )
        if "failed" in answer:
            raise PluginError(f"{self.name} failed: {answer['failed']}")
        if "error" in answer:
            raise ValueError(answer["error"])

    def _answer(self, source: GrammarSource) -> dict[str, Any]:
        """Return the process's answer about a grammar.  Try twice to start a process.  ResourceError if no process
        starts."""
        line = json.dumps(dataclasses.asdict(source)).encode() + b"\n"
        for again in (True, False):
            self.start()
            try:
                self._send_hello()
                if self._stopped:
                    raise Stopped
                return self._exchange(line, (BY_THE_CLOCK * self.seconds + GRACE) if self._forks else self.seconds)
            except TimeoutError:
                self._kill()
                return {"ended": "time"}
            except OSError as e:
                ready = self._ready
                self._kill()
                if ready:
                    return {"ended": "stopped" if self._stopped else "memory"}
                if not again:
                    raise ResourceError(f"the process that tries grammars out does not start: {e}") from e
        raise AssertionError  # the loop returns or raises

    def _send_hello(self) -> None:
        """Send the plug-in and the vocabulary to a new process and wait until it is ready.  OSError, ResourceError."""
        if self._ready:
            return
        try:
            answer = self._exchange(self._hello, START)
        except TimeoutError as e:
            raise OSError(f"the helper process did not answer within {START:g} s") from e
        if "error" in answer:
            self._kill()
            raise ResourceError(f"the plug-in cannot be made in a process of its own: {answer['error']}")
        self._ready, self._forks = True, answer["forks"]

    def _exchange(self, line: bytes, seconds: float) -> Any:
        """Send a line and return the answer, parsed from JSON.  TimeoutError after ``seconds``, OSError
        (BrokenPipeError) if the process has died."""
        process = self._process
        end = time.monotonic() + seconds
        assert process is not None and process.stdin is not None and process.stdout is not None
        left = memoryview(line)
        while left:
            left = left[process.stdin.write(left) :]
        while b"\n" not in self._rest:
            wait = end - time.monotonic()
            if wait <= 0 or not select.select([process.stdout], [], [], wait)[0]:
                raise TimeoutError
            data = process.stdout.read(1 << 16)
            if not data:
                raise BrokenPipeError(f"the helper process ended with exit status {process.wait()}")
            self._rest += data
        answer, _, self._rest = self._rest.partition(b"\n")
        return json.loads(answer)

    def _kill(self) -> None:
        """End the process and start another, which will be ready for the next grammar."""
        self.close()
        self.start()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# ---- the other side --------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Receive lines with grammars from the engine and send the answers, until the engine closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C; this process ends when its pipe is closed
    signal.signal(STOP, signal.SIG_IGN)
    hello = json.loads(sys.stdin.buffer.readline())
    seconds, megabytes, forks = hello["seconds"], hello["megabytes"], False
    try:
        from minivllm.registry import build_part

        tokens = tuple(token.encode("latin-1") for token in hello["tokens"])
        ctx = GrammarContext(tokens, hello["vocab_size"], tuple(hello["eos_ids"]))
        before = threads()
        plugin = build_part("grammar", Part(**hello["part"]), ctx)
        forks = threads() == before
        if not forks:
            limit_memory(megabytes)
        gc.disable()  # a garbage collection in a child would write to shared pages, and so copy them
        answer: dict[str, Any] = {"forks": forks}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    send_answer(answer)
    while True:
        child = os.fork() if forks else 0
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == LEFT:
                sys.exit(0)
            if code:  # the child has not answered
                reasons = {int(signal.SIGPROF): "time", int(signal.SIGALRM): "time", int(STOP): "stopped"}
                send_answer({"ended": reasons.get(-code, "memory")})
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(LEFT if forks else 0)
        signal.signal(STOP, signal.SIG_DFL)
        # a timer signal ends a process in any state: the child, or the helper itself if it cannot fork
        signal.setitimer(signal.ITIMER_REAL, BY_THE_CLOCK * seconds if forks else 4 * seconds)
        if forks:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time, so that load does not cause refusals
            limit_memory(megabytes)
        answer = {}
        try:
            try_out(plugin, GrammarSource(**json.loads(line)))
        except ValueError as e:
            answer = {"error": str(e)}
        except MemoryError:
            raise
        except BaseException as e:  # the plug-in fails; a wrong grammar is a ValueError
            answer = {"failed": describe_error(e)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(STOP, signal.SIG_IGN)
        send_answer(answer)
        if forks:
            os._exit(0)


def send_answer(answer: dict[str, Any]) -> None:
    """Send an answer to the engine."""
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def threads() -> int:
    """Return the number of threads of this process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def limit_memory(megabytes: int) -> None:
    """Limit the memory of this process to ``megabytes`` more than it has now."""
    import resource

    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + (megabytes << 20), resource.RLIM_INFINITY))


def try_out(plugin: Grammar, source: GrammarSource) -> None:
    """Compile a grammar, and draw up to DRAWS random tokens that its masks allow, as a trial of the plug-in.

    ValueError if the grammar or an allowed token is refused, or if no token is allowed."""
    matcher = plugin.start(plugin.compile(source))
    width = plugin.ctx.vocab_size
    mask = np.empty((1, -(-width // 32)), np.int32)
    rng = np.random.default_rng(0)
    for _ in range(DRAWS):
        failed = plugin.fill([matcher], mask, [0])
        if failed:
            raise ValueError(failed[0])
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:width])
        if not len(allowed):
            raise ValueError("the tokens of this model cannot spell any text that fits the grammar")
        token = int(rng.choice(allowed))
        if token in plugin.ctx.eos_ids:
            return
        if plugin.accept([matcher], [[token]])[0] != 1:
            reason = plugin.fill([matcher], mask, [0]).get(0)  # the reason may be a limit of the library
            raise ValueError(reason or f"token {token} is allowed and then refused: a fault of the library")


if __name__ == "__main__":
    main()
