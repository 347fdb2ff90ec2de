"""Tests of KV formats: large sizes, which may exceed a grid or a packed index, and results of ``load`` that must not
change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat

from .base import since

HEADS = 40  # number of KV heads of a layer
DIMS = (192, 256, 576)  # numbers of elements of a head
TOKENS = 700  # number of tokens of a step
SLOTS = 70_000  # number of slots of a cache
MOST = 1 << 26  # most elements of a cache


@dataclass(frozen=True)
class StoredLayer:
    """A format, the attention layer whose keys and values it stores, and the tokens of a block."""

    fmt: KVFormat
    spec: AttnSpec
    block: int


class KVFormatSizes:
    """The tests of large sizes, a base class of ``KVFormatConformance``."""

    if TYPE_CHECKING:
        blocks: Any
        block: Any
        build: Any
        cache: Any
        dims: Any
        dtypes: Any
        kv_heads: Any
        layout: Any
        place: Any
        sizes: Any
        spec_of: Any
        _check_store: Any
        _values: Any

    def _large(self) -> Iterator[tuple[AttnSpec, int, int]]:
        """Yield (layer, tokens of a step, slots of the cache) of each test.

        If a test class sets ``kv_heads`` or ``dims``, larger values of them are not tested.
        """
        heads = self.sizes["kv_heads"][0]
        dims = self.sizes["dims"]
        least = dims[0]
        middle = dims[len(dims) // 2]
        default = self.usual()
        if "kv_heads" in default:
            yield AttnSpec(HEADS, HEADS, middle, middle), 9, 64
        if "dims" in default:
            for dim in DIMS:
                yield AttnSpec(heads, heads, dim, dim), 9, 64
        yield AttnSpec(heads, heads, middle, middle), TOKENS, 2 * TOKENS
        yield AttnSpec(heads, heads, least, least), 9, min(SLOTS, MOST // (heads * least))

    def usual(self) -> set[str]:
        """Return which of ``kv_heads`` and ``dims`` a test class has not overridden."""

        def default(name: str) -> Any:
            return next(vars(cls)[name] for cls in reversed(type(self).__mro__) if name in vars(cls))

        return {name for name in ("kv_heads", "dims") if getattr(self, name) is default(name)}

    @since(1, 0)
    def test_sizes_of_large_models_and_caches(self) -> None:
        """Check 40 heads, heads of 192 to 576 elements, 700 tokens in a step, and slots beyond 2**16.

        Stored values come back, and nothing else changes.
        """
        block = self.block(16)
        dtype = self.dtypes()[0]
        for spec, tokens, slots in self._large():
            torch.manual_seed(tokens)
            fmt = self.build()
            layout = self.layout(fmt, spec, block)
            if layout is None:
                continue
            blocks = max(-(-slots // block), -(-tokens // block) + 2)
            cache = self.cache(layout, blocks, fill=True)
            last = blocks * block - 1
            parts = [torch.tensor([last]), torch.randperm(last - block)[: tokens - 1] + block]
            chosen = torch.cat(parts)
            layer = StoredLayer(fmt, spec, block)
            values = self._values(layer, "normal", tokens, dtype)
            case = f"{dtype}, {tokens} tokens in {blocks} blocks"
            self._check_store(layer, cache, values, chosen, case)

    @since(1, 0)
    def test_what_load_gave_stays_as_it_is(self) -> None:
        """Check that a later ``load`` does not change the result of an earlier one, which a back end may still use."""
        spec = self.spec_of(small=True)
        fmt = self.build()
        layout = fmt.layout(spec, self.block())
        cache = self.cache(layout, 6, fill=True)
        first = torch.tensor([1, 2], device=self.place())
        second = torch.tensor([4, 3], device=self.place())
        for dtype in (torch.float32, torch.bfloat16):
            loaded = fmt.load(cache, first, dtype)
            copies = [x.clone() for x in loaded]
            fmt.load(cache, second, dtype)
            same = all(torch.equal(x, copy) for x, copy in zip(loaded, copies, strict=True))
            assert same, f"load of other blocks changes the result of an earlier load, {dtype}"
