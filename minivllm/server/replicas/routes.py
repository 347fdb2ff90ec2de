"""Routes of operators about replicas: show, drain, resume and update them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.errors import ConfigError
from minivllm.server.errors import ApiError
from minivllm.server.openai.generate import Service

from .client import ReplicaClient

NUMBER = re.compile(r"[0-9]{1,9}")  # the number of a replica in a path


def replicas_of(service: Service) -> ReplicaClient:
    """Return the client of the replicas.  ApiError (400) for a server with one engine."""
    client = service.client
    if not isinstance(client, ReplicaClient):
        raise ApiError(400, "this server has one engine and no replicas: start it with --replicas N")
    return client


def _shown(client: ReplicaClient) -> JSONResponse:
    """Return the states of the replicas."""
    return JSONResponse({"router": client.routing.name, "replicas": client.about()})


async def show(request: Request, service: Service) -> Any:
    """Return the state of each replica, its process, requests (present and sent), tokens and restarts."""
    return _shown(replicas_of(service))


async def drain(request: Request, service: Service) -> Any:
    """Send no new requests to a replica, and return the states of all replicas.  Its running requests go on."""
    return _hold(request, service, True)


async def resume(request: Request, service: Service) -> Any:
    """Send requests to a drained replica again, and return the states of all replicas."""
    return _hold(request, service, False)


def _hold(request: Request, service: Service, held: bool) -> JSONResponse:
    """Drain or resume the replica whose number is in the path, and return the states of all replicas.  ApiError (400)
    for a wrong number."""
    client = replicas_of(service)
    text = request.path_params["number"]
    if not NUMBER.fullmatch(text):
        raise ApiError(400, f"expected the number of a replica, from 0 to {len(client.replicas) - 1}", "number")
    client.hold(int(text), held)
    return _shown(client)


async def update(request: Request, service: Service) -> Any:
    """Replace the replicas one after another by engines with the current configuration.  ApiError (400) if that
    configuration is wrong.

    The answer, with the states of all replicas, is sent after all are replaced."""
    client = replicas_of(service)
    reload = service.reload
    if reload is None:
        raise ApiError(400, "this server has no configuration to read again")
    try:
        loaded = await asyncio.to_thread(reload)
        await client.update(loaded)
    except ConfigError as exc:
        raise ApiError(400, f"the replicas stay as they are: {exc}") from exc
    return _shown(client)
