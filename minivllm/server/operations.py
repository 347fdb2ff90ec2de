"""Routes about the server and the model: health, names, tokens, metrics, and what an operator may do."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import minivllm

from . import metrics
from .errors import ApiError
from .http import unknown_routes
from .http.sse import dump
from .link import state
from .openai import chat, fields
from .openai.generate import Service, read_body
from .openai.protocol.tokens import DetokenizeBody, TokenizeBody
from .openai.tokens import MANY

MOST_IDS = 1 << 20  # of /detokenize


async def models(request: Request, service: Service) -> Any:
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.names]})


async def model(request: Request, service: Service) -> Any:
    if not request.path_params["model"]:
        raise unknown_routes.missing("/v1/models/", ["/v1/models"])
    return JSONResponse(_card(service, service.check_model(request.path_params["model"])))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "minivllm",
        "root": service.names[0],
        "parent": None,
        "max_model_len": service.client.info.max_model_len,
        "permission": [],
    }


async def version(request: Request, service: Service) -> Any:
    return JSONResponse({"version": minivllm.__version__})


async def tokenize(request: Request, service: Service) -> Any:
    body = await read_body(request, service, TokenizeBody)
    _, warnings = fields.check(body)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: want either prompt or messages", "prompt")
    salt, who = (request.scope["state"]["tenant"], ""), request.scope["state"]["owner"]
    if body.prompt is not None:
        ids = await service.tokens.encode(body.prompt, body.add_special_tokens is not False, salt, who=who)
    else:
        asked = chat.tools.read_tools(body.tools, None, None)
        ids = await chat.render(service, chat.check_messages(body.messages), asked.shown, body, salt, who)
    out = {"count": len(ids), "max_model_len": service.client.info.max_model_len, "tokens": ids, "token_strs": None}
    if body.return_token_strs:
        spelled: list[str | None] = []
        out["token_strs"] = spelled
        for at in range(0, len(ids), MANY):
            spelled += map(service.tokens.need().token, ids[at : at + MANY])
            await asyncio.sleep(0)  # others have their turn
    return _json({**out, "warnings": warnings} if warnings else out)


async def detokenize(request: Request, service: Service) -> Any:
    body = await read_body(request, service, DetokenizeBody)
    fields.check(body)
    service.check_model(body.model)
    ids, vocab = body.tokens, service.client.info.vocab_size
    if isinstance(ids, np.ndarray):
        ok = len(ids) <= MOST_IDS and ids.min() >= 0 and ids.max() < vocab
    else:
        ok = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids)
    if not ok:
        raise ApiError(400, f"tokens: want a list of at most {MOST_IDS} token ids from 0 to {vocab - 1}", "tokens")
    return _json({"prompt": await service.tokens.decode(ids, False, request.scope["state"]["owner"])})


def _json(value: Any) -> Response:
    """An answer that may be long: ten times as fast as JSONResponse."""
    return Response(dump(value), media_type="application/json")


async def tokenizer_info(request: Request, service: Service) -> Any:
    tokenizer = service.tokens.need()
    special = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None, **tokenizer.special_tokens}
    if special["eos_token"] is None and tokenizer.eos_ids:
        special["eos_token"] = tokenizer.token(tokenizer.eos_ids[0])
    return JSONResponse(
        {
            **special,
            "eos_token_ids": list(tokenizer.eos_ids),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.client.info.max_model_len,
            "chat_template": tokenizer.chat_template,
        }
    )


async def prometheus(request: Request, service: Service) -> Any:
    ok, _ = service.client.healthy()
    stats = await service.client.stats() if ok else {}
    return Response(service.metrics.text(stats, service.client.restarted), headers={"Content-Type": metrics.TYPE})


async def start_profile(request: Request, service: Service) -> Any:
    """Begin a profile, if its file can be written."""
    try:
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as exc:
        raise _unwritten(exc.strerror or str(exc)) from exc
    await service.client.profile(True)
    return JSONResponse({"profiling": True})


async def stop_profile(request: Request, service: Service) -> Any:
    """End a profile and name its file."""
    path = await service.client.profile(False)
    if not os.path.isfile(path) or not os.path.getsize(path):
        raise _unwritten("the file is not there")
    return JSONResponse({"profiling": False, "file": os.path.basename(path)})


def _unwritten(why: str) -> ApiError:
    what = f"the profile cannot be written: {why}; profiles go into the folder that the server was started in"
    return ApiError(500, f"{what}: start it in one that is there, in which it may write")


async def debug_state(request: Request, service: Service) -> Any:
    """Return what the engine and the server hold; this request itself is not counted."""
    trim = request.query_params.get("trim", "") == "1"
    of_engine = await service.client.state(trim)
    tables = {**service.client.tables(), "inside": service.door.inside, "tasks": len(asyncio.all_tasks())}
    tables["body_bytes"] = sum(service.bodies.held.values())
    memory = {"token_cache_bytes": service.tokens.cached_bytes}
    of_server = {"tables": tables, "memory": memory, "process": state.process(trim)}
    return JSONResponse({"engine": of_engine, "server": of_server})


async def reset_prefix_cache(request: Request, service: Service) -> Any:
    return JSONResponse({"reset": await service.client.reset_prefix_cache()})
