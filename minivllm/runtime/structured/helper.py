"""The process in which grammars are tried out: ``Helper`` is the engine's side, ``main`` the other.

They talk in lines of JSON.  A grammar is compiled, and a few tokens are drawn with it, before the engine's own process
looks at it.  That happens in a child that the helper forks beforehand, as a library may take seconds to start: a
grammar that takes too long (of the processor's time, or a multiple of it by the clock) or too much memory, or that
brings the library down, costs the child its life and nobody else any time.  A plug-in that started threads cannot be
forked; then the helper itself is killed and replaced.
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

START = 60.0  # seconds that a process may take to start: importing a library may take some on a busy machine
STOP = signal.SIGUSR1  # ends who is busy with a grammar, and nobody else
LEFT = 3  # the status of a child that was asked nothing any more
DRAWS = 4  # tokens that are drawn with a new grammar
BY_THE_CLOCK = 5  # times the processor's seconds that a grammar may take by the clock: a loaded machine is slow
GRACE = 5.0  # seconds beyond the limit after which a helper that should have ended its child is taken for stuck


class Stopped(ResourceError):
    """Nobody wants to know any more."""

    def __init__(self) -> None:
        super().__init__("nobody wants it any more")


class Helper:
    """One process, started by need and replaced when it was killed.  One thread at a time, but for ``stop``."""

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
        """End what is being tried out now, from another thread.  It is without effect where nothing is."""
        process, self._stopped = self._process, True
        if self._ready and process is not None and process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, STOP)

    def start(self) -> None:
        """Start a process if there is none; returns at once."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minivllm.runtime.structured.helper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a signal to its group is for it and its child
        )
        self._ready = False
        self._rest = b""

    def make_ready(self) -> None:
        """Start a process, and wait until it has its plug-in."""
        self.start()
        self._say_hello()

    def check(self, source: GrammarSource) -> None:
        """ValueError if the plug-in refuses it or it does not keep within the limits; PluginError if it fails on it;
        ResourceError if no process could be started; Stopped."""
        try:
            self._check(source)
        finally:
            self._stopped = False

    def _check(self, source: GrammarSource) -> None:
        for again in (True, False):
            self.start()
            try:
                self._say_hello()
                if self._stopped:
                    raise Stopped
                line = json.dumps(dataclasses.asdict(source)).encode() + b"\n"
                answer = self._ask(line, (BY_THE_CLOCK * self.seconds + GRACE) if self._forks else self.seconds)
                break
            except TimeoutError:
                self._kill()
                answer = {"ended": "time"}
                break
            except OSError as e:
                ready = self._ready
                self._kill()
                if ready:
                    answer = {"ended": "stopped" if self._stopped else "memory"}
                    break
                if not again:
                    raise ResourceError(f"the process that tries grammars out does not start: {e}") from e
        if answer.get("ended") == "stopped":
            raise Stopped
        if (ended := answer.get("ended")) == "time":
            raise ValueError(
                f"it takes more than {self.seconds:g} s to compile: simplify it, or raise grammar_compile_seconds"
            )
        if ended:
            raise ValueError(
                f"it takes more than {self.megabytes} MB of memory to compile, or is more than the library can "
                "hold: simplify it, or raise grammar_compile_mb"
            )
        if "failed" in answer:
            raise PluginError(f"{self.name} failed: {answer['failed']}")
        if "error" in answer:
            raise ValueError(answer["error"])

    def _say_hello(self) -> None:
        if self._ready:
            return
        try:
            answer = self._ask(self._hello, START)
        except TimeoutError as e:
            raise OSError(f"no answer in {START:g} s") from e
        if "error" in answer:
            self._kill()
            raise ResourceError(f"the plug-in cannot be made in a process of its own: {answer['error']}")
        self._ready, self._forks = True, answer["forks"]

    def _ask(self, line: bytes, seconds: float) -> Any:
        """Send a line and read one.  TimeoutError; OSError if the process has died."""
        process, end = self._process, time.monotonic() + seconds
        assert process is not None and process.stdin is not None and process.stdout is not None
        left = memoryview(line)
        while left:
            left = left[process.stdin.write(left) :]
        while b"\n" not in self._rest:
            wait = end - time.monotonic()
            if wait <= 0 or not select.select([process.stdout], [], [], wait)[0]:
                raise TimeoutError
            got = process.stdout.read(1 << 16)
            if not got:
                raise BrokenPipeError(f"it ended with {process.wait()}")
            self._rest += got
        answer, _, self._rest = self._rest.partition(b"\n")
        return json.loads(answer)

    def _kill(self) -> None:
        """End the process and start another, which is warm by the time somebody asks again."""
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
    """Answer each line until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's; the end of its pipe ends this process
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
        gc.disable()  # a collection in a child would copy all pages that it looks at
        answer: dict[str, Any] = {"forks": forks}
    except Exception as e:
        answer = {"error": f"{type(e).__name__}: {e}"}
    say(answer)
    while True:
        if forks and (child := os.fork()):
            status = os.waitpid(child, 0)[1]
            if status and os.waitstatus_to_exitcode(status) == LEFT:
                sys.exit(0)
            if status:  # else it has answered
                why = {int(signal.SIGPROF): "time", int(signal.SIGALRM): "time", int(STOP): "stopped"}
                say({"ended": why.get(-os.waitstatus_to_exitcode(status), "memory")})
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            os._exit(LEFT if forks else 0)
        signal.signal(STOP, signal.SIG_DFL)
        # A timer's signal ends a process whatever it is busy with; the helper itself if there is nobody left who would.
        signal.setitimer(signal.ITIMER_REAL, BY_THE_CLOCK * seconds if forks else 4 * seconds)
        if forks:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor, so that load refuses nobody's grammar
            limit_memory(megabytes)
        answer = {}
        try:
            try_out(plugin, GrammarSource(**json.loads(line)))
        except ValueError as e:
            answer = {"error": str(e)}
        except MemoryError:
            raise
        except BaseException as e:  # a fault of the plug-in, not of the grammar
            answer = {"failed": describe_error(e)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(STOP, signal.SIG_IGN)
        say(answer)
        if forks:
            os._exit(0)


def say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def threads() -> int:
    """Of this process, those of libraries too."""
    return len(os.listdir("/proc/self/task"))


def limit_memory(megabytes: int) -> None:
    """What the process may take beyond what it has."""
    import resource

    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + (megabytes << 20), resource.RLIM_INFINITY))


def try_out(plugin: Grammar, source: GrammarSource) -> None:
    """Compile it and draw a few tokens.  ValueError if it is refused, or no text fits it."""
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
            raise ValueError("no text that this model's tokens can spell fits it")
        token = int(rng.choice(allowed))
        if token in plugin.ctx.eos_ids:
            return
        if plugin.accept([matcher], [[token]])[0] != 1:
            why = plugin.fill([matcher], mask, [0]).get(0)  # a limit of the library, say
            raise ValueError(why or f"token {token} is allowed and then refused: a fault of the library")


if __name__ == "__main__":
    main()
