"""Routes about the server and the model: model names, tokens, version, metrics, and the operator's routes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

import minivllm

from . import metrics
from .anthropic import models as models_page
from .errors import ApiError
from .http import unknown_routes
from .http.sse import dump
from .link import state
from .openai import chat, fields
from .openai.bodies import DetokenizeBody, LoadAdapterBody, TokenizeBody, UnloadAdapterBody
from .openai.generate import Service, read_body
from .openai.logprobs import Speller
from .openai.operator_fields import read_operation
from .openai.tokens import MANY

MOST_IDS = 1 << 20  # largest number of token ids in a request to /detokenize


async def models(request: Request, service: Service) -> Any:
    """Return a list with the names under which the model is served."""
    if models_page.is_meant(request):
        return JSONResponse(models_page.page(request, service))
    cards = [_card(service, name) for name in service.names]
    return JSONResponse({"object": "list", "data": cards})


async def model(request: Request, service: Service) -> Any:
    """Return a description of the model with the name in the path.  ApiError (404) if the path has no name, or if the
    name is not served."""
    name = request.path_params["model"]
    if not name:
        raise unknown_routes.missing("/v1/models/", ["/v1/models"])
    served = service.check_model(name)
    if models_page.is_meant(request):
        return JSONResponse(models_page.card(service, served))
    return JSONResponse(_card(service, served))


def _card(service: Service, name: str) -> dict[str, Any]:
    """Return the description of the model under one of its names."""
    created, base = service.created, service.names[0]
    adapter = name in service.adapters.by_name
    length = service.client.info.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "minivllm",
        "root": name if adapter else base,
        "parent": base if adapter else None,
        "max_model_len": length,
        "permission": [],
    }


async def version(request: Request, service: Service) -> Any:
    """Return minivllm's version."""
    return JSONResponse({"version": minivllm.__version__})


async def tokenize(request: Request, service: Service) -> Any:
    """Return the token ids of a prompt or of a chat.  ApiError (400) unless the body has exactly one of them."""
    body = await read_body(request, service, TokenizeBody)
    _, warnings = fields.check(body)
    service.check_model(body.model)
    prompt = _tokenized_text(body)
    if (prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: expected either prompt or messages", "prompt")
    if prompt is not None:
        tenant, owner = (request.scope["state"][name] for name in ("tenant", "owner"))
        ids = await service.tokens.encode(prompt, _adds_special(body), (tenant, ""), owner=owner)
    else:
        ids = await chat.template_ids(request, service, body)
    spelled = await _spelled(service, ids) if body.return_token_strs else None
    length = service.client.info.max_model_len
    answer = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": spelled}
    if body.with_pieces:
        answer["tokens"] = await _pieces(service, ids)
    if warnings:
        answer["warnings"] = warnings
    return _json(answer)


def _tokenized_text(body: Any) -> str | None:
    """Return the text of a request to ``/tokenize``, as vLLM (``prompt``) or llama.cpp (``content``) name it; None if
    it has none.  ApiError (400) for both names, or for ``parse_special`` false."""
    if body.parse_special is False:
        problem = "parse_special=false is not supported: a text is read with its special tokens; send messages"
        raise ApiError(400, problem, "parse_special")
    if body.content is not None and body.prompt is not None:
        raise ApiError(400, "content and prompt are the same field: send only one of them", "content")
    return body.prompt if body.content is None else body.content


def _adds_special(body: Any) -> bool:
    """Return whether the tokenizer adds its special tokens to a text.

    vLLM adds them by default, llama.cpp does not."""
    if body.add_special is not None:
        return body.add_special
    if body.add_special_tokens is not None:
        return body.add_special_tokens
    return body.content is None


async def _pieces(service: Service, ids: list[int]) -> list[dict[str, Any]]:
    """Return token ids with their texts, or with their bytes if a token is a part of a character."""
    speller = Speller(service.tokens.need())
    found: list[dict[str, Any]] = []
    for at in range(0, len(ids), MANY):
        for token in ids[at : at + MANY]:
            piece: Any = speller.text(token)
            if "\ufffd" in piece:
                piece = speller.bytes(token)
            found.append({"id": token, "piece": piece})
        await asyncio.sleep(0)
    return found


async def _spelled(service: Service, ids: list[int]) -> list[str | None]:
    """Return the tokenizer's strings of token ids, None for an unknown id, and let other tasks run in between."""
    spelled: list[str | None] = []
    for at in range(0, len(ids), MANY):
        spelled += map(service.tokens.need().token, ids[at : at + MANY])
        await asyncio.sleep(0)
    return spelled


async def detokenize(request: Request, service: Service) -> Any:
    """Return the text of token ids.  ApiError (400) for anything but a list of valid ids."""
    body = await read_body(request, service, DetokenizeBody)
    _, warnings = fields.check(body)
    service.check_model(body.model)
    ids = body.tokens
    vocab = service.client.info.vocab_size
    if isinstance(ids, np.ndarray):
        valid = len(ids) <= MOST_IDS and ids.min() >= 0 and ids.max() < vocab
    else:
        valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab for i in ids)
    if not valid:
        problem = f"tokens: expected a list of at most {MOST_IDS} token ids from 0 to {vocab - 1}"
        raise ApiError(400, problem, "tokens")
    owner = request.scope["state"]["owner"]
    text = await service.tokens.decode(ids, False, owner)
    # clients of llama.cpp name no model
    answer: dict[str, Any] = {"prompt": text}
    if body.model is None:
        answer["content"] = text
    if warnings:
        answer["warnings"] = warnings
    return _json(answer)


def _json(value: Any) -> Response:
    """Return an answer as JSON.  A long answer is written ten times as fast as by JSONResponse."""
    return Response(dump(value), media_type="application/json")


async def tokenizer_info(request: Request, service: Service) -> Any:
    """Return the tokenizer's special tokens, its sizes and its chat template."""
    tokenizer = service.tokens.need()
    found: dict[str, Any] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    found.update(tokenizer.special_tokens)
    if found["eos_token"] is None and tokenizer.eos_ids:
        found["eos_token"] = tokenizer.token(tokenizer.eos_ids[0])
    found["eos_token_ids"] = list(tokenizer.eos_ids)
    found["vocab_size"] = tokenizer.vocab_size
    found["model_max_length"] = service.client.info.max_model_len
    found["chat_template"] = tokenizer.chat_template
    return JSONResponse(found)


async def prometheus(request: Request, service: Service) -> Any:
    """Return the metrics in Prometheus' text format."""
    healthy, _ = service.client.healthy()
    stats = await service.client.stats() if healthy else {}
    text = service.metrics.text(stats, service.client.restarted)
    return Response(text, headers={"Content-Type": metrics.TYPE})


async def start_profile(request: Request, service: Service) -> Any:
    """Start a profile and return that it runs.  The request fails if a file cannot be written in the server's
    folder."""
    try:
        with tempfile.TemporaryFile(dir="."):
            pass
    except OSError as exc:
        raise _unwritten(exc.strerror or str(exc)) from exc
    await service.client.profile(True)
    return JSONResponse({"profiling": True})


async def stop_profile(request: Request, service: Service) -> Any:
    """End the profile and return the name of its file.  The request fails if there is no file."""
    path = await service.client.profile(False)
    if not os.path.isfile(path) or not os.path.getsize(path):
        raise _unwritten("the profiler wrote no file")
    return JSONResponse({"profiling": False, "file": os.path.basename(path)})


def _unwritten(why: str) -> ApiError:
    problem = (
        f"the profile cannot be written: {why}; profiles are written to the folder in which the server was started"
    )
    return ApiError(500, f"{problem}: start the server in an existing, writable folder")


async def debug_state(request: Request, service: Service) -> Any:
    """Return the numbers of objects that the engine and the server hold (requests, streams, tasks), and their memory.

    This request itself is not counted.  ``?trim=1`` first returns free memory of the heap to the operating system.
    """
    trim = request.query_params.get("trim", "") == "1"
    engine = await service.client.state(trim)
    tables = service.client.tables()
    tables["inside"] = service.door.inside
    tables["tasks"] = len(asyncio.all_tasks())
    tables["body_bytes"] = sum(service.bodies.held.values())
    memory = {"token_cache_bytes": service.tokens.cached_bytes}
    server = {"tables": tables, "memory": memory, "process": state.process(trim)}
    return JSONResponse({"engine": engine, "server": server})


async def reset_prefix_cache(request: Request, service: Service) -> Any:
    """Empty the prefix cache.  Return in ``reset`` whether that was done."""
    return JSONResponse({"reset": await service.client.reset_prefix_cache()})


async def load_adapter(request: Request, service: Service) -> Any:
    """Load an adapter (LoRA) from a folder within ``lora_dir``, serve it under a name, and return a message of
    success."""
    body = await read_operation(request, service, LoadAdapterBody)
    name, path = _text(body, "lora_name"), _text(body, "lora_path")
    await service.adapters.load(service.client, service.adapters.new(name, path))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(request: Request, service: Service) -> Any:
    """Stop serving an adapter under its name, and return a message of success.  Requests that run keep it."""
    body = await read_operation(request, service, UnloadAdapterBody)
    name = _text(body, "lora_name")
    await service.adapters.unload(service.client, name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(body: Any, name: str) -> str:
    """Return a text of a body.  ApiError (400) if it is missing or empty."""
    value = getattr(body, name)
    if not value:
        raise ApiError(400, f"{name}: expected text", name)
    return value
