"""Detect code that waits for the device because it reads a tensor's values on the host, or needs them for a shape.

On a GPU torch itself raises an error.  On a CPU no call waits, so calls are detected by their names at two levels: the
functions of torch that code calls (``tolist``, ``numpy``), and the operations that they execute (the value of an
``int``, a boolean index).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"tolist", "numpy", "__array__", "cpu", "item", "__int__", "__float__", "__bool__", "__index__", "__complex__"}
OPERATIONS = {  # operations for whose result, or its shape, the host has to wait
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "unique_dim_consecutive", "equal", "is_nonzero", "bincount",
}  # fmt: skip


class _Functions(TorchFunctionMode):
    """Record the calls of torch functions that read a tensor's values."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            self.found.append(name)
        elif name == "to" and _to_host(args[1:], kwargs):
            self.found.append("to('cpu')")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Record the torch operations that need a tensor's values on the host."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in OPERATIONS:
            self.found.append(name)
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.found.append("repeat_interleave without output_size")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(map(_is_mask, args[1])):
            # torch writes a single value by a boolean mask without counting its elements
            fills = name != "index" and args[2].numel() == 1
            if not fills:
                self.found.append("an index that is a mask")
        return func(*args, **kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _to_host(args: Any, kwargs: Any) -> bool:
    """Return whether the arguments of ``Tensor.to`` have the text "cpu" as the device."""
    devices = (*args[:1], kwargs.get("device"))
    return any(isinstance(value, str) and value == "cpu" for value in devices)


@contextlib.contextmanager
def waits(device: str) -> Iterator[list[str]]:
    """Yield a list that holds, after the block, its calls that would wait for a GPU."""
    found: list[str] = []
    if device.startswith("cuda"):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield found
        except RuntimeError as exc:
            if "synchroniz" not in str(exc):
                raise
            found.append(str(exc).partition("\n")[0])
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return
    with _Functions(found), _Operations(found):
        yield found


def no_wait(found: list[str], what: str) -> None:
    """Fail if a call was found that waits; ``what`` names the code, as the subject of the message."""
    assert not found, (
        f"{what} waits for the device ({', '.join(dict.fromkeys(found))}): on a GPU every step would wait, and a CUDA "
        "graph cannot contain it"
    )
