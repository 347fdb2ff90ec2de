"""The deployment of Ray Serve: each replica is an actor with an engine and the whole HTTP application.

Serve's proxy ──ASGI──► EngineReplica: Application ──► ProcessClient ──► engine (a process)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.config import load_config
from minivllm.errors import EngineDeadError
from minivllm.server.app import Application
from minivllm.server.http.auth import ENVIRONMENT, check_keys, read_keys
from minivllm.server.link.process_client import ProcessClient
from minivllm.server.serve import check_config, fair_to, in_time, open_service

from . import plan

LOOK = 0.1  # seconds between two looks at the engine
RESTARTS = 3  # largest number of restarts of a replica's engine; then the replica ends
LAST = 0.5  # seconds in which the streams of an ended engine can receive its error


def build(args: Mapping[str, Any]) -> Any:
    """Return the application of Ray Serve for a configuration, the ``args`` of a file for ``serve run``.

    The replicas read an API key from ``MINIVLLM_API_KEY`` in their environment, and others from
    ``server.api_key_file``.  ConfigError for a wrong option.
    """
    table = dict(args)
    table["server"] = {"cluster": "ray", **table.get("server", {})}
    return application(table, ())


def application(args: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the application of Ray Serve with API keys."""
    import ray
    from ray import serve

    loaded = load_config(keywords=args, environ={})
    check_config(loaded)
    gpus = ray.cluster_resources().get("GPU", 0)
    kind = serve.deployment(**plan.deployment_options(loaded, gpus))(serve.ingress()(EngineReplica))
    return kind.bind(dict(args), list(keys), plan.facts(loaded))


class WithLifespan:
    """An ASGI application that also accepts the events of a server's start and end."""

    def __init__(self, application: Application) -> None:
        self.application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self.application(scope, receive, send)
            return
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})


class EngineReplica:
    """A replica of the engine on Ray.

    A replica starts an ended engine again, at most ``RESTARTS`` times.  Requests without a token wait for it.  Ray
    Serve calls ``check_health`` each second, and replaces a replica that fails or ends.  A replica whose engine has
    ended for good also ends, because Serve would send it requests until several checks have failed.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, args: Mapping[str, Any], keys: Sequence[str], facts: Mapping[str, Any]
    ) -> None:
        """Start the engine.  ConfigError if this node has another version of minivllm or of the model."""
        loaded = load_config(keywords=args, environ={})
        plan.check_facts(loaded, facts)
        own = os.environ.get(ENVIRONMENT, "")
        accepted = list(keys) or ([own] if own else [])
        if loaded.server.api_key_file is not None:
            accepted += read_keys(loaded.server.api_key_file)
        check_keys(accepted, loaded.server)
        loaded = fair_to(accepted, in_time(loaded))
        # no responses are stored, because one replica would store a response while the next request may reach another
        # one
        server = loaded.server.model_copy(update={"max_responses": 0})
        self.application = Application(server, accepted)
        self.engine = ProcessClient(loaded, server.stuck_after, RESTARTS)
        self.service: Any = None
        self.watch: asyncio.Task[None] | None = None
        try:
            await self.engine.open()
            self.service = await open_service(self.application, self.engine, loaded, server)
            self.watch = asyncio.create_task(self.end_with_the_engine())
        except BaseException:
            await self.close()
            raise

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the application, which Serve calls for each request."""
        return WithLifespan(self.application)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended, and is not being started again."""
        if self.engine.ended:
            raise EngineDeadError(self.engine.healthy()[1])

    async def end_with_the_engine(self) -> None:
        """End this process when the engine has ended."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self.check_health()
            except EngineDeadError:
                await asyncio.sleep(LAST)
                os._exit(1)

    async def close(self) -> None:
        """End the engine, after Serve has waited for the requests of the replica."""
        if self.watch is not None:
            self.watch.cancel()
        if self.service is not None:
            await self.service.close()
        await self.engine.close()

    async def __del__(self) -> None:
        """Close the replica.  Serve calls and awaits this method when it stops the replica."""
        await self.close()
