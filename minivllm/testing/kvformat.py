"""What any KV format must do: give back what was stored as exactly as it says, and touch the named slots only."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.kvformat import DTYPE_BYTES, KVFormat, KVLayout
from minivllm.errors import MinivllmError

from .base import Seen, since
from .kept import Lasting
from .kvformat_sizes import KVFormatSizes
from .spec import SpecConformance
from .waiting import no_wait, waits

DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("normal", "sizes", "zeros", "edges", "large", "tiny")  # of numbers
FLOOR = 1e-5  # absolute error that any format may make of tiny numbers: a scale may have no room for less
Cache = dict[str, Tensor]
ENDLESS = (
    "(a scale overflowed, or 0 was divided by 0; a format whose scales end earlier sets `largest` in a test class)"
)
LOSSY = "(a format that is meant to lose as much overrides allowed(fmt, x) in a test class: the error of each element)"


class KVFormatConformance(KVFormatSizes, Lasting, SpecConformance):
    """Override ``allowed`` if the format is lossy in a way of its own, and the sizes ``kv_heads``, ``dims`` and
    ``blocks`` if it takes only some.  Sizes that its layout refuses with an error of minivllm's are left out.

    ``largest`` is the greatest magnitude of a key or value that is stored in a test, as far as the activations' dtype
    goes.  A format whose scales end earlier sets it in a test class, and says so to its users."""

    kind = "kvformat"
    largest: float = 1e30
    kv_heads: Sequence[int] = (1, 2, 3, 4, 5, 7, 8)
    dims: Sequence[int] = (1, 2, 3, 7, 8, 24, 64, 72, 80, 129)
    blocks: Sequence[int] = (1, 2, 3, 4, 16, 32)

    def allowed(self, fmt: KVFormat, x: Tensor) -> Tensor:
        """Error allowed of each element of x [T, kv_heads, dim] (k or v of one ``store``), float64.

        Default: formats without scales round to the nearest value of their dtype.  With scales, eight bits of
        the greatest element of the head are kept, or what float8 keeps of each element.
        """
        dtype = getattr(torch, fmt.dtype)
        exact = x.double()
        if not self._scaled(fmt):
            return (x.to(dtype).double() - exact).abs().nan_to_num(0.0, 0.0)
        greatest = exact.abs().amax((0, 2), keepdim=True) if len(x) else exact
        if not dtype.is_floating_point:
            return (greatest / 127 * 0.52).expand_as(exact)
        return exact.abs() * torch.finfo(dtype).eps * 0.52 + greatest * torch.finfo(dtype).tiny

    def layout(self, fmt: KVFormat, spec: AttnSpec, block: int) -> KVLayout | None:
        """The layout; None if it is refused with a reason, as the engine would tell a user at the start."""
        try:
            return fmt.layout(spec, block)
        except MinivllmError as exc:
            assert str(exc).strip(), f"layout refuses {spec} in blocks of {block} without words"
            return None
        except Exception as exc:
            raise AssertionError(
                f"layout raised {type(exc).__name__}: {exc} for {spec} in blocks of {block}: refuse what the format "
                "does not take with a ConfigError, or set kv_heads, dims and blocks in a test class to what it takes"
            ) from exc

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Of ``kv_heads``, ``dims`` and ``blocks`` those that the format takes, each beside some of the others."""
        fmt = self.build()
        every = list(itertools.product(self.kv_heads, self.dims, self.blocks))
        taken = [c for c in every if self.layout(fmt, AttnSpec(c[0], c[0], c[1], c[1]), c[2]) is not None]
        assert taken, (
            f"layout refuses all of kv_heads {list(self.kv_heads)}, dims {list(self.dims)} and blocks "
            f"{list(self.blocks)}: set kv_heads, dims and blocks in a test class to what the format takes"
        )
        return dict(
            zip(
                ("kv_heads", "dims", "blocks"),
                (sorted(set(column)) for column in zip(*taken, strict=True)),
                strict=True,
            )
        )

    def spec_of(self, heads: int = 2, small: bool = False, in_k: bool = False) -> AttnSpec:
        """Sizes that the format takes: the heads if it does, the largest keys, values as large or the smallest
        (``small``), in the keys (``in_k``)."""
        found, dims = self.sizes["kv_heads"], self.sizes["dims"]
        heads, dim = heads if heads in found else found[-1], dims[-1]
        other = dims[0] if in_k else dims[len(dims) // 2] if small else dim
        spec = AttnSpec(heads, heads, dim, other, v_in_k=in_k)
        return spec if self.layout(self.build(), spec, self.block()) is not None else replace(spec, dim_v=dim)

    def block(self, wanted: int = 4) -> int:
        """A block size that the format takes."""
        return wanted if wanted in self.sizes["blocks"] else self.sizes["blocks"][0]

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: str, fmt: KVFormat) -> Tensor:
        """Values to store, of one of ``KINDS``; none that the stored dtype cannot hold."""
        target = getattr(torch, dtype)
        x = torch.randn(shape)
        if kind == "sizes":
            x = x * 10.0 ** torch.randint(-4, 4, (*shape[:-1], 1))
        elif kind == "zeros":
            x = x * (torch.rand(shape) < 0.3)
        elif kind in ("large", "tiny"):  # one size for all, because the allowed error goes by the greatest of a head
            most = math.log10(min(self.largest, torch.finfo(target).max / 8))
            low, high = (min(3.0, most), most) if kind == "large" else (-44.0, -6.0)
            x = (x.double() * 10 ** random.uniform(low, high)).clamp(-(10**most), 10**most)
        elif kind == "edges" and not self._scaled(fmt):
            x = _edges(target, getattr(torch, fmt.dtype))[torch.randint(0, 16, shape)]
        if not self._scaled(fmt):
            most = torch.finfo(getattr(torch, fmt.dtype)).max
            x = x.clamp(-most, most)
        return x.to(target)

    # ---- making caches -------------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        return ()

    def exercise(self, instance: KVFormat) -> Any:
        torch.manual_seed(0)
        spec, block = self.spec_of(), self.block()
        cache = self.cache(instance.layout(spec, block), 3)
        k, v = torch.randn(2, 3, spec.kv_heads, spec.dim_qk, device=self.place())
        instance.store(cache, k, v, torch.tensor([3 * block - 1, 1, block], device=self.place()))
        loaded = instance.load(cache, torch.tensor([0, 2, 1], device=self.place()), torch.float32)
        return [x.tolist() for x in loaded]

    def cache(self, layout: KVLayout, blocks: int, fill: bool = False) -> Cache:
        """The tensors that the engine allocates; ``fill``: with arbitrary bytes, as of blocks that had other owners."""
        shapes = {name: ((blocks, *t.shape), getattr(torch, t.dtype)) for name, t in layout.tensors.items()}
        cache = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for x in cache.values() if fill else ():
            noise = torch.randint(0, 100, x.shape)  # of every dtype a finite number
            x.copy_(noise.to(x.dtype))
        return {name: x.to(self.place()) for name, x in cache.items()}

    def _scaled(self, fmt: KVFormat) -> bool:
        """Whether the format keeps more than the elements themselves."""
        floating = fmt.dtype in DTYPES or fmt.dtype == "float8_e4m3fn"
        return not floating or set(fmt.layout(self.spec_of(1), self.block(1)).tensors) - {"k", "v"} != set()

    def dtypes(self) -> list[str]:
        found = self.values("dtype", *DTYPES)
        return found or pytest.skip("claims no dtype that is known here")

    def specs(self) -> st.SearchStrategy[AttnSpec]:
        heads, dims = (st.sampled_from(self.sizes[name]) for name in ("kv_heads", "dims"))
        plain = st.builds(lambda h, a, b: AttnSpec(h, h, a, b), heads, dims, dims)
        in_k = st.builds(lambda h, a, b: AttnSpec(h, h, max(a, b), min(a, b), v_in_k=True), heads, dims, dims)
        return st.one_of(plain, plain, in_k)

    def _values(self, fmt: KVFormat, spec: AttnSpec, kind: str, n: int, dtype: str) -> tuple[Tensor, Tensor]:
        """k and v of n tokens, slices of one tensor as a merged projection gives them."""
        k = self.numbers(kind, (n, spec.kv_heads, spec.dim_qk), dtype, fmt)
        v = k[..., : spec.dim_v] if spec.v_in_k else self.numbers(kind, (n, spec.kv_heads, spec.dim_v), dtype, fmt)
        joined = torch.cat([k.flatten(1), v.flatten(1)], dim=1).to(self.place())
        split = joined.split([spec.kv_heads * spec.dim_qk, spec.kv_heads * spec.dim_v], dim=1)
        return split[0].view(k.shape), split[1].view(v.shape)

    def _load(self, fmt: KVFormat, spec: AttnSpec, cache: Cache, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """k and v [slots, kv_heads, dim] of the whole cache, on the CPU."""
        n = len(next(iter(cache.values())))
        k, v = fmt.load(cache, torch.arange(n, device=self.place()), dtype)
        return [k.cpu(), (k if spec.v_in_k else v)[..., : spec.dim_v].cpu()]

    # ---- what is stored comes back -------------------------------------------------------------------------------

    @since(1, 0)
    def test_what_is_stored_comes_back_and_nothing_else_changes(self) -> None:
        """k and v at their slots within what the format allows, whatever the shapes and sizes (from the least subnormal
        number to ``largest``), in whatever order the slots are named and over whatever was there; other slots keep what
        they held, and blocks that are not named every bit."""
        seen, dtypes = Seen(), self.dtypes()
        case = st.tuples(
            self.specs(),
            st.sampled_from(self.sizes["blocks"]),
            st.sampled_from(dtypes),
            st.sampled_from(KINDS),
            st.integers(0, 40),
            st.integers(0, 1 << 20),
        )

        @self.for_all(300, case)
        def _(drawn: tuple) -> None:
            spec, block, dtype, kind, n, seed = drawn
            torch.manual_seed(seed)
            random.seed(seed)
            fmt = self.build()
            blocks, layout = -(-n // block) + 3, self.layout(fmt, spec, block)
            if layout is None:
                seen["refused"] += 1
                return
            cache = self.cache(layout, blocks, fill=True)
            slots = torch.randperm((blocks - 1) * block)[:n]
            if seed % 2:
                slots = slots.sort().values
            k, v = self._values(fmt, spec, kind, n, dtype)
            self._stored(fmt, spec, block, cache, (k, v), slots, f"{dtype} {kind}, {n} tokens, block={block}, {spec}")
            seen.update([kind, "v_in_k" if spec.v_in_k else "v", "uneven" if spec.dim_qk != spec.dim_v else "even"])
            seen["none"] += not n
            seen["odd"] += spec.dim_qk % 2 * n

        odd, few = any(dim % 2 for dim in self.sizes["dims"]), 5 if seen["refused"] else 20
        seen.require(
            normal=few, sizes=few, zeros=few, edges=few, large=few, tiny=few, v=few, none=0 if seen["refused"] else 2
        )
        seen.require(v_in_k=0 if seen["refused"] else 20, odd=0 if seen["refused"] or not odd else 20)

    def _stored(
        self, fmt: KVFormat, spec: AttnSpec, block: int, cache: Cache, given: tuple, slots: Tensor, what: str
    ) -> None:
        before, raw = self._load(fmt, spec, cache), {name: x.clone() for name, x in cache.items()}
        copies = [x.clone() for x in given]
        fmt.store(cache, *given, slots.to(self.place()))
        for name, x, copy in zip("kv", given, copies, strict=True):
            assert _same(x, copy), f"store changed its argument {name}"
        others = torch.ones(before[0].shape[0], dtype=torch.bool).index_fill_(0, slots, False)
        tiny = all(float(x.abs().max()) < FLOOR for x in copies if x.numel())
        floor = FLOOR if tiny and self._scaled(fmt) else 0.0
        limits = [limit + floor for limit in self._limits(fmt, spec, copies)]
        for name, got, old, x, limit in zip("kv", self._load(fmt, spec, cache), before, copies, limits, strict=True):
            self._close(name, got[slots], x.cpu(), limit, slots, block, what)
            moved = (got != old).flatten(1).any(1) & others
            at = [divmod(int(i), block) for i in moved.nonzero()[:4]]
            assert not at, f"store changed {name} of slots that were not named, (block, offset) {at}: {what}"
        rest = torch.ones(len(next(iter(cache.values()))), dtype=torch.bool).index_fill_(0, slots // block, False)
        for name, x in cache.items():
            same = _same(x[rest.to(x.device)], raw[name][rest.to(x.device)])
            assert same, f"store changed tensor {name!r} of blocks of which no slot was named: {what}"

    def _limits(self, fmt: KVFormat, spec: AttnSpec, given: Sequence[Tensor]) -> list[Tensor]:
        """Errors allowed of k and v; of values that lie in the keys those of the keys."""
        k = self.allowed(fmt, given[0].cpu())
        return [k, k[..., : spec.dim_v] if spec.v_in_k else self.allowed(fmt, given[1].cpu())]

    def _close(self, name: str, got: Tensor, want: Tensor, limit: Tensor, slots: Tensor, block: int, what: str) -> None:
        """got, want and the allowed error ``limit`` [T, kv_heads, dim], of flat slots i64 [T]."""
        assert got.shape == want.shape, (
            f"load gave {name} of {tuple(got.shape[1:])} a token: want {tuple(want.shape[1:])}"
        )
        wrong = ~((got.double() - want.double()).abs() <= limit) & ~(got.double() == want.double())
        if wrong.any():
            t, head, i = wrong.nonzero()[0].tolist()
            at, offset = divmod(int(slots[t]), block)
            raise AssertionError(
                f"{name} at block {at} + {offset}, head {head}, element {i}: stored {float(want[t, head, i]):.9g}, "
                f"loaded {float(got[t, head, i]):.9g}, allowed error {float(limit[t, head, i]):.3g}; {what}\n"
                f"{LOSSY if got[t, head, i].isfinite() else ENDLESS}"
            )

    @since(1, 0)
    def test_what_it_holds_it_holds_without_loss(self) -> None:
        """``holds``: every finite value of these dtypes, its greatest and least and its subnormal ones and both zeros
        among them, comes back with all its bits; infinities stay infinite and NaN stays NaN."""
        self._has_spec()
        held = self.values("holds", *DTYPES)
        if not held:
            pytest.skip("holds no dtype without loss")
        for name in held:
            dtype = getattr(torch, name)
            if name == "float32":
                torch.manual_seed(1)
                every = torch.randint(-(1 << 31), 1 << 31, (1 << 16,)).to(torch.int32).view(torch.float32)
                every = torch.cat([every, _edges(dtype, dtype), torch.tensor([torch.inf, -torch.inf, torch.nan])])
            else:
                every = torch.arange(1 << 16).to(torch.int32).sub(1 << 15).to(torch.int16).view(dtype)
            spec, block = self.spec_of(), self.block(16)
            heads, size = spec.kv_heads, spec.dim_qk
            x = torch.nn.functional.pad(every, (0, -len(every) % (heads * size))).view(-1, heads, size)
            fmt, n = self.build(), len(x)
            cache = self.cache(fmt.layout(spec, block), -(-n // block))
            fmt.store(cache, x.to(self.place()), x.flip(0).to(self.place()), torch.arange(n, device=self.place()))
            for side, got, want in zip("kv", self._load(fmt, spec, cache, dtype), (x, x.flip(0)), strict=True):
                _assert_bits(f"{side} in {name}", got[:n], want)

    @since(1, 0)
    def test_load_gives_blocks_in_the_order_asked_for_and_in_each_dtype(self) -> None:
        """blocks [.., n] -> [.., n * block, kv_heads, dim]; a block may be asked for twice.  Each dtype is the
        float32 result cast; a format with scales may multiply in that dtype."""
        for spec in (self.spec_of(small=True), self.spec_of(3, in_k=True)):
            for block in self.sizes["blocks"]:
                torch.manual_seed(block)
                fmt = self.build()
                if (layout := self.layout(fmt, spec, block)) is None:
                    continue
                cache = self.cache(layout, 6)
                k, v = self._values(fmt, spec, "normal", 6 * block, "float32")
                fmt.store(cache, k, v, torch.arange(6 * block, device=self.place()))
                raw = {name: x.clone() for name, x in cache.items()}
                whole = [x.unflatten(0, (6, block)) for x in self._load(fmt, spec, cache)]
                for asked in ([[5, 0, 3], [1, 1, 4]], [2], [[[0], [5]]], [4, 3, 2, 1, 0, 5, 5]):
                    self._asked(fmt, spec, cache, torch.tensor(asked), whole, block)
                for name, x in cache.items():
                    assert _same(x, raw[name]), f"load changed tensor {name!r} of the cache"

    def _asked(
        self, fmt: KVFormat, spec: AttnSpec, cache: Cache, blocks: Tensor, whole: Sequence[Tensor], block: int
    ) -> None:
        """``whole``: k and v [blocks, block, kv_heads, dim] float32."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            loaded = fmt.load(cache, blocks.to(self.place()), dtype)
            for name, got, want in zip("kv", loaded, whole, strict=True):
                got = got[..., : spec.dim_v] if name == "v" else got
                shape = (*blocks.shape[:-1], blocks.shape[-1] * block, *want.shape[2:])
                assert got.shape == shape and got.dtype == dtype, (
                    f"load of {tuple(blocks.shape)} blocks gave {name} {tuple(got.shape)} {got.dtype}: "
                    f"want {shape} {dtype}"
                )
                right = want[blocks].flatten(blocks.dim() - 1, blocks.dim()).to(dtype)
                slack = 2 * torch.finfo(dtype).eps * right.double().abs() * self._scaled(fmt)
                wrong = ((got.cpu().double() - right.double()).abs() > slack).nonzero()
                if len(wrong):
                    place = wrong[0].tolist()
                    asked = blocks[tuple(place[: blocks.dim() - 1])].tolist()
                    raise AssertionError(f"load of blocks {asked} in {dtype}: {name} differs first at {place}")

    @since(1, 0)
    def test_one_slot_after_another_is_the_same_as_all_at_once(self) -> None:
        """A row that decodes stores one token a step: what is in the cache must not depend on how it came there, and a
        slot that is stored again holds the new token."""
        spec, block = self.spec_of(small=True), self.block()
        for dtype in self.dtypes():
            torch.manual_seed(2)
            fmt, layout = self.build(), self.build().layout(spec, block)
            slots = [block + i for i in range(block)][:4] + [3 * block + i for i in range(block)][:4] + [2 * block]
            at_once, singly = self.cache(layout, 4, fill=True), self.cache(layout, 4, fill=True)
            n = len(slots)
            k, v = self._values(fmt, spec, "sizes", n, dtype)
            slots, one = (
                torch.tensor(slots, device=self.place()),
                torch.zeros(1, dtype=torch.int64, device=self.place()),
            )
            mine = [x[:1].clone() for x in (k, v)]  # a step's tensors may lie where the last one's lay
            fmt.store(at_once, k, v, slots)
            fmt.store(singly, k.flip(0), v.flip(0), slots)
            for t in range(n):
                for kept, new in zip((*mine, one), (k, v, slots), strict=True):
                    kept.copy_(new[t : t + 1])
                fmt.store(singly, *mine, one)
            for name, a, b in zip("kv", self._load(fmt, spec, at_once), self._load(fmt, spec, singly), strict=True):
                differ = [divmod(int(s), block) for s in slots.cpu() if not torch.equal(a[s], b[s])]
                assert not differ, f"{name} differs when it comes token by token, (block, offset) {differ}, {dtype}"

    @since(1, 0)
    def test_several_tokens_may_go_to_the_null_block(self) -> None:
        """Rows that met their end all store to slot 0: any of them may win, and no other slot may change."""
        spec, block = self.spec_of(small=True), self.block()
        for dtype in self.dtypes():
            fmt = self.build()
            cache = self.cache(fmt.layout(spec, block), 3, fill=True)
            before = self._load(fmt, spec, cache)
            k, v = self._values(fmt, spec, "normal", 6, dtype)
            slots = torch.tensor([0, 3 * block - 1, 0, 0, block, 0])
            fmt.store(cache, k, v, slots.to(self.place()))
            real, what = slots > 0, f"{dtype}, slots {slots.tolist()}"
            loaded, limits = self._load(fmt, spec, cache), self._limits(fmt, spec, (k, v))
            for name, got, old, x, limit in zip("kv", loaded, before, (k.cpu(), v.cpu()), limits, strict=True):
                self._close(name, got[slots[real]], x[real], limit[real], slots[real], block, what)
                rest = [i for i in range(3 * block) if i not in slots.tolist()]
                assert torch.equal(got[rest], old[rest]), f"{name} of other slots changed, {dtype}"

    # ---- the layout ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_layout_says_what_is_allocated(self) -> None:
        """``block`` as asked, shapes and dtypes that torch knows, and in ``bytes`` what the tensors of a block take:
        the engine sizes the cache by it."""
        for block in self.sizes["blocks"]:
            for heads in self.sizes["kv_heads"]:
                layout = self.layout(self.build(), self.spec_of(heads, small=True), block)
                if layout is None:
                    continue
                assert layout.block == block, f"layout for blocks of {block} tokens says block={layout.block}"
                self._known(layout)
                real = sum(x.nbytes for x in self.cache(layout, 1).values())
                assert layout.bytes == real, f"layout says {layout.bytes} bytes a block, its tensors take {real}"

    def _known(self, layout: KVLayout) -> None:
        assert layout.tensors, "layout without tensors"
        for name, t in layout.tensors.items():
            assert t.dtype in DTYPE_BYTES and hasattr(torch, t.dtype), f"tensor {name!r}: unknown dtype {t.dtype!r}"
            assert all(isinstance(n, int) and n > 0 for n in t.shape), f"tensor {name!r}: shape {t.shape}"

    @since(1, 0)
    def test_values_that_lie_in_the_keys_are_not_kept_twice(self) -> None:
        """``v_in_k``: a block takes the same bytes whatever dim_v is."""
        one, block, every = self.spec_of(in_k=True), self.block(), self.sizes["dims"]
        heads, dim = one.kv_heads, one.dim_qk
        mine = {d: self.layout(self.build(), AttnSpec(heads, heads, dim, d, v_in_k=True), block) for d in every}
        sizes = {d: layout.bytes for d, layout in mine.items() if layout is not None}
        if not sizes:
            pytest.skip("its layout refuses values in the keys")
        assert len(set(sizes.values())) == 1, f"bytes of a block by dim_v: {sizes}"
        apart = self.layout(self.build(), AttnSpec(heads, heads, dim, dim), block)
        assert apart is None or sizes[max(sizes)] < apart.bytes, "as large as with values of their own"

    @since(1, 0)
    def test_it_does_not_wait_for_the_device(self) -> None:
        """``store`` and ``load`` run in steps that are captured: they read no value on the host."""
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims the CPU alone, for which nobody waits")
        spec, block, fmt = self.spec_of(), self.block(), self.build()
        for dtype in self.dtypes():
            cache = self.cache(fmt.layout(spec, block), 3)
            k, v = self._values(fmt, spec, "normal", block, dtype)
            slots, blocks = (torch.arange(n, device=self.place()) for n in (block, 3))
            with waits(self.place()) as found:
                fmt.store(cache, k, v, slots)
            no_wait(found, "store()")
            with waits(self.place()) as found:
                fmt.load(cache, blocks, getattr(torch, dtype))
            no_wait(found, "load()")

    @since(1, 0)
    def test_a_format_has_no_state(self) -> None:
        """One instance serves all layers: caches of other sizes in between change nothing."""
        specs, block = (self.spec_of(4), self.spec_of(1, small=True)), self.block()
        together, results = self.build(), []
        for fmts in ((self.build(), self.build()), (together, together)):
            torch.manual_seed(3)
            caches = [self.cache(fmt.layout(spec, block), 6) for fmt, spec in zip(fmts, specs, strict=True)]
            for fmt, spec, cache in zip(fmts, specs, caches, strict=True):
                given = self._values(fmt, spec, "normal", 6, self.dtypes()[0])
                fmt.store(cache, *given, torch.arange(6, device=self.place()))
            results.append([self._load(*made) for made in zip(fmts, specs, caches, strict=True)])
        for i, (want, got) in enumerate(zip(*results, strict=True)):
            for name, a, b in zip("kv", want, got, strict=True):
                assert torch.equal(a, b), f"{name} of layer {i} of 2 differs when one instance serves both"


def _edges(dtype: torch.dtype, kept: torch.dtype) -> Tensor:
    """Sixteen numbers of a dtype at the edges of what ``kept`` holds, float32."""
    info, own = torch.finfo(kept), torch.finfo(dtype)
    most = min(info.max, own.max)
    least = max(info.smallest_normal, own.smallest_normal)
    small = max(info.smallest_normal * info.eps, own.smallest_normal * own.eps)  # the least subnormal
    values = [0.0, -0.0, most, -most, most / 2, least, -least, least / 2, small, -small, 3 * small, 1.0, -1.0]
    values += [1 + max(info.eps, own.eps), 1 - max(info.eps, own.eps), 257.0]
    x = torch.tensor(values, dtype=torch.float64).to(dtype).float()
    return torch.where(x.abs() > most, x * (1 - own.eps), x)  # rounded up, and too large now


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _assert_bits(what: str, got: Tensor, want: Tensor) -> None:
    ints = {2: torch.int16, 4: torch.int32}[want.element_size()]
    wrong = (got.contiguous().view(ints) != want.contiguous().view(ints)) & ~(got.isnan() & want.isnan())
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        n = int(wrong.sum())
        raise AssertionError(
            f"{what}: {n} of {want.numel()} values came back changed, {float(want[at])!r} as {float(got[at])!r}"
        )
