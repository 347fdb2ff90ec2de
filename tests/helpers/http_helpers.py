"""A real server with pocket on the loopback interface for tests of HTTP, which runs uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

GOLDEN = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "logprobs": 1}


def near(a: Any, b: Any) -> bool:
    """Return whether two values are equal except for the last bits of numbers.

    They may differ because other steps have computed the cached prefix.
    """
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-4
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(near(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(near, a, b))
    return bool(a == b)


class Running:
    """A server with ``url``, ``client`` (httpx) and ``app``.  ``do`` runs a function on its event loop."""

    def __init__(self, keys: list[str] = (), engine: dict[str, Any] | None = None, **server: Any) -> None:
        from minivllm.config import load_config
        from minivllm.server.app import Application
        from minivllm.server.http.listening import bind, release, tls, url_of
        from minivllm.server.link.client import LocalClient
        from minivllm.server.replicas.client import make_client
        from minivllm.server.serve import Http, make_service

        options = {
            "batch_invariant": True,
            "dtype": "float32",  # the default depends on the CPU
            "max_num_seqs": 64,
            "num_kvcache_blocks": 512,
            "max_model_len": 1024,
            **(engine or {}),
        }
        server = server if "uds" in server else {"port": 0, **server}
        loaded = load_config(keywords={**options, "server": server}, environ={})
        self._bound = bind(loaded.server)
        self._release = lambda: release(self._bound, loaded.server)
        if loaded.server.uds is None:
            self.host, self.port = self._bound.getsockname()[:2]
        self.url = url_of(loaded.server, self._bound)
        started = threading.Event()

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.app = Application(loaded.server, keys)
            self.http = Http(self.app, loaded.server, tls(loaded.server))
            client = LocalClient(loaded) if loaded.server.replicas == 1 else make_client(loaded)
            serving = asyncio.create_task(self.http.serve(sockets=[self._bound]))
            await client.open()
            self.app.open(make_service(client, loaded.server, loaded.engine.model, loaded.sampling))
            started.set()
            await serving
            await self.app.service.close()
            await client.close()

        self._thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        self._thread.start()
        assert started.wait(60)
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        where: dict[str, Any] = {"base_url": self.url}
        if loaded.server.ssl_certfile is not None:
            context = where["verify"] = ssl.create_default_context(cafile=loaded.server.ssl_certfile)
            context.load_cert_chain(loaded.server.ssl_certfile, loaded.server.ssl_keyfile)
        if loaded.server.uds is not None:
            where = {"base_url": "http://localhost", "transport": httpx.HTTPTransport(uds=loaded.server.uds)}
        self.client = httpx.Client(**where, headers=headers, timeout=60, trust_env=False)
        self.post("/v1/completions", GOLDEN)  # later requests find its prompt in the cache
        self.golden = self.post("/v1/completions", GOLDEN).json()["choices"]

    def do(self, make: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(30)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the events of a stream, the last one as text."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith(("data: ", ": ")) for line in lines)
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in found]

    def raw(self, data: bytes, seconds: float = 5.0) -> bytes:
        """Return the answer to some bytes, until the connection ends or is silent."""
        with socket.create_connection((self.host, self.port), timeout=seconds) as link:
            link.sendall(data)
            got = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while part := link.recv(65536):
                    got += part
            return got

    def stats(self) -> dict[str, Any]:
        return self.do(self.app.service.client.stats)

    def at_rest(self, seconds: float = 20.0) -> None:
        """Check that no request is inside, nothing runs or waits, every block is free or cached, and the golden answer
        is unchanged.
        """
        end = time.monotonic() + seconds
        while True:
            stats = self.stats()
            free = stats["blocks_free"] + (
                stats["blocks_cached"] if stats["blocks_free"] < stats["blocks_total"] else 0
            )
            rest = (self.app.service.door.inside, stats["running"], stats["waiting"])
            if rest == (0, 0, 0) and free >= stats["blocks_total"]:
                break
            assert time.monotonic() < end, (rest, stats)
            time.sleep(0.02)
        assert self.client.get("/health").status_code == 200
        assert near(self.post("/v1/completions", GOLDEN).json()["choices"], self.golden)

    def close(self) -> None:
        self.client.close()
        self.http.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._release()


def served(*args: Any, **options: Any) -> Any:
    """Return a fixture with one server for the tests of a module, made by ``Running(*args, **options)``, at rest at its
    end.
    """

    @pytest.fixture(scope="module")
    def server() -> Iterator[Running]:
        running = Running(*args, **options)
        yield running
        running.at_rest()
        running.close()

    return server


def make_certificate(folder: Any) -> tuple[str, str]:
    """Return (certificate, key) for 127.0.0.1, made by OpenSSL.  Without OpenSSL the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1,DNS:localhost -keyout {key} -out {cert}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return str(cert), str(key)
