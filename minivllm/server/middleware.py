"""Middleware of the operator: classes and functions around the routes, named on the command line.

A class is ASGI middleware: ``MyMiddleware(app)`` with ``async __call__(scope, receive, send)``.
A function is ``async f(request, call_next)`` and returns the response.
A request reaches them after the checks of its key, host and origin.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware

from minivllm.errors import ConfigError, describe_error, shown


def load(names: Sequence[str]) -> list[Any]:
    """Import the classes and functions named by ``module:attribute`` or ``module.attribute``.

    Raise ConfigError if the import fails or the object is neither a class nor an async function.
    """
    return [_load(name) for name in names]


def _load(name: str) -> Any:
    option = f"--middleware {shown(name)}"
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module or not attribute:
        raise ConfigError(f"{option}: expected module:attribute, the name of a class or an async function")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as exc:
        problem = describe_error(exc)
        raise ConfigError(f"{option}: {problem}; expected module:attribute that can be imported") from exc
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        kind = type(found).__name__
        raise ConfigError(f"{option} is {kind}: expected an ASGI middleware class or an async function")
    return found


def around(app: Any, middleware: Sequence[Any]) -> Any:
    """Wrap an application in middleware, the first outermost, and return the result."""
    if not middleware:
        return app
    wrapped: Any = NoDirectSending(app)
    for one in reversed(middleware):
        layer: Any = one
        wrapped = layer(wrapped) if inspect.isclass(one) else BaseHTTPMiddleware(wrapped, dispatch=layer)
    return wrapped


class NoDirectSending:
    """ASGI middleware that makes every answer go through ``send``, where the operator's middleware can see it.

    It removes the connection's ``Direct`` writer from the scope, by which text would bypass ``send``.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope.get("state", {}).pop("direct", None)
        await self.app(scope, receive, send)
