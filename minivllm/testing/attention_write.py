"""What ``AttentionBackend.write`` must do; part of ``AttentionConformance``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.attention import NULL_BLOCK, AttnLayer, QKPre

from .attention_cases import Space, lives, room, rows_of, seen_in, settle
from .attention_math import Place, check, rotated
from .attention_world import Rows, Setting, World
from .base import Seen, since


class Writing:
    """The tests of ``write``."""

    if TYPE_CHECKING:
        space: Space
        for_all: Any

    @since(1, 0)
    def test_write_fills_the_named_slots_and_nothing_else(self) -> None:
        """Each token's k and v lie at its slot exactly as the KV format keeps them; every other slot keeps its bits."""
        seen, settings = Seen(), self.space.settings()

        @self.for_all(80, st.data(), st.integers(0, 1 << 20))
        def _(data: Any, seed: int) -> None:
            setting = data.draw(settings)
            plan = data.draw(lives(setting.block, most := room(setting)))
            world = World(self, setting, len(plan), most, seed=seed)
            rows = sorted(rows_of(plan, settle(world, plan), 0), key=lambda r: r[1] != 1)
            seen.update(seen_in(rows, plan, setting.block))
            for layer in world.layers:
                self._written(world, layer, rows, data.draw(st.booleans()))

        seen.require(decode=15, prompt=4, chunk=8, border=8, padded=3)

    def _written(self, world: World, layer: AttnLayer, rows: Rows, fused: bool) -> None:
        q, k, v = world.inputs(layer, rows, fused)
        meta, given = world.meta(rows), (k.clone(), v.clone())
        slots = meta.slot_map[layer.group].cpu()
        with torch.inference_mode(), _only(world, layer, slots):
            world.backend.write(layer, q, k, v, meta, None)
        mine = slots >= world.block  # the others go to the null block, several to one slot
        wants = round_trip(world, layer, *given)
        for name, got, want, exact in zip(
            "kv", world.load(layer, torch.arange(world.blocks)), wants, given, strict=True
        ):
            _assert_slots(name, got[slots[mine]], want[mine], exact.cpu()[mine], slots[mine], world)

    @since(1, 0)
    def test_write_normalises_and_rotates(self) -> None:
        """``QKPre``: RMSNorm of each head of q and k, then rotary embedding of rotate-half pairs at each token's
        position, of all or the first part of a head; v is stored as it came, and q comes back."""
        for dtype, _ in self.space.each("dtype"):
            for dim, setting in self.space.each("dim_qk", dtype=dtype):
                part = dim // 4 * 2
                for norms, rotary in (("qk", dim), ("", dim), ("qk", 0), ("q", part), ("qk", part), ("", part)):
                    for fused in (False, True):
                        self._prepared(setting, norms, rotary, fused)

    @since(1, 3)
    def test_rows_of_the_tables_may_lie_behind_all_positions(self) -> None:
        """``AttnMeta.position`` says where ``cos`` and ``sin`` have a token; of a request with another rotary embedding
        that is in a second table, behind the first."""
        setting = self.plain()
        for fused in (False, True):
            self._prepared(setting, "", setting.specs[0].dim_qk, fused, behind=60)

    def _prepared(self, setting: Setting, norms: str, rotary: int, fused: bool, behind: int = 0) -> None:
        world = World(self, setting, 3, 60)
        world.behind = behind
        (spec,), (layer,) = setting.specs, world.layers
        rows = [(world.add(50), 1), (world.add(7), 1), (world.add(2), 9)]
        weights = [world.randn(spec.dim_qk).to(world.device) if x in norms else None for x in "qk"]
        cos = sin = None
        if rotary:
            turn = torch.outer(torch.arange(60.0 + behind), 100.0 ** -(torch.arange(0, rotary, 2) / rotary)).repeat(
                1, 2
            )
            cos, sin = turn.cos().to(world.device), turn.sin().to(world.device)
        pre, meta, inputs = QKPre(cos, sin, *weights, eps=1e-3), world.meta(rows), world.inputs(layer, rows, fused)
        q, k, v = (x.cpu().clone() for x in inputs)
        slots = meta.slot_map[layer.group].cpu()
        with torch.inference_mode(), _only(world, layer, slots):
            got_q = world.backend.write(layer, *inputs, meta, pre)
        assert got_q.shape == q.shape and got_q.dtype == q.dtype, (
            f"write returned q {tuple(got_q.shape)} {got_q.dtype}: want {tuple(q.shape)} {q.dtype}"
        )
        what = f"(all rows together) norm of {norms or 'nothing'}, rotary_dim={rotary}; {setting}"
        place = Place(0, 0, len(q), len(q), world.block, what)
        weights = [None if w is None else w.cpu() for w in weights]
        wants = [rotated(x.double(), w, pre, meta.position.cpu()) for x, w in zip((q, k), weights, strict=True)]
        naives = [rotated(x, w, pre, meta.position.cpu()) for x, w in zip((q, k), weights, strict=True)]
        unit = torch.finfo(world.dtype).eps / 2
        check("q", got_q.cpu(), wants[0], naives[0], 1e-5, unit, place)
        got_k, got_v = (x[slots] for x in world.load(layer, torch.arange(world.blocks)))
        kept_k, kept_v = round_trip(world, layer, naives[1], v)
        kept_unit = torch.finfo(getattr(torch, world.format.dtype)).eps / 2 if world.plain else 0.0
        check("stored k", got_k, wants[1], kept_k, 1e-5, unit + kept_unit, place)
        if not spec.v_in_k:
            _assert_slots("v", got_v, kept_v, v, slots, world)


@contextmanager
def _only(world: World, layer: AttnLayer, slots: Tensor) -> Iterator[None]:
    """What happens inside changes no other slot than these, i64 [n], of a layer's cache; the null block is nobody's."""
    every = torch.arange(world.blocks)
    before = [x.clone() for x in world.load(layer, every)]
    raw = {n: x.clone() for n, x in layer.cache.items()}
    yield
    others = torch.ones(world.blocks * world.block, dtype=torch.bool).index_fill_(0, slots, False)
    others[: world.block] = False
    for name, got, old in zip("kv", world.load(layer, every), before, strict=True):
        moved = (got != old).flatten(1).any(1) & others
        at = [divmod(int(i), world.block) for i in moved.nonzero()[:4]]
        assert not at, f"write changed {name} of slots that were not named, (block, offset) {at}; {world.setting}"
    rest = torch.ones(world.blocks, dtype=torch.bool).index_fill_(0, slots // world.block, False)
    rest[NULL_BLOCK] = False
    rest = rest.to(world.device)
    for name, x in layer.cache.items():
        same = torch.equal(x[rest].view(torch.uint8), raw[name][rest].view(torch.uint8))
        assert same, f"write changed tensor {name!r} of blocks of which no slot was named; {world.setting}"


def round_trip(world: World, layer: AttnLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [T, kv_heads, dim] as the KV format gives them back, float32 on the CPU, by a cache of its own."""
    spec, fmt, n, device = layer.spec, world.format, len(k), world.device
    blocks = -(-n // world.block)
    cache = {
        name: torch.zeros((blocks, *t.shape), dtype=getattr(torch, t.dtype), device=device)
        for name, t in fmt.layout(spec, world.block).tensors.items()
    }
    fmt.store(cache, k.to(device), v.to(device), torch.arange(n, device=device))
    k, v = (x[:n].cpu() for x in fmt.load(cache, torch.arange(blocks, device=device), torch.float32))
    return k, (k if spec.v_in_k else v)[..., : spec.dim_v]


def _assert_slots(name: str, got: Tensor, want: Tensor, exact: Tensor, slots: Tensor, world: World) -> None:
    """got and want [T, kv_heads, dim]: equal for a plain KV format; for another one within its own error again."""
    slack = torch.zeros_like(want) if world.plain else (want - exact.float()).abs() + 1e-6
    wrong = ((got - want).abs() > slack).nonzero()
    if len(wrong):
        t, head, i = wrong[0].tolist()
        block, offset = divmod(int(slots[t]), world.block)
        raise AssertionError(
            f"{name} at block {block} + {offset}, head {head}, element {i} is {float(got[t, head, i]):.6g} after write,"
            f" want {float(want[t, head, i]):.6g} (token {t} of {len(got)}); {world.setting}"
        )
