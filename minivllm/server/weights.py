"""Routes for operators that change the weights of the engine, or pause it."""

from __future__ import annotations

import os
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.errors import shown

from .errors import ApiError
from .openai.bodies import PauseBody, SleepBody, WeightsBody
from .openai.generate import Service
from .openai.operator_fields import read_operation

MOST_PATH = 1024  # largest number of characters of a path


async def show(request: Request, service: Service) -> Any:
    """Return the version of the weights, and whether the engine is paused or asleep."""
    return await _answer(service, "stats")


async def pause(request: Request, service: Service) -> Any:
    """Run no more steps until ``/resume``, and return the engine's answer.  Requests wait, or end with
    ``keep_requests`` false."""
    body = await read_operation(request, service, PauseBody, optional=True)
    return await _answer(service, "pause", keep_requests=body.keep_requests is not False)


async def resume(request: Request, service: Service) -> Any:
    """Continue after ``/pause``."""
    return await _answer(service, "resume")


async def update(request: Request, service: Service) -> Any:
    """Replace the weights by those of a folder within ``weights_dir``, and return the engine's answer."""
    body = await read_operation(request, service, WeightsBody)
    options = {name: getattr(body, name) for name in ("partial", "finite", "kv")}
    given = {name: value for name, value in options.items() if value is not None}
    return await _answer(service, "update", path=_folder(service, body.path), **given)


async def sleep(request: Request, service: Service) -> Any:
    """Free the memory of the KV cache and of the weights, and return the engine's answer.

    The level is a field of the body, or as in vLLM a parameter of the query string.  ApiError (400) if both differ."""
    body = await read_operation(request, service, SleepBody, optional=True)
    level, text = body.level, request.query_params.get("level")
    if text is not None:
        if text not in ("1", "2") or level not in (None, int(text)):
            found = f"level={shown(text)}" + (f" and level={level} in the body" if level is not None else "")
            raise ApiError(400, f"{found}: expected 1 or 2", "level")
        level = int(text)
    return await _answer(service, "sleep", level=1 if level is None else level)


async def wake(request: Request, service: Service) -> Any:
    """Allocate the memory again after ``/sleep``, and return the engine's answer."""
    return await _answer(service, "wake")


async def _answer(service: Service, do: str, **args: Any) -> JSONResponse:
    return JSONResponse(await service.client.weights(do, **args))


def _folder(service: Service, path: str | None) -> str:
    """Return the path of a folder.  ApiError (400) unless it lies within ``weights_dir`` after links are followed."""
    folder = service.server.weights_dir
    if folder is None:
        raise ApiError(400, "weights come from a folder that the server names: start it with --weights-dir", "path")
    if not path or "\0" in path or len(path) > MOST_PATH:
        problem = f"expected a path of at most {MOST_PATH} characters, without zero bytes"
        raise ApiError(400, f"path={shown(path)}: {problem}", "path")
    root = os.path.realpath(folder)
    whole = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([whole, root]) != root:
        raise ApiError(400, f"path={shown(path)}: expected a folder within the server's weights_dir", "path")
    if not os.path.exists(whole):  # false also for names that the file system cannot have
        raise ApiError(400, f"path={shown(path)}: no such model directory in the server's weights_dir", "path")
    return whole
