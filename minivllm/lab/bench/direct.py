"""Who is asked, beside a server that is there: an engine in this process, or a server that is started for it."""

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
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, MinivllmError, ResourceError, describe_error
from minivllm.registration import fresh

from .answers import TimedAnswer
from .workload import BenchAsk

if TYPE_CHECKING:
    from minivllm.config import Loaded

START = 600.0  # seconds that a server may take to start
PATIENCE = 20.0  # seconds that it may take to end


class DirectEngine:
    """An ``AsyncLLM``: no HTTP, no second process, and the loop of the load shares its interpreter with the engine."""

    def __init__(self, llm: Any, temperature: float) -> None:
        self.llm, self.temperature = llm, temperature

    async def reset(self) -> None:
        """No prefix of an earlier run is found."""
        await self.llm._ask(self.llm.engine.reset_prefix_cache)

    async def ask(self, ask: BenchAsk, seed: int) -> TimedAnswer:
        """One answer; what goes wrong is its ``error``."""
        from minivllm.core.interfaces.params import SamplingParams

        params = SamplingParams(
            temperature=self.temperature, max_tokens=ask.max_tokens, ignore_eos=True, seed=seed, detokenize=False
        )
        answer, began = TimedAnswer(), time.perf_counter()
        prompt: Any = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        last, pieces = began, 0
        try:
            async for piece in self.llm.generate(prompt, params):
                now = time.perf_counter()
                if piece.token_ids:
                    if pieces:
                        answer.itls.append(now - last)
                    else:
                        answer.ttft = now - began
                    last, pieces = now, pieces + 1
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
    """``minivllm serve`` with a configuration, as a process of its own: its URL and process id.  ResourceError with
    what it said if it does not start; ended at the end of the block."""
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name)]:
        what = f'bench serve starts a server, which needs {", ".join(missing)}: pip install "minivllm[serve]"'
        raise ConfigError(f"{what}; or measure the engine without HTTP: --direct, or a server that runs: --url")
    values = loaded.engine.model_dump(mode="json", exclude_unset=True, exclude={"allow_targets"})
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)  # JSON is YAML
        argv = [sys.executable, "-m", "minivllm", "serve", "--config", path, "--port", "0", "--log-format", "json"]
        argv += [part for module in loaded.engine.allow_targets for part in ("--allow-target", module)]
        with terminable():
            pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
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
    """SIGTERM ends the block with SystemExit, so that what was started in it is ended too.  Signals go to the main
    thread: a block of another one is left as it is."""
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
    """Terminate a process, and kill it if it is still there after ``patience`` seconds."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stderr or ():
        said.append(line.strip())
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(line)["url"])
    raise ResourceError(f"the server ended with {process.wait()}: {' '.join(said[-4:])}")
