"""The operator's routes of prefixes with names: save, list, drop, export, import, and verify the files of the disk.

The files of exports and imports are in the folder ``server.prefix_dir``, and a request names them without a folder.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import ConfigError, shown
from minivllm.files import expanded

from .errors import ApiError
from .openai.bodies import PrefixBody, PrefixFileBody
from .openai.generate import Service
from .openai.operator_fields import read_operation

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.tar")


async def names(request: Request, service: Service) -> Any:
    """Return the names of the saved prefixes, each with the number of its tokens."""
    found = await _client(service).prefixes()
    return JSONResponse({"prefixes": found["tokens"]})


async def save(request: Request, service: Service) -> Any:
    """Compute a prompt, keep its blocks on the disk under a name until the name is dropped, and return the name and the
    number of saved tokens.  ApiError (400) for a wrong name or prompt."""
    body = await read_operation(request, service, PrefixBody)
    state = request.scope["state"]
    if not isinstance(body.name, str):
        raise ApiError(400, "name: expected a text of 1 to 60 bytes", "name")
    tenant = state["tenant"] if body.tenant is None else body.tenant
    await _client(service).prefixes()  # raises for an engine without the store ``disk``, before tokens are computed
    held = await _client(service).weights("stats")
    if held["paused"] or held["sleep_level"]:
        raise ApiError(400, "the engine is paused or asleep, and computes no prompt: resume or wake it first")
    ids = await _ids(service, body.prompt, tenant, state["owner"])
    params = SamplingParams(max_tokens=1, temperature=0.0, tenant=tenant, cache_salt=body.cache_salt)
    stream = await service.client.stream(ids, params, f"{state['request_id']}-0", pieces=False, owner=state["owner"])
    async with stream:
        await stream.ended()
    tokens = await _client(service).save_prefix(body.name, ids, tenant, body.cache_salt)
    return JSONResponse({"name": body.name, "tokens": tokens})


def _client(service: Service) -> Any:
    """Return the client of the engine.  ApiError (400) if there are several engines, each of which has its own
    names."""
    if service.server.replicas > 1:
        raise ApiError(400, "prefixes have names only with one engine: start the server with server.replicas=1")
    return service.client


async def _ids(service: Service, prompt: Any, tenant: str, owner: str) -> list[int]:
    """Return the token ids of a prompt: a text, or a list of token ids.  ApiError (400) for anything else."""
    if isinstance(prompt, str) and prompt:
        return await service.tokens.encode(prompt, True, (tenant, ""), owner=owner)
    vocab = service.client.info.vocab_size
    values = list(prompt) if not isinstance(prompt, (str, dict)) and prompt is not None else []
    whole = all(isinstance(i, int) and not isinstance(i, bool) for i in map(_plain, values))
    if not values or not whole or min(map(_plain, values)) < 0 or max(map(_plain, values)) >= vocab:
        raise ApiError(400, f"prompt: expected a text, or a list of token ids from 0 to {vocab - 1}", "prompt")
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """Return a numpy number as a Python number, and any other value unchanged."""
    return value.item() if hasattr(value, "item") else value


async def drop(request: Request, service: Service) -> Any:
    """Drop the name of a prefix, so that its blocks may be evicted, and return the name."""
    name = request.path_params["name"]
    await _client(service).drop_prefix(name)
    return JSONResponse({"dropped": name})


async def export(request: Request, service: Service) -> Any:
    """Write the blocks of a prefix to a tar file in ``server.prefix_dir``, and return the name of the file and the
    number of pages (stored blocks)."""
    from minivllm.plugins.kvstore import archive

    name = request.path_params["name"]
    target, root = await _places(request, service)
    pages = await _in_thread(archive.export, root, name, target)
    return JSONResponse({"file": target.name, "pages": pages})


async def add(request: Request, service: Service) -> Any:
    """Add the blocks of an exported prefix to the store ``disk``, and return the name of the file and the number of
    pages (stored blocks).  The engine finds them within about two seconds.  ApiError (404) for a missing file."""
    from minivllm.plugins.kvstore import archive

    source, root = await _places(request, service)
    if not os.path.isfile(source):
        raise ApiError(404, f"file: server.prefix_dir has no file {shown(source.name)}", "file")
    pages = await _in_thread(archive.import_from, root, source)
    return JSONResponse({"file": source.name, "pages": pages})


async def verify(request: Request, service: Service) -> Any:
    """Read all pages (stored blocks) of the store ``disk``, and return for each model counts of its pages and of
    the damaged ones."""
    from minivllm.plugins.kvstore import archive

    found = await _in_thread(archive.models, await _root(service), True)
    rows = []
    for one in found:
        row = {"model": one.folder.name, "about": one.about, "prefixes": list(one.names)}
        row |= {name: getattr(one, name) for name in ("files", "bytes", "pages", "damaged", "unusable")}
        rows.append(row)
    return JSONResponse({"models": rows})


async def _places(request: Request, service: Service) -> tuple[Path, Path]:
    """Return the path of the file that a body names, and the folder in which the store ``disk`` keeps its files.

    ApiError (400) without ``server.prefix_dir``, without the store, and for a name that is not a plain name of a
    file."""
    body = await read_operation(request, service, PrefixFileBody)
    folder = service.server.prefix_dir
    if folder is None:
        raise ApiError(400, "this server has no folder for files: start it with server.prefix_dir", "file")
    if not isinstance(body.file, str) or not _FILE.fullmatch(body.file):
        raise ApiError(400, "file: expected NAME.tar of letters, digits and ._-, without a folder", "file")
    path = Path(folder) / body.file
    if os.path.islink(path):
        raise ApiError(400, f"file: {shown(body.file)} is a link; expected a file of server.prefix_dir", "file")
    return path, await _root(service)


async def _root(service: Service) -> Path:
    """Return the folder of the files of the store ``disk``.  ApiError (400) if another store keeps the names of
    prefixes."""
    from minivllm.plugins.kvstore.options import DiskStoreOptions

    found = await _client(service).prefixes()
    if found["store"] != "minivllm/disk":
        raise ApiError(400, "files can be moved and verified only with the store disk: add it to kvstore")
    options = DiskStoreOptions(**found["options"])
    return expanded(options.path)


async def _in_thread(work: Any, *args: Any) -> Any:
    """Return the result of work on files.  ApiError (400) with the text of a ConfigError or OSError."""
    try:
        return await asyncio.to_thread(work, *args)
    except (ConfigError, OSError) as e:
        raise ApiError(400, str(e)) from e
