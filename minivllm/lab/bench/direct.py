"""Targets of a benchmark besides a running server: an engine in this process, or a server started for it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, MinivllmError, ResourceError, describe_error
from minivllm.registration import fresh

from . import Result
from .answers import TimedAnswer
from .workload import BenchAsk

if TYPE_CHECKING:
    from minivllm.config import Loaded

START = 600.0  # seconds to wait for a server to start
PATIENCE = 20.0  # time limit in seconds for the end of the process


@dataclass(frozen=True)
class DirectEngine:
    """An ``AsyncLLM`` as a target, without HTTP: engine and benchmark share a process and its event loop."""

    llm: Any
    temperature: float

    async def reset(self) -> None:
        """Empty the prefix cache, so that no prompt of an earlier run is found."""
        await self.llm._ask(self.llm.engine.reset_prefix_cache)

    async def ask(self, ask: BenchAsk, seed: int) -> TimedAnswer:
        """Generate the answer to a request; a failure is stored in ``error`` and not raised."""
        from minivllm.core.interfaces.params import SamplingParams

        params = SamplingParams(
            temperature=self.temperature, max_tokens=ask.max_tokens, ignore_eos=True, seed=seed, detokenize=False
        )
        prompt: Any = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        answer = TimedAnswer()
        pieces = 0
        began = time.perf_counter()
        last = began
        try:
            async for piece in self.llm.generate(prompt, params):
                now = time.perf_counter()
                if piece.token_ids:
                    if pieces:
                        answer.itls.append(now - last)
                    else:
                        answer.ttft = now - began
                    last = now
                    pieces += 1
                    answer.output_tokens += len(piece.token_ids)
                if piece.finished:
                    answer.error = piece.output.error or ""
                    answer.prompt_tokens = len(piece.output.prompt_token_ids)
        except MinivllmError as exc:
            answer.error = describe_error(exc)
        answer.latency = last - began
        return answer


@contextlib.contextmanager
def started(loaded: Loaded) -> Iterator[tuple[str, int]]:
    """Start ``minivllm serve`` with a configuration, yield its URL and process id, and end it at the end of the
    context.

    Raise ConfigError if packages of a server are missing, and ResourceError with the server's messages if it does not
    start.
    """
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name)]
    if missing:
        needs = f'bench serve starts a server, which needs {", ".join(missing)}: pip install "minivllm[serve]"'
        raise ConfigError(f"{needs}; or measure the engine without HTTP (--direct), or a running server (--url)")
    values = loaded.engine.model_dump(mode="json", exclude_unset=True, exclude={"allow_targets"})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)  # JSON is YAML
        argv = [sys.executable, "-m", "minivllm", "serve", "--config", path, "--port", "0", "--log-format", "json"]
        argv += [part for module in loaded.engine.allow_targets for part in ("--allow-target", module)]
        with terminable():
            pipes: Result = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(argv, **pipes, text=True, env=fresh.environ())
            killer = threading.Timer(START, process.kill)
            killer.start()
            try:
                url = _url(process)
                killer.cancel()
                threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
                yield url, process.pid
            finally:
                killer.cancel()
                end(process)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise SystemExit in the context on SIGTERM, so that processes that the context has started are ended too.

    Python delivers signals to the main thread, so this does nothing in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[str], patience: float = PATIENCE) -> None:
    """Terminate a process, and kill it if it still runs after ``patience`` seconds."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    """Return the URL that a server logs when it is ready.  Raise ResourceError if it ends before."""
    messages = []
    for line in process.stderr or ():
        messages.append(line.strip())
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(line)["url"])
    raise ResourceError(f"the server ended with {process.wait()}: {' '.join(messages[-4:])}")
