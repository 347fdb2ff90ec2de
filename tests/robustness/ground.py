"""The server on which lines are played: ``minivllm serve`` as a process, which is read only through its sockets.

After every case it must be in its first state (``at_rest``): the invariants I1 to I6, I12 and I13 from
``/debug/state``, and a golden request.  After every line I7 to I9 and I14 are checked too (``settled``), and after a
round I10 (``memory``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from http_helpers import near

ROOT = Path(__file__).resolve().parents[2]
KEY = "sk-robust"
OPTIONS = (  # a KV cache of 512 tokens for a model with 1024, short time limits, and few kept grammars (see I10)
    "--max-model-len", "1024", "--max-num-seqs", "8", "--max-queue", "16", "--set", "num_kvcache_blocks=33",
    "--set", "kvcache_block_size=16", "--set", "server.header_timeout=1.0", "--set", "server.body_timeout=1.5",
    "--set", "server.write_timeout=2", "--set", "server.keep_alive=1", "--set", "server.ping_interval=1",
    "--set", "server.idle_timeout=20", "--set", "batch_invariant=true", "--set", "grammar_cache_mb=1",
)  # fmt: skip
GOLDEN = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "logprobs": 1, "ignore_eos": True}
SHORT = {**GOLDEN, "max_tokens": 4}  # the request after each case; the whole one follows each line
REST = 4.0  # seconds until all resources must be free
SLACK = 0.02  # a share of the memory of a process


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "minivllm", *words]


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(p) for p in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Return whether a process exists.  A zombie counts, because its parent has not waited for it."""
    return os.path.exists(f"/proc/{pid}")


class Ground:
    """A server at ``url``.  ``post``, ``raw`` and ``connect`` send to it; ``client`` is an httpx client with a key."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self.key = url, key
        self.host, port = url.removeprefix("http://").rsplit(":", 1)
        self.port = int(port)
        self.client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=30, trust_env=False
        )
        self.golden: Any = None
        self.short: Any = None

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if body is not None:  # the value is sent unchanged, NaN too
            more["content"] = json.dumps(body)
            more["headers"] = {"Content-Type": "application/json", **more.get("headers", {})}
        return self.client.post(path, **more)

    def connect(self, seconds: float = 10.0) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=seconds)

    def raw(self, data: bytes, seconds: float = 10.0) -> bytes:
        """Send bytes, and return the answer until the connection ends or sends nothing more."""
        with self.connect(seconds) as link:
            with contextlib.suppress(ConnectionError):
                link.sendall(data)
            return receive(link)

    def head(self, path: str = "/v1/completions", *lines: str, method: str = "POST") -> bytes:
        """Return the beginning of a request, up to its last header."""
        own = ["Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {self.key}"]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *own, *lines, ""]).encode("latin-1")

    def request(self, body: Any, path: str = "/v1/completions", *lines: str) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(path, f"Content-Length: {len(data)}", *lines) + b"\r\n" + data

    # ---- invariants ----------------------------------------------------------------------------------------------

    def state(self, trim: bool = False) -> dict[str, Any]:
        answer = self.client.get("/debug/state", params={"trim": "1"} if trim else {})
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    def ask_golden(self, body: Any = GOLDEN) -> Any:
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()["choices"]

    def learn(self) -> None:
        """Get the golden answer twice, because the first request fills the prefix cache.

        Processes that the server starts when they are first needed, such as the one that compiles grammars, exist
        afterwards.
        """
        self.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "ab"}})
        self.ask_golden()
        self.golden = self.ask_golden()
        self.short = self.ask_golden(SHORT)

    def at_rest(self) -> dict[str, Any]:
        """Check I1 to I6, I12 and I13, and return the state."""
        end = time.monotonic() + REST
        while True:
            state = self.state()
            left = disorder(state)
            if not left:
                break
            assert time.monotonic() < end, f"not at rest: {left}"
            time.sleep(0.02)
        assert self.client.get("/health").status_code == 200
        if self.golden is not None:
            assert near(self.ask_golden(SHORT), self.short), "I13: the golden request's answer has changed"
        return state

    def close(self) -> None:
        self.client.close()


def disorder(state: dict[str, Any]) -> list[str]:
    """Return the faults in the state of a server at rest."""
    engine, tables = state["engine"], state["server"]["tables"]
    found = [] if engine["fault"] is None else [f"I1-I3, I6: {engine['fault']}"]
    for number, pool in enumerate(engine["pools"]):
        if pool["held"] or pool["free"] + pool["cached"] != pool["total"]:
            found.append(f"I1, I2: pool {number}: {pool}")
    found += [f"I4, I5: engine's {name}: {n}" for name, n in engine["tables"].items() if n]
    found += [f"I5: server's {name}: {n}" for name, n in tables.items() if n and name != "tasks"]
    if engine["counts"]["accepted"] != engine["counts"]["finished"]:
        found.append(f"I12: {engine['counts']}")
    return found


class Served(Ground):
    """``minivllm serve`` in a process of the test.  ``log`` has the lines of its output."""

    def __init__(self, *words: str, key: str = KEY, admin: bool = True, wait: bool = True) -> None:
        more = [*(["--api-key", key] if key else []), *(["--admin"] if admin else [])]
        self.process = subprocess.Popen(
            command("serve", "pocket", "--port", "0", *OPTIONS, *more, *words),
            cwd="/",
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.log: list[str] = []
        self._bad = 0  # number of lines of the log that have been checked
        self._url: str | None = None
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._key, self._admin = key, admin
        if wait:
            self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="replace").rstrip("\n")
            self.log.append(line)
            if '"url"' in line and self._url is None:
                self._url = json.loads(line)["url"]
                self._told.set()
        self._told.set()

    def wait(self) -> Served:
        """Wait until it serves."""
        assert self._told.wait(120) and self._url, f"the server did not start: {self.log[-5:]}"
        super().__init__(self._url, self._key)
        if self._admin:
            self.learn()
            state = self.at_rest()
            self.idle = idle_of(state)
            self.warm: dict[str, int] | None = None
        return self

    def at_rest(self) -> dict[str, Any]:
        if self._admin:
            return super().at_rest()
        assert self.client.get("/health").status_code == 200
        return {}

    def settled(self) -> None:
        """Check I7, I8, I9 and I14, and I13 in full."""
        if not self._admin:
            self.check_log()
            return
        assert near(self.ask_golden(), self.golden), "I13: the golden request's answer has changed"
        end = time.monotonic() + REST
        while True:
            now = idle_of(self.state())
            wrong = [
                f"{name}: {now[name]}, idle: {value}"
                for name, value in self.idle.items()
                if now[name] > value + (2 if name.endswith("fds") else 0)
            ]
            if not wrong:
                break
            assert time.monotonic() < end, f"I7-I9: {wrong}"
            time.sleep(0.05)
        self.check_log()

    def check_log(self) -> None:
        """Check I14: every line is JSON, and none has a traceback or a lost task."""
        lines, self._bad = self.log[self._bad :], len(self.log)
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                raise AssertionError(f"I14: a line of the log is no JSON: {line[:300]}") from None
            reported = json.dumps(row)
            assert "traceback" not in row and "Traceback" not in reported, f"I14: {reported[-600:]}"
            assert "Task was destroyed" not in reported and "never retrieved" not in reported, f"I14: {reported[:600]}"

    def memory(self) -> dict[str, int]:
        """Return the bytes of each process after it has freed unused memory.

        Check I10: they are not more than after the warm-up.
        """
        state = self.state(trim=True)
        now = {name: state[name]["process"]["rss_bytes"] for name in ("server", "engine")}
        if self.warm is None:
            self.warm = now
        for name, size in now.items():
            most = (1 + SLACK) * self.warm[name] + (1 << 20)
            assert size <= most, f"I10: {name} has {size >> 10} KiB, warm it had {self.warm[name] >> 10}"
        return now

    def stop(self) -> None:
        """End the process in any state, and remove its files."""
        inner = children(self.process.pid)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        if self._url is not None:
            self.close()
        gone(inner)


def idle_of(state: dict[str, Any]) -> dict[str, int]:
    """Return the values of a state that do not change between requests."""
    found = {}
    for name in ("server", "engine"):
        process = state[name]["process"]
        found |= {f"{name} fds": process["fds"], f"{name} threads": process["threads"]}
        found[f"{name} children"] = len(process["children"])
    return {**found, "tasks": state["server"]["tables"]["tasks"]}


def gone(pids: list[int], seconds: float = 8.0) -> None:
    """Raise AssertionError if one of these processes outlives its parent."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < end, f"I7: processes {left} are left"
        time.sleep(0.02)


def receive(link: socket.socket, until: bytes | None = None, done: Any = None) -> bytes:
    """Return the received bytes until ``until`` arrives, ``done`` returns true, the connection ends or is reset, or the
    socket's timeout has passed.
    """
    got = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while (until is None or until not in got) and (part := link.recv(65536)):
            got += part
            if done is not None and done(got):
                break
    return got


def status_of(answer: bytes) -> int:
    """Return the status of an answer, 0 if the connection ended without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    """Check that an answer is an error in OpenAI's form, of limited length, without internal details.

    Each word must be in its message, or be the name of its field.
    """
    assert answer.status_code == status, f"{answer.status_code}, expected {status}: {answer.text[:300]}"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status, error
    assert len(answer.content) < 2000 and "Traceback" not in answer.text and "/minivllm/" not in answer.text
    for word in words:
        assert word in error["message"] or word == error["param"], (word, error)


def at_once(calls: Sequence[Callable[[], Any]], most: int | None = None) -> list[Any]:
    """Return the result of each call, with at most ``most`` calls at a time (None: all).  The first error is raised."""
    with ThreadPoolExecutor(most or len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


def memory_of(ground: Ground) -> int:
    return ground.state()["server"]["process"]["rss_bytes"]


def slim(ground: Ground, before: int, most: int = 32 << 20) -> None:
    """Raise AssertionError if the server holds that many bytes more than before."""
    now = ground.state(trim=True)["server"]["process"]["rss_bytes"]
    assert now - before < most, f"{now - before >> 20} MiB more"


def narrow(ground: Ground) -> socket.socket:
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.settimeout(10)
    link.connect((ground.host, ground.port))
    return link


def rest_within(ground: Ground, seconds: float) -> None:
    end = time.monotonic() + seconds
    while ground.state()["server"]["tables"]["streams"]:
        assert time.monotonic() < end, "a request is still there"
        time.sleep(0.05)
