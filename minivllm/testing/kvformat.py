"""The conformance suite of KV formats, which store keys and values in the blocks of the KV cache.

A format must return stored values as exactly as it promises, and write to the named slots only.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
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
from .kvformat_data import (
    Cache,
    all_but,
    all_values,
    assert_bits,
    cast_within,
    copies,
    edges_of,
    number_of_blocks,
    same_bits,
)
from .kvformat_sizes import KVFormatSizes, StoredLayer
from .spec import SpecConformance
from .waiting import no_wait, waits

DTYPES = ("float32", "bfloat16", "float16")
KINDS = ("normal", "sizes", "zeros", "edges", "large", "tiny")  # kinds of random numbers to store
FLOOR = 1e-5  # absolute error that is allowed for tiny numbers, for which the scales of a format may be too coarse
BLOCKS_TO_LOAD: tuple[list[Any], ...] = ([[5, 0, 3], [1, 1, 4]], [2], [[[0], [5]]], [4, 3, 2, 1, 0, 5, 5])
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
        for sizes in itertools.product(self.kv_heads, self.dims, self.blocks):
            heads, dim, block = sizes
            spec = AttnSpec(heads, heads, dim, dim)
            if self.layout(fmt, spec, block) is not None:
                served.append(sizes)
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
            one_of_each_head = (*shape[:-1], 1)
            exponent = torch.randint(-4, 4, one_of_each_head)
            x = x * 10.0**exponent
        elif kind == "zeros":
            kept = torch.rand(shape) < 0.3
            x = x * kept
        # one factor for all numbers, because the allowed error depends on the greatest of them
        elif kind in ("large", "tiny"):
            limit = torch.finfo(target).max / 8
            most = math.log10(min(self.largest, limit))
            if kind == "large":
                least = min(3.0, most)
                exponent = random.uniform(least, most)
            else:
                exponent = random.uniform(-44.0, -6.0)
            largest = 10**most
            unlimited = x.double() * 10**exponent
            x = unlimited.clamp(-largest, largest)
        elif kind == "edges" and not scaled:
            stored = getattr(torch, fmt.dtype)
            edges = edges_of(target, stored)
            chosen = torch.randint(0, 16, shape)
            x = edges[chosen]
        if scaled:
            return x.to(target)
        stored = getattr(torch, fmt.dtype)
        most = torch.finfo(stored).max
        return cast_within(x, most, target)

    # ---- making caches -------------------------------------------------------------------------------------------

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options: none."""
        return ()

    def exercise(self, instance: KVFormat) -> Any:
        """Store some tokens, and return the keys and values of all blocks."""
        torch.manual_seed(0)
        spec = self.spec_of()
        block = self.block()
        layout = instance.layout(spec, block)
        cache = self.cache(layout, 3)
        shape = (3, spec.kv_heads, spec.dim_qk)
        k, v = torch.randn(2, *shape, device=self.place())
        slots = self._numbers([3 * block - 1, 1, block])
        instance.store(cache, k, v, slots)
        blocks = self._numbers([0, 2, 1])
        loaded = instance.load(cache, blocks, torch.float32)
        return [x.tolist() for x in loaded]

    def _numbers(self, values: Iterable[int]) -> Tensor:
        """Return slots or blocks as a tensor on the device of the test."""
        return torch.tensor(list(values), dtype=torch.int64, device=self.place())

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

        def plain(h: int, dim_qk: int, dim_v: int) -> AttnSpec:
            return AttnSpec(h, h, dim_qk, dim_v)

        def in_k(h: int, a: int, b: int) -> AttnSpec:
            return AttnSpec(h, h, max(a, b), min(a, b), v_in_k=True)

        separate = st.builds(plain, heads, dims, dims)
        shared = st.builds(in_k, heads, dims, dims)
        return st.one_of(separate, separate, shared)

    def _values(self, layer: StoredLayer, kind: str, n: int, dtype: str) -> tuple[Tensor, Tensor]:
        """Return random k and v of n tokens, as slices of one tensor like the output of a merged projection."""
        spec = layer.spec
        shape_k = (n, spec.kv_heads, spec.dim_qk)
        shape_v = (n, spec.kv_heads, spec.dim_v)
        k = self.numbers(kind, shape_k, dtype, layer.fmt)
        if spec.v_in_k:
            v = k[..., : spec.dim_v]
        else:
            v = self.numbers(kind, shape_v, dtype, layer.fmt)
        flat = [k.flatten(1), v.flatten(1)]
        merged = torch.cat(flat, dim=1).to(self.place())
        widths = [math.prod(shape_k[1:]), math.prod(shape_v[1:])]
        flat_k, flat_v = merged.split(widths, dim=1)
        return flat_k.view(shape_k), flat_v.view(shape_v)

    def _load(self, layer: StoredLayer, cache: Cache, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return k and v [slots, kv_heads, dim] of the whole cache, on the CPU."""
        every = self._numbers(range(number_of_blocks(cache)))
        k, v = layer.fmt.load(cache, every, dtype)
        if layer.spec.v_in_k:
            v = k
        v = v[..., : layer.spec.dim_v]
        return [k.cpu(), v.cpu()]

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
            places = torch.randperm((blocks - 1) * block)
            slots = places[:n]
            if seed % 2:
                slots = slots.sort().values
            layer = StoredLayer(fmt, spec, block)
            values = self._values(layer, kind, n, dtype)
            self._check_store(layer, cache, values, slots, f"{dtype} {kind}, {n} tokens")
            seen[kind] += 1
            seen["v_in_k" if spec.v_in_k else "v"] += 1
            seen["none"] += n == 0
            seen["odd"] += spec.dim_qk % 2 * n

        few = 5 if seen["refused"] else 20
        self.meet(seen, v=few, **dict.fromkeys(KINDS, few))
        if seen["refused"]:
            return
        self.meet(seen, none=2, v_in_k=20)
        if any(dim % 2 for dim in self.sizes["dims"]):
            self.meet(seen, odd=20)

    def _check_store(self, layer: StoredLayer, cache: Cache, values: tuple, slots: Tensor, case: str) -> None:
        """Store k and v of some tokens, and fail unless exactly their slots change and hold them.

        ``values`` are k and v [T, kv_heads, dim], ``slots`` int64 [T].  ``case`` describes the test in messages.
        """
        block = layer.block
        case = f"{case}, block={block}, {layer.spec}"
        loaded_before = self._load(layer, cache)
        cache_before = copies(cache)
        originals = [x.clone() for x in values]
        layer.fmt.store(cache, *values, slots.to(self.place()))
        for name, x, original in zip("kv", values, originals, strict=True):
            assert same_bits(x, original), f"store changed its argument {name}"
        floor = self._floor(layer.fmt, originals)
        limits = self._limits(layer, originals)
        others = all_but(slots, len(loaded_before[0]))
        loaded_after = self._load(layer, cache)
        for i, name in enumerate("kv"):
            loaded = loaded_after[i]
            stored = originals[i].cpu()
            limit = limits[i] + floor
            self._check_close(name, loaded[slots], stored, limit, slots, block, case)
            differs = (loaded != loaded_before[i]).flatten(1)
            changed = differs.any(1) & others
            places = []
            for slot in changed.nonzero()[:4]:
                places.append(divmod(int(slot), block))
            assert not places, f"store changed {name} of slots that were not named, (block, offset) {places}: {case}"
        rest = all_but(slots // block, number_of_blocks(cache))
        rest = rest.to(self.place())
        for name, x in cache.items():
            same = same_bits(x[rest], cache_before[name][rest])
            assert same, f"store changed tensor {name!r} of blocks that have no named slot: {case}"

    def _floor(self, fmt: KVFormat, values: Sequence[Tensor]) -> float:
        """Return the error that is allowed besides ``allowed``: ``FLOOR`` for tiny numbers in a format with scales."""
        greatest = [float(x.abs().max()) for x in values if x.numel()]
        tiny = all(number < FLOOR for number in greatest)
        return FLOOR if tiny and self._scaled(fmt) else 0.0

    def _limits(self, layer: StoredLayer, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the allowed errors of k and v.

        If the values are a part of the keys, they have the keys' allowed errors.
        """
        k, v = (x.cpu() for x in values)
        of_k = self.allowed(layer.fmt, k)
        if layer.spec.v_in_k:
            of_v = of_k[..., : layer.spec.dim_v]
        else:
            of_v = self.allowed(layer.fmt, v)
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
        loaded = loaded.double()
        stored = stored.double()
        near = (loaded - stored).abs() <= limit
        right = near | (loaded == stored)  # equal infinities have a difference of NaN
        if right.all():
            return
        wrong = (~right).nonzero()
        index = tuple(wrong[0].tolist())
        token, head, i = index
        slot = int(slots[token])
        number, offset = divmod(slot, block)
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
            values = all_values(dtype)
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
            loaded_k, loaded_v = self._load(StoredLayer(fmt, spec, block), cache, dtype)
            assert_bits(f"k in {name}", loaded_k[:n], k)
            assert_bits(f"v in {name}", loaded_v[:n], v)

    @since(1, 0)
    def test_load_gives_blocks_in_the_order_asked_for_and_in_each_dtype(self) -> None:
        """Check that ``load`` maps blocks [.., n] to [.., n * block, kv_heads, dim], in the order of the blocks.

        A block may be named twice.  The result in each dtype is the float32 result, cast.  A format with scales may
        multiply in that dtype.
        """
        layers = (self.spec_of(small=True), self.spec_of(3, in_k=True))
        for spec in layers:
            for block in self.sizes["blocks"]:
                torch.manual_seed(block)
                fmt = self.build()
                layout = self.layout(fmt, spec, block)
                if layout is None:
                    continue
                cache = self.cache(layout, 6)
                layer = StoredLayer(fmt, spec, block)
                k, v = self._values(layer, "normal", 6 * block, "float32")
                every = self._numbers(range(6 * block))
                fmt.store(cache, k, v, every)
                before = copies(cache)
                loaded = self._load(layer, cache)
                whole = [x.unflatten(0, (6, block)) for x in loaded]
                for blocks in BLOCKS_TO_LOAD:
                    self._check_load(layer, cache, torch.tensor(blocks), whole)
                for name, x in cache.items():
                    assert same_bits(x, before[name]), f"load changed tensor {name!r} of the cache"

    def _check_load(self, layer: StoredLayer, cache: Cache, blocks: Tensor, whole: Sequence[Tensor]) -> None:
        """Fail unless ``load`` returns some blocks of the cache, in each dtype.

        ``whole`` has k and v of all blocks, float32 [blocks, block, kv_heads, dim].
        """
        dims = blocks.dim()
        asked = blocks.to(self.place())
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            k, v = layer.fmt.load(cache, asked, dtype)
            v = v[..., : layer.spec.dim_v]
            for name, loaded, every in zip("kv", (k, v), whole, strict=True):
                flat = every[blocks].flatten(dims - 1, dims)
                expected = flat.to(dtype)
                assert loaded.shape == expected.shape and loaded.dtype == dtype, (
                    f"load of {tuple(blocks.shape)} blocks returned {name} {tuple(loaded.shape)} {loaded.dtype}: "
                    f"expected {tuple(expected.shape)} {dtype}"
                )
                expected = expected.double()
                if self._scaled(layer.fmt):
                    relative = 2 * torch.finfo(dtype).eps
                else:
                    relative = 0.0
                found = loaded.cpu().double()
                near = (found - expected).abs() <= relative * expected.abs()
                right = near | (found == expected)  # equal infinities have a difference of NaN
                wrong = (~right).nonzero()
                if len(wrong):
                    index = wrong[0].tolist()
                    named = blocks[tuple(index[: dims - 1])].tolist()
                    raise AssertionError(f"load of blocks {named} in {dtype}: {name} differs first at {index}")

    @since(1, 0)
    def test_one_slot_after_another_is_the_same_as_all_at_once(self) -> None:
        """Check that tokens stored one by one, as decode steps do, give the same cache as tokens stored together.

        A slot that is stored again holds the new token.
        """
        spec = self.spec_of(small=True)
        block = self.block()
        for dtype in self.dtypes():
            torch.manual_seed(2)
            fmt = self.build()
            layer = StoredLayer(fmt, spec, block)
            layout = fmt.layout(spec, block)
            few = min(block, 4)  # number of slots of a block to fill
            filled = range(few)
            chosen = [block + i for i in filled]
            chosen += [3 * block + i for i in filled]
            chosen.append(2 * block)
            slots = self._numbers(chosen)
            together = self.cache(layout, 4, fill=True)
            singly = self.cache(layout, 4, fill=True)
            k, v = self._values(layer, "sizes", len(chosen), dtype)
            fmt.store(together, k, v, slots)
            fmt.store(singly, k.flip(0), v.flip(0), slots)
            # each step writes to the same tensors, as steps of the engine may
            passed = (k, v, slots)
            step = [x[:1].clone() for x in passed]
            for i in range(len(chosen)):
                for x, values in zip(step, passed, strict=True):
                    x.copy_(values[i : i + 1])
                fmt.store(singly, *step)
            at_once = self._load(layer, together)
            one_by_one = self._load(layer, singly)
            for name, expected, x in zip("kv", at_once, one_by_one, strict=True):
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
            layer = StoredLayer(fmt, spec, block)
            before = self._load(layer, cache)
            values = self._values(layer, "normal", 6, dtype)
            slots = torch.tensor([0, 3 * block - 1, 0, 0, block, 0])
            fmt.store(cache, *values, slots.to(self.place()))
            live = slots > 0
            live_slots = slots[live]
            others = all_but(slots, 3 * block)
            limits = self._limits(layer, values)
            case = f"{dtype}, slots {slots.tolist()}"
            loaded_after = self._load(layer, cache)
            for i, name in enumerate("kv"):
                loaded = loaded_after[i]
                stored = values[i].cpu()[live]
                limit = limits[i][live]
                self._check_close(name, loaded[live_slots], stored, limit, live_slots, block, case)
                same = torch.equal(loaded[others], before[i][others])
                assert same, f"{name} of other slots changed, {dtype}"

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
            positive = [isinstance(n, int) and n > 0 for n in tensor.shape]
            assert all(positive), f"tensor {name!r}: shape {tensor.shape}"

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
        layer = StoredLayer(fmt, spec, block)
        layout = fmt.layout(spec, block)
        for dtype in self.dtypes():
            cache = self.cache(layout, 3)
            k, v = self._values(layer, "normal", block, dtype)
            slots = self._numbers(range(block))
            blocks = self._numbers(range(3))
            with waits(self.place()) as found:
                fmt.store(cache, k, v, slots)
            no_wait(found, "store()")
            with waits(self.place()) as found:
                fmt.load(cache, blocks, getattr(torch, dtype))
            no_wait(found, "load()")

    @since(1, 0)
    def test_a_format_has_no_state(self) -> None:
        """Check that one instance that serves layers of different sizes stores the same as an instance per layer."""
        block = self.block()
        shared = self.build()
        layers = []
        layers_of_shared = []
        for spec in (self.spec_of(4), self.spec_of(1, small=True)):
            layers.append(StoredLayer(self.build(), spec, block))
            layers_of_shared.append(StoredLayer(shared, spec, block))
        expected = self._of_layers(layers)
        found = self._of_layers(layers_of_shared)
        for i, loaded in enumerate(found):
            for name, x, y in zip("kv", loaded, expected[i], strict=True):
                assert torch.equal(x, y), f"{name} of layer {i} of 2 differs if one instance serves both"

    def _of_layers(self, layers: Sequence[StoredLayer]) -> list[list[Tensor]]:
        """Store the same tokens in the cache of each layer with its own format, and return k and v of each cache."""
        torch.manual_seed(3)
        caches = []
        for layer in layers:
            layout = layer.fmt.layout(layer.spec, layer.block)
            caches.append(self.cache(layout, 6))
        slots = self._numbers(range(6))
        dtype = self.dtypes()[0]
        for layer, cache in zip(layers, caches, strict=True):
            values = self._values(layer, "normal", 6, dtype)
            layer.fmt.store(cache, *values, slots)
        return [self._load(layer, cache) for layer, cache in zip(layers, caches, strict=True)]
