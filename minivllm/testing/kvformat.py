"""The conformance suite of KV formats, which store keys and values in the blocks of the KV cache.

A format must return stored values as exactly as it promises, and write to the named slots only.
"""

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
KINDS = ("normal", "sizes", "zeros", "edges", "large", "tiny")  # kinds of random numbers to store
FLOOR = 1e-5  # absolute error that is allowed for tiny numbers, for which the scales of a format may be too coarse
Cache = dict[str, Tensor]
ENDLESS = (
    "(a scale overflowed, or 0 was divided by 0; if the scales of the format have a smaller range, set `largest` in a "
    "test class)"
)
LOSSY = (
    "(if the format is meant to have this error, override allowed(fmt, x), the error of each element, in a test class)"
)


class KVFormatConformance(KVFormatSizes, Lasting, SpecConformance):
    """The conformance suite of KV formats.

    Override ``allowed`` if the format has larger errors than the default allows.  Override ``kv_heads``, ``dims`` and
    ``blocks`` if the format serves only some sizes.  Sizes that its layout refuses with an error of minivllm's are
    left out. ``largest`` is the greatest magnitude of a stored key or value, if the dtype of the activations can hold
    it.  A format whose scales have a smaller range sets it in a test class, and documents this limit for its users.
    """

    kind = "kvformat"
    largest: float = 1e30
    kv_heads: Sequence[int] = (1, 2, 3, 4, 5, 7, 8)
    dims: Sequence[int] = (1, 2, 3, 7, 8, 24, 64, 72, 80, 129)
    blocks: Sequence[int] = (1, 2, 3, 4, 16, 32)

    def allowed(self, fmt: KVFormat, x: Tensor) -> Tensor:
        """Return the allowed error of each element of x [T, kv_heads, dim], float64; x is k or v of one ``store``.

        By default, a format without scales rounds to the nearest value of its dtype.  A format with scales has an
        error of eight bits of the greatest element of a head, or the error of float8 for each element.
        """
        dtype = getattr(torch, fmt.dtype)
        exact = x.double()
        if not self._scaled(fmt):
            error = (x.to(dtype).double() - exact).abs()
            return error.nan_to_num(0.0, 0.0)
        if len(x):
            greatest = exact.abs().amax((0, 2), keepdim=True)
        else:
            greatest = exact
        if not dtype.is_floating_point:
            return (greatest / 127 * 0.52).expand_as(exact)
        relative = exact.abs() * torch.finfo(dtype).eps * 0.52
        return relative + greatest * torch.finfo(dtype).tiny

    def layout(self, fmt: KVFormat, spec: AttnSpec, block: int) -> KVLayout | None:
        """Return the cache layout of a block; None if the format refuses the sizes with an error that has a message."""
        try:
            return fmt.layout(spec, block)
        except MinivllmError as exc:
            assert str(exc).strip(), f"layout refuses {spec} in blocks of {block} without a message"
            return None
        except Exception as exc:
            raise AssertionError(
                f"layout raised {type(exc).__name__}: {exc} for {spec} in blocks of {block}: refuse sizes that the "
                "format does not serve with a ConfigError, or set kv_heads, dims and blocks in a test class to sizes "
                "that it serves"
            ) from exc

    @cached_property
    def sizes(self) -> dict[str, Any]:
        """Return the values of ``kv_heads``, ``dims`` and ``blocks`` that the format serves, in ascending order.

        Each value is served together with some values of the other two.
        """
        fmt = self.build()
        served = []
        for heads, dim, block in itertools.product(self.kv_heads, self.dims, self.blocks):
            if self.layout(fmt, AttnSpec(heads, heads, dim, dim), block) is not None:
                served.append((heads, dim, block))
        assert served, (
            f"layout refuses all of kv_heads {list(self.kv_heads)}, dims {list(self.dims)} and blocks "
            f"{list(self.blocks)}: set kv_heads, dims and blocks in a test class to sizes that the format serves"
        )
        columns = zip(*served, strict=True)
        kv_heads, dims, blocks = (sorted(set(column)) for column in columns)
        return {"kv_heads": kv_heads, "dims": dims, "blocks": blocks}

    def spec_of(self, heads: int = 2, small: bool = False, in_k: bool = False) -> AttnSpec:
        """Return the AttnSpec of a layer that the format serves: ``heads`` KV heads if possible, the largest keys.

        Values are as large as keys, smaller (``small``), or the first elements of the keys (``in_k``).
        """
        dims = self.sizes["dims"]
        if heads not in self.sizes["kv_heads"]:
            heads = self.sizes["kv_heads"][-1]
        dim_v = dims[-1]
        if in_k:
            dim_v = dims[0]
        elif small:
            dim_v = dims[len(dims) // 2]
        spec = AttnSpec(heads, heads, dims[-1], dim_v, v_in_k=in_k)
        if self.layout(self.build(), spec, self.block()) is None:
            return replace(spec, dim_v=dims[-1])
        return spec

    def block(self, preferred: int = 4) -> int:
        """Return a block size that the format serves, the preferred one if possible."""
        if preferred in self.sizes["blocks"]:
            return preferred
        return self.sizes["blocks"][0]

    def numbers(self, kind: str, shape: tuple[int, ...], dtype: str, fmt: KVFormat) -> Tensor:
        """Return random numbers of a kind of ``KINDS`` that the dtype of the format can hold."""
        target = getattr(torch, dtype)
        scaled = self._scaled(fmt)
        x = torch.randn(shape)
        if kind == "sizes":
            exponent = torch.randint(-4, 4, (*shape[:-1], 1))
            x = x * 10.0**exponent
        elif kind == "zeros":
            x = x * (torch.rand(shape) < 0.3)
        # one factor for all numbers, because the allowed error depends on the greatest of them
        elif kind in ("large", "tiny"):
            most = math.log10(min(self.largest, torch.finfo(target).max / 8))
            if kind == "large":
                exponent = random.uniform(min(3.0, most), most)
            else:
                exponent = random.uniform(-44.0, -6.0)
            largest = 10**most
            x = (x.double() * 10**exponent).clamp(-largest, largest)
        elif kind == "edges" and not scaled:
            edges = _edges(target, getattr(torch, fmt.dtype))
            x = edges[torch.randint(0, 16, shape)]
        if scaled:
            return x.to(target)
        stored = getattr(torch, fmt.dtype)
        return _cast_within(x, torch.finfo(stored).max, target)

    # ---- making caches -------------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options: none."""
        return ()

    def exercise(self, instance: KVFormat) -> Any:
        """Store some tokens, and return the keys and values of all blocks."""
        torch.manual_seed(0)
        spec = self.spec_of()
        block = self.block()
        cache = self.cache(instance.layout(spec, block), 3)
        k, v = torch.randn(2, 3, spec.kv_heads, spec.dim_qk, device=self.place())
        slots = torch.tensor([3 * block - 1, 1, block], device=self.place())
        instance.store(cache, k, v, slots)
        blocks = torch.tensor([0, 2, 1], device=self.place())
        loaded = instance.load(cache, blocks, torch.float32)
        return [x.tolist() for x in loaded]

    def cache(self, layout: KVLayout, blocks: int, fill: bool = False) -> Cache:
        """Return the cache tensors that the engine allocates for some blocks.

        With ``fill``, they hold arbitrary finite numbers, like blocks that other sequences used before.
        """
        cache = {}
        for name, tensor in layout.tensors.items():
            shape = (blocks, *tensor.shape)
            x = torch.zeros(shape, dtype=getattr(torch, tensor.dtype))
            if fill:
                numbers = torch.randint(0, 100, x.shape)
                x.copy_(numbers.to(x.dtype))
            cache[name] = x.to(self.place())
        return cache

    def _scaled(self, fmt: KVFormat) -> bool:
        """Return whether the format stores scales, or other data besides the elements themselves."""
        if fmt.dtype not in (*DTYPES, "float8_e4m3fn"):
            return True
        layout = fmt.layout(self.spec_of(1), self.block(1))
        return not set(layout.tensors) <= {"k", "v"}

    def dtypes(self) -> list[str]:
        """Return the claimed dtypes of activations, or skip the test if there is none."""
        found = self.values("dtype", *DTYPES)
        return found or pytest.skip("claims no dtype that is known here")

    def specs(self) -> st.SearchStrategy[AttnSpec]:
        """Return a hypothesis strategy for AttnSpecs; in a third of them the values are a part of the keys."""
        heads = st.sampled_from(self.sizes["kv_heads"])
        dims = st.sampled_from(self.sizes["dims"])
        plain = st.builds(lambda h, a, b: AttnSpec(h, h, a, b), heads, dims, dims)
        in_k = st.builds(lambda h, a, b: AttnSpec(h, h, max(a, b), min(a, b), v_in_k=True), heads, dims, dims)
        return st.one_of(plain, plain, in_k)

    def _values(self, fmt: KVFormat, spec: AttnSpec, kind: str, n: int, dtype: str) -> tuple[Tensor, Tensor]:
        """Return random k and v of n tokens, as slices of one tensor like the output of a merged projection."""
        shape = (n, spec.kv_heads, spec.dim_qk)
        k = self.numbers(kind, shape, dtype, fmt)
        v = k[..., : spec.dim_v]
        if not spec.v_in_k:
            shape_v = (n, spec.kv_heads, spec.dim_v)
            v = self.numbers(kind, shape_v, dtype, fmt)
        merged = torch.cat([k.flatten(1), v.flatten(1)], dim=1).to(self.place())
        sizes = [spec.kv_heads * spec.dim_qk, spec.kv_heads * spec.dim_v]
        flat_k, flat_v = merged.split(sizes, dim=1)
        return flat_k.view(k.shape), flat_v.view(v.shape)

    def _load(self, fmt: KVFormat, spec: AttnSpec, cache: Cache, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return k and v [slots, kv_heads, dim] of the whole cache, on the CPU."""
        n = len(next(iter(cache.values())))
        every = torch.arange(n, device=self.place())
        k, v = fmt.load(cache, every, dtype)
        stored_v = k if spec.v_in_k else v
        return [k.cpu(), stored_v[..., : spec.dim_v].cpu()]

    # ---- what is stored comes back -------------------------------------------------------------------------------

    @since(1, 0)
    def test_what_is_stored_comes_back_and_nothing_else_changes(self) -> None:
        """Check that ``store`` and ``load`` return k and v within the allowed error.

        The numbers go from the least subnormal number to ``largest``, in tensors of any shape.  Slots come in any
        order, and hold other numbers before.  Other slots keep their values, and blocks without a named slot keep
        every bit.
        """
        seen = Seen()
        dtypes = self.dtypes()
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
            layout = self.layout(fmt, spec, block)
            if layout is None:
                seen["refused"] += 1
                return
            blocks = -(-n // block) + 3
            cache = self.cache(layout, blocks, fill=True)
            slots = torch.randperm((blocks - 1) * block)[:n]
            if seed % 2:
                slots = slots.sort().values
            values = self._values(fmt, spec, kind, n, dtype)
            self._check_store(fmt, spec, block, cache, values, slots, f"{dtype} {kind}, {n} tokens")
            seen[kind] += 1
            seen["v_in_k" if spec.v_in_k else "v"] += 1
            seen["none"] += n == 0
            seen["odd"] += spec.dim_qk % 2 * n

        few = 5 if seen["refused"] else 20
        seen.require(normal=few, sizes=few, zeros=few, edges=few, large=few, tiny=few, v=few)
        if not seen["refused"]:
            has_odd = any(dim % 2 for dim in self.sizes["dims"])
            seen.require(none=2, v_in_k=20, odd=20 if has_odd else 0)

    def _check_store(
        self, fmt: KVFormat, spec: AttnSpec, block: int, cache: Cache, values: tuple, slots: Tensor, case: str
    ) -> None:
        """Store k and v of some tokens, and fail unless exactly their slots change and hold them.

        ``values`` are k and v [T, kv_heads, dim], ``slots`` int64 [T].  ``case`` describes the test in messages.
        """
        case = f"{case}, block={block}, {spec}"
        loaded_before = self._load(fmt, spec, cache)
        cache_before = {name: x.clone() for name, x in cache.items()}
        originals = [x.clone() for x in values]
        fmt.store(cache, *values, slots.to(self.place()))
        for name, x, original in zip("kv", values, originals, strict=True):
            assert _same(x, original), f"store changed its argument {name}"
        tiny = all(float(x.abs().max()) < FLOOR for x in originals if x.numel())
        floor = FLOOR if tiny and self._scaled(fmt) else 0.0
        limits = [limit + floor for limit in self._limits(fmt, spec, originals)]
        others = torch.ones(len(loaded_before[0]), dtype=torch.bool)
        others = others.index_fill_(0, slots, False)
        for i, (name, loaded) in enumerate(zip("kv", self._load(fmt, spec, cache), strict=True)):
            stored = originals[i].cpu()
            self._check_close(name, loaded[slots], stored, limits[i], slots, block, case)
            changed = (loaded != loaded_before[i]).flatten(1).any(1) & others
            places = []
            for slot in changed.nonzero()[:4]:
                places.append(divmod(int(slot), block))
            assert not places, f"store changed {name} of slots that were not named, (block, offset) {places}: {case}"
        number = len(next(iter(cache.values())))
        rest = torch.ones(number, dtype=torch.bool).index_fill_(0, slots // block, False)
        rest = rest.to(self.place())
        for name, x in cache.items():
            same = _same(x[rest], cache_before[name][rest])
            assert same, f"store changed tensor {name!r} of blocks that have no named slot: {case}"

    def _limits(self, fmt: KVFormat, spec: AttnSpec, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the allowed errors of k and v.

        If the values are a part of the keys, they have the keys' allowed errors.
        """
        of_k = self.allowed(fmt, values[0].cpu())
        if spec.v_in_k:
            of_v = of_k[..., : spec.dim_v]
        else:
            of_v = self.allowed(fmt, values[1].cpu())
        return [of_k, of_v]

    def _check_close(
        self, name: str, loaded: Tensor, stored: Tensor, limit: Tensor, slots: Tensor, block: int, case: str
    ) -> None:
        """Fail unless loaded values differ from stored ones by at most ``limit``; all are [T, kv_heads, dim].

        ``slots`` (int64 [T]), ``block`` and ``case`` are only for messages.
        """
        assert loaded.shape == stored.shape, (
            f"load returned {name} of {tuple(loaded.shape[1:])} for a token: expected {tuple(stored.shape[1:])}"
        )
        error = (loaded.double() - stored.double()).abs()
        right = (error <= limit) | (loaded.double() == stored.double())  # equal infinities have a difference of NaN
        if right.all():
            return
        index = tuple((~right).nonzero()[0].tolist())
        token, head, i = index
        number, offset = divmod(int(slots[token]), block)
        raise AssertionError(
            f"{name} at block {number} + {offset}, head {head}, element {i}: stored {float(stored[index]):.9g}, "
            f"loaded {float(loaded[index]):.9g}, allowed error {float(limit[index]):.3g}; {case}\n"
            f"{LOSSY if loaded[index].isfinite() else ENDLESS}"
        )

    @since(1, 0)
    def test_what_it_holds_it_holds_without_loss(self) -> None:
        """Check that each finite value of the dtypes in the spec's ``holds`` comes back with all its bits.

        The values include the greatest, the least, subnormal numbers and both zeros.  Infinities stay infinite, and
        NaN stays NaN.
        """
        self._has_spec()
        held = self.values("holds", *DTYPES)
        if not held:
            pytest.skip("holds no dtype without loss")
        spec = self.spec_of()
        block = self.block(16)
        place = self.place()
        for name in held:
            dtype = getattr(torch, name)
            values = _all_values(dtype)
            missing = -len(values) % (spec.kv_heads * spec.dim_qk)
            padded = torch.nn.functional.pad(values, (0, missing))
            k = padded.view(-1, spec.kv_heads, spec.dim_qk)
            v = k.flip(0)
            fmt = self.build()
            n = len(k)
            layout = fmt.layout(spec, block)
            blocks = -(-n // block)
            cache = self.cache(layout, blocks)
            slots = torch.arange(n, device=place)
            fmt.store(cache, k.to(place), v.to(place), slots)
            loaded_k, loaded_v = self._load(fmt, spec, cache, dtype)
            _assert_bits(f"k in {name}", loaded_k[:n], k)
            _assert_bits(f"v in {name}", loaded_v[:n], v)

    @since(1, 0)
    def test_load_gives_blocks_in_the_order_asked_for_and_in_each_dtype(self) -> None:
        """Check that ``load`` maps blocks [.., n] to [.., n * block, kv_heads, dim], in the order of the blocks.

        A block may be named twice.  The result in each dtype is the float32 result, cast.  A format with scales may
        multiply in that dtype.
        """
        for spec in (self.spec_of(small=True), self.spec_of(3, in_k=True)):
            for block in self.sizes["blocks"]:
                torch.manual_seed(block)
                fmt = self.build()
                layout = self.layout(fmt, spec, block)
                if layout is None:
                    continue
                cache = self.cache(layout, 6)
                k, v = self._values(fmt, spec, "normal", 6 * block, "float32")
                every = torch.arange(6 * block, device=self.place())
                fmt.store(cache, k, v, every)
                before = {name: x.clone() for name, x in cache.items()}
                loaded = self._load(fmt, spec, cache)
                whole = [x.unflatten(0, (6, block)) for x in loaded]
                for blocks in ([[5, 0, 3], [1, 1, 4]], [2], [[[0], [5]]], [4, 3, 2, 1, 0, 5, 5]):
                    self._check_load(fmt, spec, cache, torch.tensor(blocks), whole, block)
                for name, x in cache.items():
                    assert _same(x, before[name]), f"load changed tensor {name!r} of the cache"

    def _check_load(
        self, fmt: KVFormat, spec: AttnSpec, cache: Cache, blocks: Tensor, whole: Sequence[Tensor], block: int
    ) -> None:
        """Fail unless ``load`` returns some blocks of the cache, in each dtype.

        ``whole`` has k and v of all blocks, float32 [blocks, block, kv_heads, dim].
        """
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            k, v = fmt.load(cache, blocks.to(self.place()), dtype)
            for name, loaded, every in zip("kv", (k, v[..., : spec.dim_v]), whole, strict=True):
                flat = every[blocks].flatten(blocks.dim() - 1, blocks.dim())
                expected = flat.to(dtype)
                assert loaded.shape == expected.shape and loaded.dtype == dtype, (
                    f"load of {tuple(blocks.shape)} blocks returned {name} {tuple(loaded.shape)} {loaded.dtype}: "
                    f"expected {tuple(expected.shape)} {dtype}"
                )
                expected = expected.double()
                if self._scaled(fmt):
                    relative = 2 * torch.finfo(dtype).eps
                else:
                    relative = 0.0
                error = (loaded.cpu().double() - expected).abs()
                wrong = (error > relative * expected.abs()).nonzero()
                if len(wrong):
                    index = wrong[0].tolist()
                    named = blocks[tuple(index[: blocks.dim() - 1])].tolist()
                    raise AssertionError(f"load of blocks {named} in {dtype}: {name} differs first at {index}")

    @since(1, 0)
    def test_one_slot_after_another_is_the_same_as_all_at_once(self) -> None:
        """Check that tokens stored one by one, as decode steps do, give the same cache as tokens stored together.

        A slot that is stored again holds the new token.
        """
        spec = self.spec_of(small=True)
        block = self.block()
        place = self.place()
        for dtype in self.dtypes():
            torch.manual_seed(2)
            fmt = self.build()
            layout = fmt.layout(spec, block)
            few = min(block, 4)  # number of slots of a block to fill
            chosen = [*range(block, block + few), *range(3 * block, 3 * block + few), 2 * block]
            slots = torch.tensor(chosen, device=place)
            together = self.cache(layout, 4, fill=True)
            singly = self.cache(layout, 4, fill=True)
            k, v = self._values(fmt, spec, "sizes", len(chosen), dtype)
            fmt.store(together, k, v, slots)
            fmt.store(singly, k.flip(0), v.flip(0), slots)
            # each step writes to the same tensors, as steps of the engine may
            step = [x[:1].clone() for x in (k, v, slots)]
            for i in range(len(chosen)):
                for x, values in zip(step, (k, v, slots), strict=True):
                    x.copy_(values[i : i + 1])
                fmt.store(singly, *step)
            loaded = zip("kv", self._load(fmt, spec, together), self._load(fmt, spec, singly), strict=True)
            for name, expected, x in loaded:
                differ = []
                for slot in chosen:
                    if not torch.equal(expected[slot], x[slot]):
                        differ.append(divmod(slot, block))
                assert not differ, f"{name} differs if stored token by token, (block, offset) {differ}, {dtype}"

    @since(1, 0)
    def test_several_tokens_may_go_to_the_null_block(self) -> None:
        """Check that several tokens of a step can be stored to slot 0, as rows that have ended do.

        Slot 0 may then hold any of them.  No other slot may change.
        """
        spec = self.spec_of(small=True)
        block = self.block()
        for dtype in self.dtypes():
            fmt = self.build()
            layout = fmt.layout(spec, block)
            cache = self.cache(layout, 3, fill=True)
            before = self._load(fmt, spec, cache)
            values = self._values(fmt, spec, "normal", 6, dtype)
            slots = torch.tensor([0, 3 * block - 1, 0, 0, block, 0])
            fmt.store(cache, *values, slots.to(self.place()))
            live = slots > 0
            others = [slot for slot in range(3 * block) if slot not in slots.tolist()]
            limits = self._limits(fmt, spec, values)
            case = f"{dtype}, slots {slots.tolist()}"
            for i, (name, loaded) in enumerate(zip("kv", self._load(fmt, spec, cache), strict=True)):
                stored = values[i].cpu()[live]
                self._check_close(name, loaded[slots[live]], stored, limits[i][live], slots[live], block, case)
                assert torch.equal(loaded[others], before[i][others]), f"{name} of other slots changed, {dtype}"

    # ---- the layout ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_layout_says_what_is_allocated(self) -> None:
        """Check the block size, shapes, dtypes and ``bytes`` of the layout.

        The engine computes the size of the cache from ``bytes``, the bytes of all tensors of a block.
        """
        for block in self.sizes["blocks"]:
            for heads in self.sizes["kv_heads"]:
                spec = self.spec_of(heads, small=True)
                layout = self.layout(self.build(), spec, block)
                if layout is None:
                    continue
                assert layout.block == block, f"the layout for blocks of {block} tokens has block={layout.block}"
                self._check_tensors(layout)
                real = sum(x.nbytes for x in self.cache(layout, 1).values())
                assert layout.bytes == real, f"the layout has bytes={layout.bytes}, but its tensors have {real}"

    def _check_tensors(self, layout: KVLayout) -> None:
        """Fail unless a layout has tensors, with known dtypes and positive sizes."""
        assert layout.tensors, "the layout has no tensors"
        for name, tensor in layout.tensors.items():
            known = tensor.dtype in DTYPE_BYTES and hasattr(torch, tensor.dtype)
            assert known, f"tensor {name!r}: unknown dtype {tensor.dtype!r}"
            assert all(isinstance(n, int) and n > 0 for n in tensor.shape), f"tensor {name!r}: shape {tensor.shape}"

    @since(1, 0)
    def test_values_that_lie_in_the_keys_are_not_kept_twice(self) -> None:
        """Check that the bytes of a block do not depend on dim_v if values are a part of the keys (``v_in_k``)."""
        spec = self.spec_of(in_k=True)
        block = self.block()
        sizes = {}
        for dim_v in self.sizes["dims"]:
            changed = replace(spec, dim_v=dim_v)
            layout = self.layout(self.build(), changed, block)
            if layout is not None:
                sizes[dim_v] = layout.bytes
        if not sizes:
            pytest.skip("its layout refuses values in the keys")
        assert len(set(sizes.values())) == 1, f"bytes of a block by dim_v: {sizes}"
        plain = replace(spec, dim_v=spec.dim_qk, v_in_k=False)
        separate = self.layout(self.build(), plain, block)
        if separate is not None:
            assert max(sizes.values()) < separate.bytes, "a block is as large as with separate values"

    @since(1, 0)
    def test_it_does_not_wait_for_the_device(self) -> None:
        """Check that ``store`` and ``load`` read no value on the host, because they run in captured steps."""
        if "cuda" not in self.values("device", "cpu", "cuda"):
            pytest.skip("it claims only the CPU, for which nothing waits")
        spec = self.spec_of()
        block = self.block()
        fmt = self.build()
        for dtype in self.dtypes():
            cache = self.cache(fmt.layout(spec, block), 3)
            k, v = self._values(fmt, spec, "normal", block, dtype)
            slots = torch.arange(block, device=self.place())
            blocks = torch.arange(3, device=self.place())
            with waits(self.place()) as found:
                fmt.store(cache, k, v, slots)
            no_wait(found, "store()")
            with waits(self.place()) as found:
                fmt.load(cache, blocks, getattr(torch, dtype))
            no_wait(found, "load()")

    @since(1, 0)
    def test_a_format_has_no_state(self) -> None:
        """Check that one instance that serves layers of different sizes stores the same as an instance per layer."""
        specs = (self.spec_of(4), self.spec_of(1, small=True))
        shared = self.build()
        formats = (self.build(), self.build())
        expected = self._of_layers(formats, specs)
        found = self._of_layers((shared, shared), specs)
        for i, (layer, expected_layer) in enumerate(zip(found, expected, strict=True)):
            for name, x, y in zip("kv", layer, expected_layer, strict=True):
                assert torch.equal(x, y), f"{name} of layer {i} of 2 differs if one instance serves both"

    def _of_layers(self, formats: Sequence[KVFormat], specs: Sequence[AttnSpec]) -> list[list[Tensor]]:
        """Store the same tokens in the cache of each layer with its own format, and return k and v of each cache."""
        torch.manual_seed(3)
        layers = list(zip(formats, specs, strict=True))
        caches = [self.cache(fmt.layout(spec, self.block()), 6) for fmt, spec in layers]
        for (fmt, spec), cache in zip(layers, caches, strict=True):
            dtype = self.dtypes()[0]
            values = self._values(fmt, spec, "normal", 6, dtype)
            slots = torch.arange(6, device=self.place())
            fmt.store(cache, *values, slots)
        loaded = []
        for (fmt, spec), cache in zip(layers, caches, strict=True):
            loaded.append(self._load(fmt, spec, cache))
        return loaded


def _all_values(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit dtype, or random and extreme values of float32."""
    if dtype != torch.float32:
        codes = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
        return codes.view(dtype)
    torch.manual_seed(1)
    codes = torch.randint(-(1 << 31), 1 << 31, (1 << 16,)).to(torch.int32)
    values = codes.view(torch.float32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    parts = [values, _edges(dtype, dtype), special]
    return torch.cat(parts)


def _edges(dtype: torch.dtype, stored: torch.dtype) -> Tensor:
    """Return sixteen numbers of a dtype at the limits of the dtype ``stored``, as float32."""
    infos = (torch.finfo(stored), torch.finfo(dtype))
    most = min(info.max for info in infos)
    least = max(info.smallest_normal for info in infos)
    subnormal = max(info.smallest_normal * info.eps for info in infos)  # the smallest positive number
    eps = max(info.eps for info in infos)
    values = [0.0, -0.0, most, -most, most / 2, least, -least, least / 2, subnormal, -subnormal, 3 * subnormal]
    values += [1.0, -1.0, 1 + eps, 1 - eps, 257.0]
    exact = torch.tensor(values, dtype=torch.float64)
    return _cast_within(exact, most, dtype).float()


def _cast_within(x: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    """Cast numbers to a dtype, but not above ``most``: the cast of 65504 to bfloat16 is 65536."""
    x = x.clamp(-most, most).to(dtype)
    rounded_up = x.float().abs() > most
    smaller = x * (1 - torch.finfo(dtype).eps)
    return torch.where(rounded_up, smaller, x)


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same bits."""
    bits = a.contiguous().view(torch.uint8)
    return torch.equal(bits, b.contiguous().view(torch.uint8))


def _assert_bits(name: str, loaded: Tensor, stored: Tensor) -> None:
    """Fail unless loaded values have the bits of the stored ones; any NaN equals any other NaN."""
    ints = {2: torch.int16, 4: torch.int32}[stored.element_size()]
    bits = loaded.contiguous().view(ints)
    differ = bits != stored.contiguous().view(ints)
    wrong = differ & ~(loaded.isnan() & stored.isnan())
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {stored.numel()} values came back changed, {float(stored[index])!r} as "
            f"{float(loaded[index])!r}"
        )
