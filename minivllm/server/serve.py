"""``minivllm serve``: the engine, the application and the socket, from the first byte to a clean end.

The socket is bound first, so that a port in use is told before a model is loaded; /health says 503 until it is.

    SIGTERM, SIGINT   no new requests; running ones have ``drain_timeout`` seconds; exit 0, or 6 if some had to go
    once more         everything ends now
    a dead engine     every stream is told; exit 7
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from minivllm.core import declared_params
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.runtime.processes.memory import HeapTrimmer
from minivllm.runtime.text.template import is_name, read_template
from minivllm.validation import is_text

from . import logs, middleware, throughput
from .app import Application
from .http.accepting import BACKLOG, Acceptor, open_files, room_for
from .http.auth import ADMIN, ENVIRONMENT, read_keys
from .http.connection import protocol
from .http.limits import Door
from .http.listening import bind, release, tls, url_of
from .http.socket_connection import socket_protocol
from .http.sweep import Sweep
from .link import state
from .link.process_client import ProcessClient
from .metrics import Metrics
from .openai import tools
from .openai.generate import Service
from .openai.tokens import Tokens
from .worker_pool import WorkerPool

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.server import ServerConfig

    from .link.client import EngineClient, EngineInfo

NOT_DRAINED = 6
LAST = 3  # seconds for connections to close at the end
LOOK = 1.0  # seconds between looks at the engine
HEAP_GROWN = 2 << 20  # bytes that the resident memory may rise before unused pages of the heap are given back


def serve(args: argparse.Namespace, loaded: Loaded) -> int:
    """The command, with its configuration.  Returns the exit code."""
    keys = list(args.api_key or ())
    if not keys and os.environ.get(ENVIRONMENT):
        keys = [os.environ[ENVIRONMENT]]
    admin_key = os.environ.get(ADMIN, "")
    if any(not key.strip() or not is_text(key) for key in [*keys, *([admin_key] if admin_key else ())]):
        raise ConfigError(f"--api-key, {ENVIRONMENT} or {ADMIN}: is empty, or no Unicode text; want a key")
    if loaded.server.api_key_file is not None:
        keys += read_keys(loaded.server.api_key_file)
    if loaded.server.steering_dir is not None and not os.path.isdir(loaded.server.steering_dir):
        raise ConfigError(f"server.steering_dir={loaded.server.steering_dir!r}: no such folder")
    tools.parser_of(loaded.server.tool_parser)
    if loaded.engine.chat_template is not None and not is_name(loaded.engine.chat_template):
        read_template(loaded.engine.chat_template)
    found = middleware.load(args.middleware or ())
    return asyncio.run(run(fair_to(keys, loaded), keys, admin_key, found))


def fair_to(keys: Sequence[str], loaded: Loaded) -> Loaded:
    """Return the configuration with the policy ``fair`` where several keys share the engine and no policy was chosen:
    keys are tenants that shall be served as much as each other."""
    engine = loaded.engine
    if len(set(keys)) < 2 or "scheduler" in engine.model_fields_set:
        return loaded
    chosen = type(engine)(**engine.model_dump(exclude_unset=True), scheduler="fair")
    return replace(loaded, engine=chosen, origins={**loaded.origins, "scheduler": "several keys"})


def make_service(client: EngineClient, server: ServerConfig, model: str, sampling: Any) -> Service:
    """Return what the routes need, over a client that is open.  ``model``: as the configuration has it; ``sampling``:
    its ``[sampling]`` table."""
    name = Path(model).name if os.path.isdir(model) else model
    names = list(server.served_model_name) or [name]
    info = client.info
    declared_params.installed()  # now, and not in a request: it imports the specs of other packages
    metrics = Metrics(names[0], info)
    client.on_gap = metrics.gaps.add
    pool = WorkerPool(client.tokenizer, server.template_seconds, server.template_mb)
    tokens = Tokens(client.tokenizer, info.max_model_len, pool)
    door = Door(info.max_num_seqs + server.max_queue, server.max_inside)
    defaults = {**info.sampling, **sampling}
    return Service(client, server, names, tokens, door, metrics, defaults, sampling.get("max_tokens"))


async def run(loaded: Loaded, keys: list[str], admin_key: str = "", around: Sequence[Any] = ()) -> int:
    """Serve until somebody says stop.  ``around``: middleware of the operator.

    ResourceError if the address is taken; the engine's own errors at start."""
    server = loaded.server
    app = Application(server, keys, admin_key, around)
    context = tls(server)
    bound = bind(server)
    client: EngineClient = ProcessClient(loaded, server.stuck_after, server.restart)
    http = Http(app, server, context)
    url, start, stop = url_of(server, bound), time.monotonic(), Stop()
    model = loaded.engine.model
    logs.event("loading", told=f"loading {model}; {url} answers 503 until it is there", address=url, model=model)
    serving = asyncio.create_task(http.serve(sockets=[bound]))
    opening = asyncio.create_task(client.open())
    asked = asyncio.create_task(stop.first.wait())
    try:
        with stop.listening():
            await asyncio.wait({serving, opening, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return 0
            await opening  # its error is the command's
            service = make_service(client, server, loaded.engine.model, loaded.sampling)
            service.tokens.pool.start()
            app.open(service)
            state.freeze_loaded()
            _tell_token(app)
            assert app.service is not None
            seconds = time.monotonic() - start
            _tell(client.info, url, app.service.names, seconds, keys=len(keys), connections=http.room)
            return await _until_the_end(app, client, serving, stop)
    finally:
        opening.cancel()
        asked.cancel()
        http.should_exit = True
        http.force_exit = stop.second.is_set()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        if app.service is not None:
            await app.service.close()
        await client.close()
        release(bound, server)


def _tell(info: EngineInfo, url: str, names: Sequence[str], seconds: float, keys: int, connections: int) -> None:
    """What was loaded, and where it is served."""
    part = info.selections.get("attention", "?")
    what = f"{info.device}, {info.dtype}, attention {part}"
    room = f"the KV cache holds {info.kv_tokens:,} tokens, a request may have {info.max_model_len:,}"
    told = f"loaded in {seconds:.1f} s ({what}): {room}, {info.max_num_seqs:,} run at once"
    size = {"kv_tokens": info.kv_tokens, "max_model_len": info.max_model_len, "max_num_seqs": info.max_num_seqs}
    used = {"device": info.device, "dtype": info.dtype, "attention": part}
    logs.event("loaded", told=told, ms=round(1e3 * seconds), **used, **size)
    who = f"{keys} keys" if keys > 1 else "one key" if keys else "no key is asked for"
    told = f"ready at {url} as {', '.join(names)} ({who}); Ctrl-C ends it"
    if url.startswith("unix:"):
        told += f"; try: curl --unix-socket {url[5:]} http://localhost/v1/models"
    logs.event("serving", told=told, url=url, model=names[0], keys=keys, connections=connections)


def _tell_token(app: Application) -> None:
    if app.told_token is not None:
        what = f"the routes of --admin want {ADMIN}, or else this token: Authorization: Bearer TOKEN"
        logs.event(what, logging.WARNING, token=app.told_token)


async def _until_the_end(app: Application, client: EngineClient, serving: asyncio.Task[None], stop: Stop) -> int:
    first = asyncio.create_task(stop.first.wait())
    watch = asyncio.create_task(_watch(client))
    figures = asyncio.create_task(throughput.tell(client, app.service.server.stats_interval if app.service else 0))
    assert app.service is not None
    door = app.service.door
    try:
        await asyncio.wait({first, watch, serving}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            door.closed = True
            raise watch.result()
        start = time.monotonic()
        drain = asyncio.create_task(door.drain(app.service.server.drain_timeout))
        again = asyncio.create_task(stop.second.wait())
        await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
        whole = drain.done() and drain.result()
        if not drain.done():
            drain.cancel()
            door.end()
        again.cancel()
        await asyncio.sleep(0.1)  # the last words of the streams
        logs.event("stopped", drained=whole, ms=round(1e3 * (time.monotonic() - start), 1))
        return 0 if whole else NOT_DRAINED
    finally:
        first.cancel()
        watch.cancel()
        figures.cancel()


async def _watch(client: EngineClient) -> EngineDeadError:
    """Returns once the engine is dead; one that only takes long for a step is not.  Meanwhile pages of the heap are
    given back that a burst of requests left without objects."""
    heap = HeapTrimmer(grown=HEAP_GROWN)
    while True:
        await asyncio.sleep(LOOK)
        heap.look()
        ok, why = client.healthy()
        if ok or client.restarting:
            continue
        try:
            await asyncio.wait_for(client.stats(), LOOK)
        except asyncio.TimeoutError:
            continue
        except EngineDeadError:
            if client.restarting:
                continue
            await asyncio.sleep(LOOK)  # for the streams to be told
            return EngineDeadError(why)


class Stop:
    """The signals that end the server: the first, and one more."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.tell)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def tell(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class Http(uvicorn.Server):
    """uvicorn without its signal handlers: when to end is decided above."""

    def __init__(self, app: Application, server: ServerConfig, context: ssl.SSLContext | None = None) -> None:
        self.room = room_for(open_files())
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                ws=socket_protocol(server.body_timeout),
                server_header=False,
                ws_max_size=server.max_body_bytes,
                ws_per_message_deflate=False,
                ws_ping_interval=server.ping_interval,
                ws_ping_timeout=server.ping_interval,
                proxy_headers=False,
                root_path=server.root_path,
                timeout_graceful_shutdown=LAST,
                timeout_keep_alive=max(1, round(server.idle_timeout)),
                backlog=BACKLOG,
                http=protocol(server.header_timeout, server.max_header_bytes, self.room),
                ssl_context_factory=None if context is None else lambda config, default: context,
            )
        )

        self._sweep = Sweep(server.write_timeout)
        self._handshake = server.header_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with servers of our own, which know what to do without descriptors."""
        await super().startup(sockets=[])
        config, shared = self.config, self.server_state

        def make() -> Any:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=shared, app_state=self.lifespan.state)

        found = [
            Acceptor(bound, make, shared.connections, self.room, config.ssl, self._handshake) for bound in sockets or ()
        ]
        self.servers = found  # type: ignore[assignment]

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # a second
            self._sweep.look(self.server_state.connections)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
