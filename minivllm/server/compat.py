"""Small routes of llama.cpp, vLLM and SageMaker: facts about the server, the text of a chat's prompt, and probes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import minivllm

from .errors import ApiError
from .openai import JsonObject, chat, completions, fields
from .openai.bodies import TemplateBody
from .openai.generate import Service, read_body, read_values


async def props(request: Request, service: Service) -> Any:
    """Return the facts about the server that clients of llama.cpp read: sizes, sampling defaults, chat template."""
    info, tokenizer = service.client.info, service.tokens.tokenizer
    params = dict(service.defaults)
    params["n_predict"] = params.pop("max_tokens", None) or -1
    generation = {"n_ctx": info.max_model_len, "params": params}
    special = {} if tokenizer is None else tokenizer.special_tokens
    template = None if tokenizer is None else tokenizer.chat_template
    facts = {
        "default_generation_settings": generation,
        "total_slots": info.max_num_seqs,
        "model_alias": service.names[0],
        "model_path": service.names[0],  # the served name, because clients must not see a path of this machine
        "chat_template": template or "",
        "bos_token": special.get("bos_token") or "",
        "eos_token": special.get("eos_token") or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"minivllm {minivllm.__version__}",
    }
    return JSONResponse(facts)


async def apply_template(request: Request, service: Service) -> Any:
    """Return the text that the chat template makes of a conversation.  ApiError (400) if there is no conversation."""
    body = await read_body(request, service, TemplateBody)
    _, warnings = fields.check(body)
    service.check_model(body.model)
    if body.messages is None:
        raise ApiError(400, "messages: expected a conversation", "messages")
    owner = request.scope["state"]["owner"]
    ids = await chat.template_ids(request, service, body)
    answer: JsonObject = {"prompt": await service.tokens.decode(ids, False, owner)}
    if warnings:
        answer["warnings"] = warnings
    return JSONResponse(answer)


async def server_info(request: Request, service: Service) -> Any:
    """Return a few settings under vLLM's names (model, sizes, device), and the chosen plug-ins.

    None of them is a secret of the operator."""
    info = service.client.info
    model = {"model": service.names[0], "max_model_len": info.max_model_len, "dtype": info.dtype}
    cache = {"num_tokens": info.kv_tokens}
    scheduler = {"max_num_seqs": info.max_num_seqs}
    config: JsonObject = {"model_config": model, "cache_config": cache, "scheduler_config": scheduler}
    config["device_config"] = {"device": info.device}
    config["plugins"] = info.selections
    return JSONResponse({"vllm_config": config, "version": info.version})


async def load(request: Request, service: Service) -> Any:
    """Return the number of prompts that run or wait."""
    return JSONResponse({"server_load": service.door.inside})


async def invocations(request: Request, service: Service) -> Response:
    """Return the answer to a chat or a completion, whichever the body is (SageMaker).  ApiError (400) if it is
    neither."""
    values = await read_values(request, service)
    if "messages" in values:
        return await chat.answer(request, service, values)
    if "prompt" in values:
        return await completions.answer(request, service, values)
    raise ApiError(
        400,
        ("the body has neither messages (for a chat) nor prompt (for a completion); expected one of them"),
        "messages",
    )
