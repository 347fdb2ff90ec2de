"""Middleware of the operator: classes and functions around the routes, named on the command line.

A class is ASGI middleware, ``MyMiddleware(app)`` with ``async __call__(scope, receive, send)``; a function is
``async f(request, call_next)``, which returns the response.  They stand behind the checks of keys, hosts and origins.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware

from minivllm.errors import ConfigError, describe_error, shown


def load(names: Sequence[str]) -> list[Any]:
    """Return what ``module:attribute``, or ``module.attribute``, names.  ConfigError if it cannot be had or is neither
    a class nor an async function."""
    return [_load(name) for name in names]


def _load(name: str) -> Any:
    said = f"--middleware {shown(name)}"
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module or not attribute:
        raise ConfigError(f"{said}: want module:attribute, a class or an async function")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as exc:
        raise ConfigError(f"{said}: {describe_error(exc)}; want module:attribute that can be imported") from exc
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise ConfigError(f"{said} is {type(found).__name__}: want an ASGI middleware class or an async function")
    return found


def around(app: Any, found: Sequence[Any]) -> Any:
    """Return the application within all of them, the first outermost."""
    if not found:
        return app
    inner: Any = Undirected(app)
    for one in reversed(found):
        made: Any = one
        inner = made(inner) if inspect.isclass(one) else BaseHTTPMiddleware(inner, dispatch=made)
    return inner


class Undirected:
    """Takes away the way from the engine straight to the connection: middleware sees all that is sent."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope.get("state", {}).pop("direct", None)
        await self.app(scope, receive, send)
