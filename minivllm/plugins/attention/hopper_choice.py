"""Choose the kernel of rows of several tokens: ``triton_hopper`` where it was measured to be faster, else
``triton_prefill``.

    layer    ``refusal``   ""  ──► the layer can use the Hopper kernel; any other text is the reason why not
    step     ``choose``    a ``Variant`` of the kernel, or None for ``triton_prefill``

The choice depends only on shapes, so a step has the same kernel whenever it is computed in one form.  A captured step
and the same step as separate launches may have different kernels, because a capture has only upper bounds.

Figures of an H200 in bfloat16, in TFLOP/s (``triton_prefill``, then the Hopper kernel):

    D 128, G 4    15,616 tokens behind 16,384: 433, 712    2,048 behind 30,000: 382, 643    4,000 tokens: 292, 611
    D 64,  G 8    16,384 tokens: 305, 435                  a window of 128: 143, 91
    D 256, G 8    16,384 tokens: 394, 714
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from minivllm.core.interfaces.attnspec import AttnSpec

LINES = 128  # lines of a tile (M)
LEAST_BLOCK = 16  # fewest tokens of a block; the copy of a smaller block would be smaller than a swizzle pattern
MOST_GROUP = 16  # largest number of query heads per KV head for which the kernel was tested
LEAST_WINDOW = 1024  # with smaller windows a tile reads few keys, mostly with a mask
LEAST_TILES = 96  # fewest tiles over all KV heads; with fewer of these large tiles much of the device would be idle
LEAST_KEYS = 256  # mean keys of a row; with fewer, most of a key tile would be masked


@dataclass(frozen=True)
class Variant:
    """Constants of the Hopper kernel for a size of heads."""

    keys: int  # keys of a tile (N)
    stages: int  # number of key tiles, and of value tiles, that shared memory holds


VARIANTS = {64: Variant(128, 2), 128: Variant(128, 2), 256: Variant(64, 2)}  # size of heads -> variant


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, int]:
    """Return the major and minor version of the installed triton, (0, 0) without it."""
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)


@lru_cache(maxsize=1)
def kernel_module() -> ModuleType | None:
    """Return the module of the Hopper kernel, or None if the installed triton lacks the functions of Gluon for it."""
    if triton_version() < (3, 6):
        return None
    try:
        return import_module("minivllm.plugins.attention.triton_hopper")
    except ImportError:
        return None


def refusal(spec: AttnSpec, q_dtype: str, kv_dtype: str, block: int) -> str:
    """Return why layers of this shape cannot use the Hopper kernel, "" if they can.

    The dtypes are names of torch's, such as "bfloat16"; ``block`` is the number of tokens of a block."""
    if spec.dim_qk != spec.dim_v or spec.dim_qk not in VARIANTS:
        return f"heads of {spec.dim_qk} and {spec.dim_v} elements: it has kernels for {sorted(VARIANTS)}"
    if q_dtype not in ("bfloat16", "float16"):
        return f"dtype {q_dtype}: it has kernels for bfloat16 and float16"
    if kv_dtype != q_dtype:
        return f"keys and values in {kv_dtype}: it reads those in {q_dtype}"
    if spec.v_in_k or spec.alibi is not None:
        return "values inside of keys" if spec.v_in_k else "ALiBi"
    if spec.window is not None and spec.window < LEAST_WINDOW:
        return f"a window of {spec.window} tokens, less than {LEAST_WINDOW}"
    keys, group = VARIANTS[spec.dim_qk].keys, spec.heads // spec.kv_heads
    if group > MOST_GROUP or LINES // group > keys:
        return f"{group} query heads per KV head"
    piece = min(keys, block)
    if block < LEAST_BLOCK or block % piece or keys % piece:
        return f"blocks of {block} tokens: it reads blocks of 16, 32, 64, or a multiple of {keys}"
    return ""


def choose(spec: AttnSpec, tiles: int, tokens: int, keys: int) -> Variant | None:
    """Return the variant of the Hopper kernel for the rows with several tokens of a step, or None for
    ``triton_prefill``.

    The rows have ``tokens`` tokens in ``tiles`` tiles of ``LINES`` lines for each KV head.  ``keys`` is the mean length
    of the rows, weighted by their tokens.  A captured step passes its number of tokens, the tiles of one row with all
    of them, and its longest context.
    """
    per_tile = LINES // (spec.heads // spec.kv_heads)
    if tiles * spec.kv_heads < LEAST_TILES or keys < LEAST_KEYS or 2 * tokens < tiles * per_tile:
        return None
    return VARIANTS[spec.dim_qk]
