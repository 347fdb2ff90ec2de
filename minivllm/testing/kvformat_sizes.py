"""KV formats beyond the sizes at which a grid or a packed index would end, and what ``load`` gave before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from minivllm.core.interfaces.attention import AttnSpec

from .base import since

HEADS, DIMS, TOKENS, SLOTS = 40, (192, 256, 576), 700, 70_000
MOST = 1 << 26  # elements of a cache


class KVFormatSizes:
    """Part of ``KVFormatConformance``."""

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
        _stored: Any
        _values: Any

    def _large(self) -> Iterator[tuple[AttnSpec, int, int]]:
        """(layer, tokens of a step, slots of the cache).  Heads and sizes that a test class narrows stay so."""
        sizes, usual = self.sizes, self.usual()
        heads, dims = (sizes[name] for name in ("kv_heads", "dims"))
        some = dims[len(dims) // 2]
        if "kv_heads" in usual:
            yield AttnSpec(HEADS, HEADS, some, some), 9, 64
        for dim in DIMS if "dims" in usual else ():
            yield AttnSpec(heads[0], heads[0], dim, dim), 9, 64
        yield AttnSpec(heads[0], heads[0], some, some), TOKENS, 2 * TOKENS
        yield AttnSpec(heads[0], heads[0], dims[0], dims[0]), 9, min(SLOTS, MOST // (heads[0] * dims[0]))

    def usual(self) -> set[str]:
        """Those of the sizes that no test class has set."""

        def first(name: str) -> Any:
            return next(vars(c)[name] for c in reversed(type(self).__mro__) if name in vars(c))

        return {name for name in ("kv_heads", "dims") if getattr(self, name) is first(name)}

    @since(1, 0)
    def test_sizes_of_large_models_and_caches(self) -> None:
        """40 heads, heads of 192 to 576 elements, 700 tokens in a step, slots beyond 2**16: what is stored comes back,
        and nothing else changes."""
        block, dtype = self.block(16), self.dtypes()[0]
        for spec, tokens, slots in self._large():
            torch.manual_seed(tokens)
            fmt = self.build()
            layout = self.layout(fmt, spec, block)
            if layout is None:
                continue
            blocks = max(-(-slots // block), -(-tokens // block) + 2)
            cache = self.cache(layout, blocks, fill=True)
            last = blocks * block - 1
            at = torch.cat([torch.tensor([last]), torch.randperm(last - block)[: tokens - 1] + block])
            given = self._values(fmt, spec, "normal", tokens, dtype)
            what = f"{dtype}, {tokens} tokens in {blocks} blocks of {block}, {spec}"
            self._stored(fmt, spec, block, cache, given, at, what)

    @since(1, 0)
    def test_what_load_gave_stays_as_it_is(self) -> None:
        """A back end may hold what it loaded while it loads more, of other blocks or of another layer."""
        spec, block, fmt = self.spec_of(small=True), self.block(), self.build()
        cache = self.cache(fmt.layout(spec, block), 6, fill=True)
        one, two = (torch.tensor(at, device=self.place()) for at in ([1, 2], [4, 3]))
        for dtype in (torch.float32, torch.bfloat16):
            got = fmt.load(cache, one, dtype)
            kept = [x.clone() for x in got]
            fmt.load(cache, two, dtype)
            same = all(torch.equal(a, b) for a, b in zip(got, kept, strict=True))
            assert same, f"load of other blocks writes into what load gave before, {dtype}"
