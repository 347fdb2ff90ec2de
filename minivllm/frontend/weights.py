"""Weights that the caller of ``update_weights`` gives: a folder, or tensors for the executor's processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine

SHARED_MEMORY = "/dev/shm"


def update(engine: Engine, weights: Any, partial: bool, finite: bool, kv: str) -> int:
    """Replace the weights of an engine, on the engine's thread, and return the number of the new version, as
    ``LLM.update_weights`` does."""
    with source_of(engine, weights) as source:
        return engine.weights.update(**source, partial=partial, finite=finite, kv=kv)


@contextlib.contextmanager
def source_of(engine: Engine, weights: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``Weights.update`` for a folder, a mapping of names to tensors, or pairs of both.

    Tensors for other processes are written to a folder that exists until the context ends.  RequestError for other
    types."""
    if isinstance(weights, (str, os.PathLike)):
        yield {"path": os.path.abspath(os.fspath(weights))}
        return
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    try:
        tensors = list(pairs)
    except TypeError:
        problem = f"weights of {type(weights).__name__}"
        raise RequestError(f"{problem}; expected a folder, a mapping of names to tensors, or pairs of both") from None
    if engine.executor.takes_tensors:
        yield {"tensors": tensors}
        return
    folder = written(tensors)
    try:
        yield {"path": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def written(tensors: list[Any]) -> str:
    """Write tensors to a new folder in shared memory, or on the disk if it is too small, and return its path.
    RequestError if an item is not a pair of a name and a tensor, or if a name is there twice."""
    from safetensors.torch import save_file
    from torch import Tensor

    named: dict[str, Tensor] = {}
    for item in tensors:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)):
            raise RequestError(f"update_weights: found {shown(item)}; expected pairs of a name and a tensor")
        name, tensor = item
        if name in named:
            raise RequestError(f"update_weights: tensor {shown(name)} is there twice; expected each tensor once")
        # a copy, because tensors that share memory cannot be written
        named[name] = tensor.detach().to("cpu", copy=True).contiguous()
    size = sum(tensor.nbytes for tensor in named.values())
    shared = os.path.isdir(SHARED_MEMORY) and shutil.disk_usage(SHARED_MEMORY).free > size + (64 << 20)
    folder = tempfile.mkdtemp(prefix="minivllm-weights-", dir=SHARED_MEMORY if shared else None)
    try:
        save_file(named, os.path.join(folder, "model.safetensors"))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
