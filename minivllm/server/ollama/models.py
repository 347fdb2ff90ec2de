"""Routes of Ollama's API about the model: its list, its description, and commands that would change the list."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from minivllm.server.errors import ApiError
from minivllm.server.http.sse import dump
from minivllm.server.openai import JsonObject
from minivllm.server.openai.bodies import OllamaModelBody
from minivllm.server.openai.generate import read_body

from .names import served_name, tagged

if TYPE_CHECKING:
    from minivllm.server.openai.generate import Service

VERSION = "0.18.2"  # the version of Ollama whose API these routes follow, because clients require a least version
# text of the route /; clients look for its last three words, or for any answer at all
GREETING = "minivllm is running. To clients of Ollama's API: Ollama is running\n"
FOREVER = "2318-01-01T00:00:00+00:00"  # time at which the model is unloaded; Ollama has such a year for "never"
LINES = "application/x-ndjson"
# template variables that switch reasoning on or off
THINKING = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
# parameters of a Modelfile <- sampling defaults of this server
PARAMETERS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
# key of model_info after the name of the architecture -> size of the model
SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "expert_count": "num_experts",
}  # fmt: skip


async def root(request: Request, service: Service) -> Any:
    """Return a text for clients that check whether the server runs."""
    return PlainTextResponse(GREETING)


async def version(request: Request, service: Service) -> Any:
    """Return the version of Ollama's API that the server follows."""
    return JSONResponse({"version": VERSION})


async def tags(request: Request, service: Service) -> Any:
    """Return a list with the names under which the model is served."""
    return JSONResponse({"models": [_card(service, name) for name in service.names]})


async def loaded(request: Request, service: Service) -> Any:
    """Return a list with the names under which the model is served; the model is always loaded."""
    info = service.client.info
    cards = []
    for name in service.names:
        card = _card(service, name)
        del card["modified_at"]
        in_vram = 0 if info.device == "cpu" else card["size"]
        cards.append({**card, "expires_at": FOREVER, "size_vram": in_vram, "context_length": info.max_model_len})
    return JSONResponse({"models": cards})


async def show(request: Request, service: Service) -> Any:
    """Return a description of the model: its sizes, chat template, sampling defaults and capabilities."""
    body = await read_body(request, service, OllamaModelBody, any_type=True)
    name = tagged(served_name(service, body.model or body.name))
    tokenizer = service.tokens.tokenizer
    described = {
        "modelfile": f"FROM {name}\n",
        "parameters": _parameters(service),
        "template": (tokenizer.chat_template if tokenizer is not None else None) or "",
        "details": details(service),
        "model_info": _model_info(service),
        "capabilities": capabilities(service),
        "modified_at": _modified(service),
    }
    return JSONResponse(described)


async def pull(request: Request, service: Service) -> Any:
    """Return success for a pull of the served model, because clients pull a model before they use it.  ApiError (404)
    for other models."""
    body = await read_body(request, service, OllamaModelBody, any_type=True)
    try:
        served_name(service, body.model or body.name)
    except ApiError as error:
        names = ", ".join(service.names)
        problem = f"pull {error}: this server pulls no models, and serves {names}"
        raise ApiError(404, problem, "model") from error
    if body.stream is False:
        return JSONResponse({"status": "success"})
    return StreamingResponse(_pulled(), media_type=LINES)


async def _pulled() -> AsyncIterator[bytes]:
    """Yield the lines of a pull of a model that is there already."""
    for status in ("pulling manifest", "success"):
        yield dump({"status": status}) + b"\n"


async def unchangeable(request: Request, service: Service) -> Any:
    """Raise ApiError (501) for a request to push, create, copy or delete a model."""
    command = request.url.path.rpartition("/")[2]
    raise ApiError(501, f"{command} is not supported: the model is chosen when the server starts")


def thinks(service: Service) -> bool:
    """Return whether a chat template of the model can switch reasoning."""
    tokenizer = service.tokens.tokenizer
    if tokenizer is None:
        return False
    read = tokenizer.template_variables(None, False)
    return not THINKING.isdisjoint(read)


def capabilities(service: Service) -> list[str]:
    """Return the words of Ollama for the abilities of the model: completion, tools, thinking, embedding."""
    found = ["completion"]
    tokenizer = service.tokens.tokenizer
    if tokenizer is not None and tokenizer.chat_templates:
        # supported in any case, because without a place for tools in the template they are listed in the system message
        found.append("tools")
    if thinks(service):
        found.append("thinking")
    if service.client.info.for_embeddings:
        found.append("embedding")
    return found


def details(service: Service) -> JsonObject:
    """Return the kind of the model and of its weights."""
    info = service.client.info
    family = _family(service)
    quantizer = str(info.selections.get("quantizer", "none")).rpartition("/")[2]
    return {
        "parent_model": "",
        "format": "gguf" if info.model.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": info.dtype if quantizer == "none" else quantizer,
    }


def _card(service: Service, name: str) -> JsonObject:
    """Return the description of the model under one of its names.

    The digest identifies the name, because the server does not read all weights to list them."""
    name = tagged(name)
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(service),
        "size": service.client.info.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details(service),
    }


def _modified(service: Service) -> str:
    """Return the time at which the model was loaded, in RFC 3339."""
    return datetime.fromtimestamp(service.created, timezone.utc).isoformat()


def _family(service: Service) -> str:
    """Return the type of the model."""
    return str(service.client.info.shape.get("model_type", "unknown"))


def _model_info(service: Service) -> JsonObject:
    """Return the sizes of the model under the names of GGUF files.

    ``context_length`` is the context of this server, which may be shorter than the model's."""
    info, family = service.client.info, _family(service)
    found: JsonObject = {"general.architecture": family, "general.basename": service.names[0]}
    found[f"{family}.context_length"] = info.max_model_len
    found[f"{family}.vocab_size"] = info.vocab_size
    for key, size in SIZES.items():
        if size in info.shape:
            found[f"{family}.{key}"] = info.shape[size]
    return found


def _parameters(service: Service) -> str:
    """Return the sampling defaults and the length of the context in the form of a Modelfile's parameters."""
    values = {"num_ctx": service.client.info.max_model_len, **service.defaults}
    lines = []
    for name, value in values.items():
        shown = PARAMETERS.get(name, name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            spelled = dump(one).decode()
            lines.append(f"{shown:<30} {spelled}")
    return "\n".join(lines)
