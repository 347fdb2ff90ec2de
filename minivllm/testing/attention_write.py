"""Tests of ``AttentionBackend.write``, which prepares q and k and stores k and v in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.attention import NULL_BLOCK, AttnLayer, QKPre

from .attention_cases import Space, lives, room, rows_of, seen_in, settle
from .attention_math import TokenPlace, check, half_eps, rotated
from .attention_world import (
    Rows,
    Setting,
    World,
    allocate,
    decode_first,
    layer_copies,
    number_of_blocks,
    same_bits,
    values_of,
)
from .base import Seen, since


class Writing:
    """The tests of ``write``, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        space: Space
        for_all: Any

    @since(1, 0)
    def test_write_fills_the_named_slots_and_nothing_else(self) -> None:
        """Check that k and v of each token are at its slot, as the KV format stores them.

        Every other slot keeps its bits.
        """
        seen = Seen()
        settings = self.space.settings()

        @self.for_all(80, st.data(), st.integers(0, 1 << 20))
        def _(data: Any, seed: int) -> None:
            setting = data.draw(settings)
            most = room(setting)
            plan = data.draw(lives(setting.block, most))
            world = World(self, setting, len(plan), most, seed=seed)
            seqs = settle(world, plan)
            rows = decode_first(rows_of(plan, seqs, 0))
            seen.update(seen_in(rows, plan, setting.block))
            for layer in world.layers:
                fused = data.draw(st.booleans())
                self._check_written(world, layer, rows, fused)

        self.meet(seen, decode=15, prompt=4, chunk=8, border=8, padded=3)

    def _check_written(self, world: World, layer: AttnLayer, rows: Rows, fused: bool) -> None:
        """Write the tokens of a step, and fail unless exactly their slots have the new keys and values.

        If ``fused``, q, k and v are slices of one tensor.
        """
        inputs = world.inputs(layer, rows, fused)
        _, k, v = inputs
        original = (k.clone(), v.clone())
        meta = world.meta(rows)
        slots = meta.slot_map[layer.group].cpu()
        with torch.inference_mode(), _only(world, layer, slots):
            world.backend.write(layer, *inputs, meta, None)
        own = slots >= world.block  # all other tokens go to the null block, and several of them may have the same slot
        own_slots = slots[own]
        expected = round_trip(world, layer, *original)
        loaded = world.load_all(layer)
        for i, name in enumerate("kv"):
            stored = loaded[i][own_slots]
            source = original[i].cpu()
            _assert_slots(name, stored, expected[i][own], source[own], own_slots, world)

    @since(1, 0)
    def test_write_normalises_and_rotates(self) -> None:
        """Check that ``write`` applies ``QKPre``: RMSNorm of each head of q and k, then rotary embedding.

        The embedding rotates pairs of the two halves (rotate-half) of a whole head or of its first part, at the
        position of the token.  v is stored unchanged, and the prepared q is returned.
        """
        for dtype, _ in self.space.each("dtype"):
            for dim, setting in self.space.each("dim_qk", dtype=dtype):
                part = dim // 4 * 2
                cases = [("qk", dim), ("", dim), ("qk", 0), ("q", part), ("qk", part), ("", part)]
                for norms, rotary in cases:
                    for fused in (False, True):
                        self._check_prepared(setting, norms, rotary, fused)

    @since(1, 3)
    def test_rows_of_the_tables_may_lie_behind_all_positions(self) -> None:
        """Check that ``write`` reads the rows of ``cos`` and ``sin`` that ``AttnMeta.position`` names.

        For a request with a different rotary embedding, these rows are in a second table after the first one.
        """
        setting = self.plain()
        for fused in (False, True):
            self._check_prepared(setting, "", setting.specs[0].dim_qk, fused, offset=60)

    def _check_prepared(self, setting: Setting, norms: str, rotary: int, fused: bool, offset: int = 0) -> None:
        """Fail unless ``write`` normalises, rotates and stores q, k and v correctly.

        ``norms`` names the inputs with a norm: "q", "k", both or none.  ``rotary`` is the number of rotated elements
        of a head.  ``offset`` is added to the positions of the tokens.
        """
        world = World(self, setting, 3, 60)
        world.position_offset = offset
        (layer,) = world.layers
        rows = world.add_rows([(50, 1), (7, 1), (2, 9)])
        weights = {"q": None, "k": None}
        for name in norms:
            weights[name] = world.randn(layer.spec.dim_qk).to(world.device)
        tables = _rotary_tables(60 + offset, rotary, world.device)
        pre = QKPre(*tables, *weights.values(), eps=1e-3)
        meta = world.meta(rows)
        inputs = world.inputs(layer, rows, fused)
        q, k, v = (x.cpu().clone() for x in inputs)
        slots = meta.slot_map[layer.group].cpu()
        with torch.inference_mode(), _only(world, layer, slots):
            returned = world.backend.write(layer, *inputs, meta, pre)
        assert _form(returned) == _form(q), f"write returned q {_form(returned)}: expected {_form(q)}"
        case = f"(all rows together) norm of {norms or 'nothing'}, rotary_dim={rotary}; {setting}"
        place = TokenPlace(0, 0, len(q), len(q), world.block, case)
        position = meta.position.cpu()

        def prepared(name: str, x: Tensor) -> Tensor:
            weight = weights[name]
            norm = None if weight is None else weight.cpu()
            return rotated(x, norm, pre, position)

        unit = half_eps(world.dtype)
        exact_q = prepared("q", q.double())
        naive_q = prepared("q", q)
        check("q", returned.cpu(), exact_q, naive_q, 1e-5, unit, place)
        stored_k, stored_v = (x[slots] for x in world.load_all(layer))
        exact_k = prepared("k", k.double())
        naive_k, naive_v = round_trip(world, layer, prepared("k", k), v)
        if world.plain:
            unit += half_eps(getattr(torch, world.format.dtype))
        check("stored k", stored_k, exact_k, naive_k, 1e-5, unit, place)
        if not layer.spec.v_in_k:
            _assert_slots("v", stored_v, naive_v, v, slots, world)


def _form(x: Tensor) -> str:
    """Return the shape and the dtype of a tensor, for messages."""
    return f"{tuple(x.shape)} {x.dtype}"


def _rotary_tables(rows: int, dim: int, device: str) -> tuple[Tensor | None, Tensor | None]:
    """Return cos and sin of a rotary embedding, float32 [rows, dim]; None if ``dim`` is 0."""
    if not dim:
        return None, None
    exponents = torch.arange(0, dim, 2) / dim
    frequencies = 100.0**-exponents
    positions = torch.arange(float(rows))
    angles = torch.outer(positions, frequencies)
    angles = angles.repeat(1, 2).to(device)
    return angles.cos(), angles.sin()


@contextmanager
def _only(world: World, layer: AttnLayer, slots: Tensor) -> Iterator[None]:
    """Fail if the body of the ``with`` statement changes other slots of a layer's cache than ``slots`` (int64 [n]).

    The null block may change.
    """
    before = [x.clone() for x in world.load_all(layer)]
    cache_before = layer_copies(layer)
    yield
    others = torch.ones(world.blocks * world.block, dtype=torch.bool)
    others[slots] = False
    others[: world.block] = False
    for name, after, old in zip("kv", world.load_all(layer), before, strict=True):
        differs = (after != old).flatten(1).any(1)
        changed = (differs & others).nonzero()
        places = [divmod(int(slot), world.block) for slot in changed[:4]]
        assert not places, (
            f"write changed {name} of slots that were not named, (block, offset) {places}; {world.setting}"
        )
    rest = torch.ones(world.blocks, dtype=torch.bool)
    rest[slots // world.block] = False
    rest[NULL_BLOCK] = False
    rest = rest.to(world.device)
    for name, x in layer.cache.items():
        old = cache_before[name]
        assert same_bits(x[rest], old[rest]), (
            f"write changed tensor {name!r} of blocks that have no named slot; {world.setting}"
        )


def round_trip(world: World, layer: AttnLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [T, kv_heads, dim] after the KV format has stored and loaded them, float32 on the CPU.

    They go through a new cache that only this function uses.
    """
    spec = layer.spec
    device = world.device
    fmt = world.format
    n = len(k)
    blocks = number_of_blocks(n, world.block)
    layout = fmt.layout(spec, world.block)
    cache = allocate(layout, blocks, device)
    every = torch.arange(n, device=device)
    fmt.store(cache, k.to(device), v.to(device), every)
    every_block = torch.arange(blocks, device=device)
    loaded = fmt.load(cache, every_block, torch.float32)
    k, v = (x[:n].cpu() for x in loaded)
    return k, values_of(spec, k, v)


def _assert_slots(name: str, stored: Tensor, expected: Tensor, original: Tensor, slots: Tensor, world: World) -> None:
    """Fail unless ``stored`` equals ``expected``, which the KV format made of ``original``; all [T, kv_heads, dim].

    A KV format that does more than cast may differ by the error of ``expected``.  ``slots`` (int64 [T]) is for
    messages.
    """
    if world.plain:
        allowed = torch.zeros_like(expected)
    else:
        lost = expected - original.float()
        allowed = lost.abs() + 1e-6
    near = (stored - expected).abs() <= allowed
    right = near | (stored == expected)  # equal infinities have a difference of NaN
    wrong = (~right).nonzero().tolist()
    if not wrong:
        return
    token, head, i = wrong[0]
    block, offset = divmod(int(slots[token]), world.block)
    value = float(stored[token, head, i])
    wanted = float(expected[token, head, i])
    raise AssertionError(
        f"{name} at block {block} + {offset}, head {head}, element {i} is {value:.6g} after write, expected "
        f"{wanted:.6g} (token {token} of {len(stored)}); {world.setting}"
    )
