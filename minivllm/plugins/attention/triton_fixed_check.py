"""Compare tiles of few lines with the usual tiles of ``triton_fixed`` on this device before an engine uses them.

Tiles of 64 lines use other instructions of a Hopper's tensor cores (``wgmma``) than tiles of 16 lines (``mma``).  Both
must give the same bits, because a decoded token has the bits of the same token in a prompt (``batch_invariant``).

Both instructions add 16 products at a time.  If the cache has the dtype of the queries, the order is the same.  If keys
and values are converted in registers, Triton permutes the operands of ``mma``, so that a thread loads four adjacent
bytes (``kWidth = 4`` in the compiler's output).  In float16 about one output in 1,000 differed then on an H200, which
is too few for a comparison of samples.  So caches in another dtype have no tiles of few lines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.core.interfaces.kvformat import KVLayout
from minivllm.device.kernels.ahead import rehearsing

from .triton_fixed import PROGRAMS, attend, short_lines
from .triton_prefill import Tiles

LENGTHS = (3, 300, 577, 1025)  # number of keys of each row
AGREED: dict[tuple[Any, ...], bool] = {}  # earlier results in this process, by the arguments of the comparison


def short_lines_agree(spec: AttnSpec, dtype: torch.dtype, layout: KVLayout, lines: int, device: torch.device) -> bool:
    """Return whether tiles of ``short_lines`` give the bits of tiles with ``lines`` lines for layers of this shape.

    ``dtype`` is that of queries, and ``layout`` has the tensors of the cache.  The result is False if the cache has
    another dtype.  The call waits for the device.  In a rehearsal nothing is computed or remembered, and the result is
    True; the kernels of both tiles are compiled then.
    """
    if short_lines(spec) >= lines or _converted(layout, dtype):
        return False
    stored = tuple((name, one.shape, one.dtype) for name, one in layout.tensors.items())
    key = (spec, dtype, stored, layout.block, lines, device)
    if key not in AGREED:
        if rehearsing():
            with suppress(Exception), torch.inference_mode():  # the comparison itself reports errors
                _outputs(spec, dtype, layout, lines, device)
            return True
        with torch.inference_mode():
            AGREED[key] = _equal(spec, dtype, layout, lines, device)
    return AGREED[key]


def _converted(layout: KVLayout, dtype: torch.dtype) -> bool:
    """Return whether keys or values are stored in another dtype than that of the queries."""
    stored = {one.dtype for name, one in layout.tensors.items() if name in ("k", "v")}
    return stored != {str(dtype).removeprefix("torch.")}


def _equal(spec: AttnSpec, dtype: torch.dtype, layout: KVLayout, lines: int, device: torch.device) -> bool:
    found = _outputs(spec, dtype, layout, lines, device)
    return all(torch.equal(found[0], one) for one in found[1:])


def _outputs(spec: AttnSpec, dtype: torch.dtype, layout: KVLayout, lines: int, device: torch.device) -> list[Tensor]:
    """Return the outputs of both kinds of tiles for the same rows, with few and with many tiles.  Nothing waits for the
    device."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def put(values: Any, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    meta, blocks = _meta(layout.block, put)
    cache = {}
    for name, one in layout.tensors.items():
        values = drawn(blocks, *one.shape)
        if "scale" in name:
            values = values.abs() / 64
        elif one.dtype == "int8":
            values = values * 40
        cache[name] = values.to(getattr(torch, one.dtype))
    sinks = drawn(spec.heads) if spec.sinks else None
    slopes = drawn(spec.heads).abs() if spec.alibi is not None else None
    layer = AttnLayer(0, 0, spec, cache, sinks, slopes)
    rows = len(LENGTHS)
    q = (3 * drawn(rows, spec.heads, spec.dim_qk)).to(dtype)
    found = []
    for short in (False, True):
        for times in (1, PROGRAMS):  # few tiles, which several programs share, and many tiles
            meta.work = {}
            tiles = Tiles(put([*range(rows)] * times), put([0] * rows * times), lines)
            out = torch.full((rows, spec.heads, spec.dim_v), torch.nan, dtype=dtype, device=device)
            attend(layer, q, meta, out, None, tiles, True, short=short)
            found.append(out)
    return found


def _meta(block: int, put: Callable[..., Tensor]) -> tuple[Any, int]:
    """Return the fields of ``AttnMeta`` that the kernels read, for rows of ``LENGTHS`` keys, and the number of cache
    blocks."""
    counts = [-(-length // block) for length in LENGTHS]
    table = np.zeros((1, len(LENGTHS), max(counts) + 1), np.int32)
    first = 1
    for row, count in enumerate(counts):
        table[0, row, :count] = np.arange(first, first + count)
        first += count
    meta = SimpleNamespace(block=block, host_kv_len=np.array([LENGTHS]))
    meta.table = put(table)
    meta.slots = put(range(len(LENGTHS)), torch.int64)
    meta.kv_len = put([LENGTHS])
    meta.cu_q = put(range(len(LENGTHS) + 1))
    return meta, first
