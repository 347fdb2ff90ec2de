"""``minivllm serve``: start the engine, the application and the listening socket, and shut them down.

The socket is bound first, so that a port in use is reported before a model is loaded.  /health answers 503 until the
model is loaded.

    SIGTERM, SIGINT   refuse new requests and wait ``drain_timeout`` seconds for running ones; exit with 0, or with 6 if
                      some did not finish
    a second signal   end at once
    a dead engine     report it to every stream; exit with 7
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from minivllm.core import declared_params
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.frontend.progress_display import shown
from minivllm.runtime.processes.memory import HeapTrimmer
from minivllm.runtime.text.template import is_name, read_template
from minivllm.validation import is_text

from . import logs, middleware, throughput
from .app import Application
from .http.accepting import BACKLOG, Acceptor, open_files, room_for
from .http.auth import ADMIN, ENVIRONMENT, check_keys, read_keys
from .http.connection import protocol
from .http.limits import Door
from .http.listening import bind, release, tls, url_of
from .http.socket_connection import socket_protocol
from .http.sweep import Sweep
from .link import state
from .metrics import Metrics
from .openai import tools
from .openai.generate import Service
from .openai.parsers import choose
from .openai.tokens import Tokens
from .replicas.client import make_client
from .replicas.places import environments
from .replicas.routing import Routing
from .worker_pool import WorkerPool

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.config.server import ServerConfig

    from .link.client import EngineClient, EngineInfo

NOT_DRAINED = 6  # exit status
LAST = 3  # seconds for connections to close at shutdown
LOOK = 1.0  # seconds between checks of the engine
# growth of the resident memory in bytes after which free heap pages are returned to the operating system
HEAP_GROWN = 2 << 20


def serve(args: argparse.Namespace, loaded: Loaded, reload: Callable[[], Loaded] | None = None) -> int:
    """Run the command ``minivllm serve`` with its arguments and configuration, and return the exit code.

    ``reload()`` reads the configuration again, for an update of replicas."""
    admin_key = os.environ.get(ADMIN, "")
    keys = given_keys(args.api_key or (), admin_key)
    if loaded.server.api_key_file is not None:
        keys += read_keys(loaded.server.api_key_file)
    check_keys([*keys, admin_key], loaded.server)
    check_config(loaded)
    found = middleware.load(args.middleware or ())
    read_again = None if reload is None else lambda: fair_to(keys, in_time(reload()))
    return asyncio.run(run(fair_to(keys, in_time(loaded)), keys, admin_key, found, read_again, args.quiet))


def given_keys(flags: Sequence[str], admin_key: str) -> list[str]:
    """Return the API keys of the command line, or else of the environment.  ConfigError for an empty one."""
    keys = list(flags)
    if not keys and os.environ.get(ENVIRONMENT):
        keys = [os.environ[ENVIRONMENT]]
    for key in (*keys, admin_key) if admin_key else keys:
        if not key.strip() or not is_text(key):
            names = f"--api-key, {ENVIRONMENT} or {ADMIN}"
            raise ConfigError(f"{names}: the key is empty or not valid Unicode text; expected a key")
    return keys


def check_config(loaded: Loaded) -> None:
    """Check the folders, the parser and the chat template of a configuration before the engine starts.  ConfigError
    names a wrong option."""
    server, engine = loaded.server, loaded.engine
    if server.steering_dir is not None and not os.path.isdir(server.steering_dir):
        raise ConfigError(f"server.steering_dir={server.steering_dir!r}: no such folder; create it")
    if (server.lora_modules or server.lora_dir) and not (engine.enable_lora or engine.adapters):
        name = "lora_modules" if server.lora_modules else "lora_dir"
        raise ConfigError(f"server.{name} without enable_lora=true or adapters: set both, or neither")
    if server.lora_dir is not None and not os.path.isdir(server.lora_dir):
        raise ConfigError(f"server.lora_dir={server.lora_dir!r}: no such folder; create it")
    if server.weights_dir is not None and not os.path.isdir(server.weights_dir):
        raise ConfigError(f"server.weights_dir={server.weights_dir!r}: no such folder; create it")
    if engine.tokenizer_pool != {"name": "auto"}:
        problem = "the server converts text in worker processes of its own, which have limits of time and memory"
        raise ConfigError(f"tokenizer_pool: {problem}; remove the option")
    choose(server, None, engine.allow_targets)
    if server.replicas > 1 and server.cluster == "local":
        environments(loaded)
        Routing(loaded)
    if engine.chat_template is not None and not is_name(engine.chat_template):
        read_template(engine.chat_template)


def in_time(loaded: Loaded) -> Loaded:
    """Return the configuration, with ``tpot_target_ms="auto"`` if the option was not set.

    The clients of a server read streams while other clients send prompts."""
    engine = loaded.engine
    if "tpot_target_ms" in engine.model_fields_set:
        return loaded
    timely = type(engine)(**engine.model_dump(exclude_unset=True), tpot_target_ms="auto")
    return replace(loaded, engine=timely, origins={**loaded.origins, "tpot_target_ms": "the server"})


def fair_to(keys: Sequence[str], loaded: Loaded) -> Loaded:
    """Return the configuration, with the scheduler ``fair`` if there are several API keys and no scheduler was chosen.

    Several keys mean several tenants, and each should get the same share of the engine.
    """
    engine = loaded.engine
    if len(set(keys)) < 2 or "scheduler" in engine.model_fields_set:
        return loaded
    fair = type(engine)(**engine.model_dump(exclude_unset=True), scheduler="fair")
    return replace(loaded, engine=fair, origins={**loaded.origins, "scheduler": "several keys"})


def make_service(
    client: EngineClient, server: ServerConfig, model: str, sampling: Any, allow_targets: Sequence[str] = ()
) -> Service:
    """Return the state that the routes share.

    ``client`` must be open.  ``model`` is the model's name or path in the configuration, and ``sampling`` its
    ``[sampling]`` table.  ``allow_targets`` names modules of which the configuration may name a parser.
    """
    name = Path(model).name if os.path.isdir(model) else model
    names = list(server.served_model_name) or [name]
    info = client.info
    # imports the specs of other packages now, because this would delay the first request
    declared_params.installed()
    metrics = Metrics(names[0], info)
    client.on_gap = metrics.gaps.add
    pool = WorkerPool(client.tokenizer, server.template_seconds, server.template_mb)
    tokens = Tokens(client.tokenizer, info.max_model_len, pool)
    door = Door(info.max_num_seqs + server.max_queue, server.max_inside)
    defaults = {**info.sampling, **sampling}
    most = sampling.get("max_tokens")
    return Service(client, server, names, tokens, door, metrics, defaults, most, allow_targets)


async def open_service(app: Application, client: EngineClient, loaded: Loaded, server: ServerConfig) -> Service:
    """Open an application for requests to an engine that has started, and return the state that its routes share."""
    service = make_service(client, server, loaded.engine.model, loaded.sampling, loaded.engine.allow_targets)
    service.tokens.pool.start()
    service.images.start()
    await service.adapters.open(client)
    app.open(service)
    return service


async def run(
    loaded: Loaded,
    keys: list[str],
    admin_key: str = "",
    around: Sequence[Any] = (),
    reload: Callable[[], Loaded] | None = None,
    quiet: bool = False,
) -> int:
    """Serve until a signal arrives or the engine dies, and return the exit code.

    ``around`` is the operator's middleware.  ``reload`` is that of ``serve``.  ``quiet`` shows no progress of loading
    and capturing.  Raise ResourceError if the address is in use, the errors of ``LLM(...)`` if the engine cannot start,
    and EngineDeadError if the engine dies.
    """
    server = loaded.server
    app = Application(server, keys, admin_key, around)
    context = tls(server)
    bound = bind(server)
    client = make_client(loaded)
    http = Http(app, server, context)
    url = url_of(server, bound)
    start = time.monotonic()
    stop = Stop()
    model = loaded.engine.model
    sentence = f"loading {model}; {url} answers 503 until it is loaded"
    logs.event("loading", sentence=sentence, address=url, model=model)
    serving = asyncio.create_task(http.serve(sockets=[bound]))
    opening = asyncio.create_task(client.open())
    stopping = asyncio.create_task(stop.first.wait())
    try:
        with stop.listening():
            with shown(quiet, logs.event):
                await asyncio.wait({serving, opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return 0
            await opening  # raises the engine's error, which ends the command
            service = await open_service(app, client, loaded, server)
            service.reload = reload
            state.freeze_loaded()
            _log_token(app)
            _log_loaded(client.info, time.monotonic() - start)
            _log_parser(service)
            _log_serving(url, service.names, len(keys), http.room)
            return await _until_the_end(service, serving, stop)
    finally:
        opening.cancel()
        stopping.cancel()
        http.should_exit = True
        http.force_exit = stop.second.is_set()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        if app.service is not None:
            await app.service.close()
        await client.close()
        release(bound, server)


def _log_loaded(info: EngineInfo, seconds: float) -> None:
    """Log which engine was loaded and how long that took."""
    attention = info.selections.get("attention", "?")
    engine = f"{info.device}, {info.dtype}, attention {attention}"
    weights = f"weights {info.weight_bytes / 2**20:,.0f} MiB"
    room = f"the KV cache holds {info.kv_tokens:,} tokens, a request may have {info.max_model_len:,}"
    logs.event(
        "loaded",
        sentence=f"loaded in {seconds:.1f} s ({engine}): {weights}, {room}, {info.max_num_seqs:,} run at once",
        ms=round(1e3 * seconds),
        device=info.device,
        dtype=info.dtype,
        attention=attention,
        kv_tokens=info.kv_tokens,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
    )


def _log_parser(service: Service) -> None:
    """Log which parser finds reasoning and calls in the text of the model, and why it was chosen."""
    name = service.server.tool_parser
    chosen = service.chosen()
    reason = chosen.reason
    if name not in tools.PARSERS:
        name = chosen.name
    logs.event("parser", sentence=f"replies are parsed as {name}: {reason}", parser=name, reason=reason)


def _log_serving(url: str, names: Sequence[str], keys: int, connections: int) -> None:
    """Log the address, the names of the model, and the numbers of API keys and of connections that fit."""
    required = "no key is required"
    if keys:
        required = "one key" if keys == 1 else f"{keys} keys"
    sentence = f"ready at {url} as {', '.join(names)} ({required}); Ctrl-C ends it"
    if url.startswith("unix:"):
        sentence += f"; try: curl --unix-socket {url[5:]} http://localhost/v1/models"
    logs.event("serving", sentence=sentence, url=url, model=names[0], keys=keys, connections=connections)


def _log_token(app: Application) -> None:
    """Log the token of the operator's routes if the server generated it."""
    if app.generated_token is not None:
        message = f"the routes of --admin require {ADMIN}, or else this token: Authorization: Bearer TOKEN"
        logs.event(message, logging.WARNING, token=app.generated_token)


async def _until_the_end(service: Service, serving: asyncio.Task[None], stop: Stop) -> int:
    """Wait for a signal, then drain the server and return the exit code.  Raise EngineDeadError if the engine fails."""
    door = service.door
    first = asyncio.create_task(stop.first.wait())
    watch = asyncio.create_task(_watch(service.client))
    figures = asyncio.create_task(throughput.report(service.client, service.server.stats_interval))
    try:
        await asyncio.wait({first, watch, serving}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            door.closed = True
            raise watch.result()
        start = time.monotonic()
        drain = asyncio.create_task(door.drain(service.server.drain_timeout))
        second = asyncio.create_task(stop.second.wait())
        await asyncio.wait({drain, second}, return_when=asyncio.FIRST_COMPLETED)
        drained = drain.done() and drain.result()
        if not drain.done():
            drain.cancel()
            door.end()
        second.cancel()
        await asyncio.sleep(0.1)  # the streams write their last events in this time
        ms = 1e3 * (time.monotonic() - start)
        logs.event("stopped", drained=drained, ms=round(ms, 1))
        return 0 if drained else NOT_DRAINED
    finally:
        first.cancel()
        watch.cancel()
        figures.cancel()


async def _watch(client: EngineClient) -> EngineDeadError:
    """Return the error of the engine once it is dead.

    An engine that is being restarted, or whose step only takes long, is not dead.
    Meanwhile return free heap pages to the system, which a burst of requests leaves behind.
    """
    heap = HeapTrimmer(grown=HEAP_GROWN)
    while True:
        await asyncio.sleep(LOOK)
        heap.look()
        healthy, why = client.healthy()
        if healthy or client.restarting:
            continue
        try:
            await asyncio.wait_for(client.stats(), LOOK)
        except asyncio.TimeoutError:
            continue
        except EngineDeadError:
            if client.restarting:
                continue
            await asyncio.sleep(LOOK)  # in this time the streams receive the error
            return EngineDeadError(why)


class Stop:
    """The signals that end the server.  ``first`` is set by the first signal, ``second`` by each later one."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT within the context."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        event = self.second if self.first.is_set() else self.first
        event.set()


class Http(uvicorn.Server):
    """uvicorn's server without signal handlers (``Stop`` has them) and with our ``Acceptor`` of connections."""

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
        """Start to accept connections as uvicorn does, but with servers that survive a lack of file descriptors."""
        await super().startup(sockets=[])
        config, shared = self.config, self.server_state

        def make() -> Any:
            kind: Any = config.http_protocol_class
            return kind(config=config, server_state=shared, app_state=self.lifespan.state)

        servers: list[Any] = []
        for bound in sockets or ():
            servers.append(Acceptor(bound, make, shared.connections, self.room, config.ssl, self._handshake))
        self.servers = servers

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # uvicorn calls this ten times a second
            self._sweep.look(self.server_state.connections)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
