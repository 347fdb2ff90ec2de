"""What any attention back end must do: give the definition's answer for any mix of rows, read nothing that is not the
row's, and write nothing that is not named.  ``attention_math`` says how exact, ``attention_world`` what the cache is
full of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttentionContext, AttnLayer
from minivllm.core.interfaces.kvformat import DTYPE_BYTES, KVFormat
from minivllm.device.layers.rotary import prepare_qk
from minivllm.registration.spec import allows
from minivllm.registry import Catalog, build_part

from . import attention_graph
from .attention_approximate import AttentionApproximate
from .attention_cases import Space, lives, room, rows_of, seen_in, settle
from .attention_lse import AttentionLse
from .attention_math import slopes
from .attention_sizes import AttentionSizes
from .attention_world import Got, Setting, World
from .attention_write import Writing
from .base import Seen, find, since
from .kept import Lasting
from .spec import SpecConformance

LONGEST = 4300  # keys of a row
ROWS = ((0, 5), (7, 1), (6, 4), (0, 1))  # (tokens in the cache, new tokens): prompt, decode, chunk, a prompt of one


class AttentionConformance(Writing, AttentionLse, AttentionSizes, AttentionApproximate, Lasting, SpecConformance):
    """Override ``load`` if the back end's layout is not the KV format's, and ``formats`` to name KV formats that are
    not installed as plug-ins."""

    kind = "attention"

    # ---- what an author may override -----------------------------------------------------------------------------

    def formats(self) -> Sequence[str]:
        """KV formats to try, as limits name them: by name for a built-in, ``dist/name`` for others."""
        entries = Catalog.discover()["kvformat"].entries
        return [e.name if e.builtin else e.label for e in entries]

    def load(self, backend: AttentionBackend, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n * block, kv_heads, dim] float32 of blocks i64 [n] as they lie in ``layer.cache``."""
        ctx = backend.ctx
        if backend.layout(layer.spec, ctx.kv_format, ctx.block) != ctx.kv_format.layout(layer.spec, ctx.block):
            pytest.skip("the layout is not the KV format's: override `load` in a test class to have this tested")
        return ctx.kv_format.load(layer.cache, blocks, torch.float32)

    def format(self, name: str) -> KVFormat:
        return build_part("kvformat", find("kvformat", name).part({}))

    def format_serves(self, name: str, dtype: str) -> bool:
        limits = find("kvformat", name).spec.limits
        return not isinstance(limits, dict) or allows(limits["dtype"], dtype)

    # ---- making worlds -------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        return Space(self)

    def plain(self, **wanted: Any) -> Setting:
        """The plainest setting that is claimed; skips the test if there is none."""
        setting = self.space.plain(**wanted)
        return pytest.skip(f"no setting with {wanted or 'anything known'} is claimed") if setting is None else setting

    def attention_context(self, setting: Setting, rows: int, tokens: int, invariant: bool) -> AttentionContext:
        fmt = self.format(setting.kv_format)
        place, dtype = self.place(), setting.dtype
        return AttentionContext(place, dtype, fmt, setting.block, rows, tokens, prepare_qk, invariant)

    def context(self) -> tuple[Any, ...]:
        return (self.attention_context(self.plain(), len(ROWS) + 2, 24, False),)

    def exercise(self, instance: AttentionBackend) -> Any:
        world = World(self, self.plain(), len(ROWS), 24, backend=instance)
        return [got.out.tolist() for got in world.step([(world.add(past), new) for past, new in ROWS])]

    def run(self, setting: Setting, rows: Sequence[tuple[int, int]] = ROWS, **how: Any) -> list[Got]:
        """Check one step of rows (tokens in the cache, new tokens) in a new world."""
        most = max(past + new for past, new in rows) + how.get("ahead", 0)
        names = ("seed", "poison", "q_size", "null_nan", "batch_invariant", "slope", "static")
        of_world = {name: how.pop(name) for name in names if name in how}
        world = World(self, setting, len(rows), most, **of_world)
        return world.check([(world.add(past), new) for past, new in rows], **how)

    def around(self, block: int) -> list[tuple[int, int]]:
        """Rows that end at each side of block borders, with one query, two, and a whole block of them."""
        ends = sorted({n for i in (1, 2) for n in (i * block - 1, i * block, i * block + 1) if n > 0})
        return [(end - new, new) for new in sorted({1, 2, block}) for end in ends if end >= new]

    # ---- the answer ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_any_steps_give_the_answer_of_the_definition(self) -> None:
        """Prompts, chunks and decode rows in any mix, one step after another, over shuffled and shared blocks, in any
        setting that is claimed; rows that have ended or pad a step disturb nobody, and what lies in slots that a query
        may not see never shows."""
        seen, settings = Seen(), self.space.settings()

        @self.for_all(120, st.data(), st.integers(0, 1 << 20))
        def _(data: Any, seed: int) -> None:
            setting = data.draw(settings)
            most = room(setting)
            plan = data.draw(lives(setting.block, most))
            fused = data.draw(st.booleans())
            world = World(self, setting, len(plan), most, seed=seed)
            seqs = settle(world, plan)
            for step in range(len(plan[0].news)):
                rows = rows_of(plan, seqs, step)
                seen.update(seen_in(rows, plan, setting.block))
                world.check(rows, fused=fused, lse=self.claims("lse"))

        seen.require(
            **{
                "decode": 30,
                "prompt": 5,
                "chunk": 20,
                "mixed": 15,
                "mid-block": 10,
                "border": 15,
                "shared": 5,
                "padded": 10,
            }
        )

    @since(1, 0)
    def test_rows_end_at_either_side_of_a_block_border(self) -> None:
        """In blocks of every claimed size; a row of several hundred tokens too."""
        for block, setting in self.space.each("block"):
            rows = self.around(block)
            for part in (rows[:6], rows[6:12], rows[12:]):
                self.run(setting, part or [(0, 1)])
            self.run(setting, [(700, 1), (3, 1), (401, 3)])

    @since(1, 0)
    def test_each_number_of_query_heads_for_a_kv_head(self) -> None:
        """Query head h reads KV head h // (heads / kv_heads); one KV head, and several."""
        for ratio, setting in self.space.each("queries_per_kv"):
            self.run(setting)
            self.run(setting, seed=ratio, fused=False)
            if (alone := self.space.plain(kv_heads=1, queries_per_kv=ratio)) is not None:
                self.run(alone)

    @since(1, 0)
    def test_each_head_size(self) -> None:
        """Every claimed size of keys and of values, equal or not where both are claimed."""
        for fact in ("dim_qk", "dim_v"):
            for size, setting in self.space.each(fact):
                self.run(setting)
                other = "dim_v" if fact == "dim_qk" else "dim_qk"
                for d in [d for d in self.space.facts[other] if d != size][:2]:
                    if (uneven := self.space.plain(**{fact: size, other: d})) is not None:
                        self.run(uneven)

    @since(1, 0)
    def test_common_sizes_have_no_answer_of_their_own(self) -> None:
        """Heads of 64 and 128 elements in blocks of 32 and 64 tokens, for which fast paths are written: prompts, chunks
        and decode rows over many keys, of each dtype."""
        sizes = ((32, 64), (64, 128))
        found = [
            self.space.plain(dtype=dtype, block=block, dim_qk=dim, dim_v=dim)
            for dtype in self.space.facts["dtype"]
            for block, dim in sizes
        ]
        if not any(found):
            pytest.skip(f"no setting with {' or '.join(f'heads of {d} in blocks of {b}' for b, d in sizes)} is claimed")
        for setting in filter(None, found):
            self.run(setting, [(0, 70), (57, 40), (61, 3), (200, 1)])

    @since(1, 0)
    def test_each_dtype_with_each_kv_format(self) -> None:
        """Within twice the error of naive attention in the same dtype, in rows of one and of many keys: sums and
        probabilities must not be kept in less than that."""
        for dtype, _ in self.space.each("dtype"):
            for kv_format, setting in self.space.each("kv_format", dtype=dtype):
                self.run(setting, [*ROWS, (130, 1), (290, 3), (0, 40)], lse=self.claims("lse"))
                assert kv_format == setting.kv_format

    @since(1, 0)
    def test_the_softmax_scale_is_the_layers(self) -> None:
        """``AttnSpec.scale``, and dim_qk ** -0.5 where it is None (not dim_v, and not the padded size)."""
        for dim, setting in self.space.each("dim_qk", scale=None):
            self.run(setting)
            self.run(self.plain(dim_qk=dim, scale=0.37))

    @since(1, 0)
    def test_large_scores_do_not_overflow(self) -> None:
        """Scores of several hundred, of either sign: the greatest is subtracted before the exponential."""
        for _, setting in self.space.each("dtype"):
            for seed in (0, 1):
                rows = [(0, 1), (1, 1), (2, 1), (17, 1), (0, 6), (21, 5)]
                got = self.run(setting, rows, q_size=80.0, seed=seed, lse=self.claims("lse"))
                Seen({"large": int(max(a.largest for a in got[0].want) > 150)}).require(large=1)

    @since(1, 0)
    def test_scores_that_rise_along_a_long_context(self) -> None:
        """Thousands of keys in blocks of every claimed size, whose scores rise by hundreds to the last one, or fall: a
        running maximum runs to the end, and what was summed up under a smaller one is scaled."""
        for block, setting in self.space.each("block"):
            n = min(max(620, 66 * block + 7), LONGEST)
            got = self.run(setting, [(n, 1), (600, 3), (2, 1)], q_size=60.0, slope=6.0)
            Seen({"large": int(max(a.largest for a in got[0].want) > 500)}).require(large=1)

    @since(1, 0)
    def test_layers_of_several_kv_groups_share_a_step(self) -> None:
        """Each group has a table of its own; layers of one group may differ in heads, scale, sinks and soft cap, and
        what one prepared in ``meta.work`` must not reach another that differs."""
        first = self.plain()
        base, ratios = first.specs[0], self.space.facts["queries_per_kv"]
        specs = [base, replace(base, scale=0.9), replace(base, heads=base.kv_heads * ratios[-1])]
        specs += [replace(base, kv_heads=1, heads=ratios[0]), replace(base, kv_heads=3, heads=3 * ratios[0])]
        specs += [replace(base, window=w) for w in (2, 5)] if self.claims("window") else []
        specs += [replace(base, sinks=True)] if self.claims("sinks") else []
        specs += [replace(base, softcap=1.5)] if self.claims("softcap") else []
        specs += [replace(base, alibi=slopes(base.heads))] if self.claims("alibi") else []
        for order in (specs, specs[::-1]):
            setting = Setting(tuple(order), first.dtype, first.kv_format, first.block)
            if not self.space.serves(setting):
                pytest.skip("the plug-in serves no such mix of layers")
            self.run(setting, [(9, 1), (4, 1), (0, 7), (6, 3)])

    @since(1, 0)
    def test_steps_of_one_shape_over_other_blocks(self) -> None:
        """A plan belongs to its step: the next one may have the same shape and other rows, lengths and blocks, in the
        same tensors.  The engine has one block table for good; of other metadata the memory may come back too."""
        for static in (False, True):
            world = World(self, self.plain(), 6, 30, static=static)
            seqs = [world.add(past) for past in (9, 9, 4, 5, 14, 9)]
            for chosen in ((0, 2), (1, 3), (4, 5), (2, 0), (0, 2)):
                world.check([(seqs[i], 1) for i in chosen])
            for chosen in ((0, 1), (2, 3), (1, 0)):
                world.check([(seqs[i], 3) for i in chosen])

    @since(1, 0)
    def test_a_prompt_in_chunks_sees_what_came_before(self) -> None:
        """A chunk's first query stands behind all cached tokens (the causal mask is aligned bottom-right)."""
        world = World(self, self.plain(), 3, 40)
        seqs = [world.add(), world.add(3)]
        for news in ((5, 1), (1, 1), (7, 2), (2, 4), (1, 9), (9, 3)):
            world.check(list(zip(seqs, news, strict=True)))

    # ---- what is read --------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_lengths_of_decode_rows_come_from_the_device(self) -> None:
        """``host_kv_len`` is an upper bound for rows that decode: it may size a launch, never end a softmax."""
        for ahead in (1, 3, 9):
            self.run(self.plain(), [(5, 1), (15, 1), (0, 1), (2, 4)], ahead=ahead)

    @since(1, 0)
    def test_nan_of_a_failed_row_stays_in_its_blocks(self) -> None:
        """A row whose numbers became NaN ends, and others get its blocks with the NaN in them: slots beyond a row's
        length and blocks that it does not own must not be multiplied, not even by 0."""
        for block, setting in self.space.each("block"):
            for rows in ([(block, 1), (block + 1, 1), (2 * block - 1, 1), (2, 1)], [(0, 3), (block, 2), (5, 1)]):
                self.run(setting, rows, poison=float("nan"))

    @since(1, 0)
    def test_the_null_block_is_never_multiplied(self) -> None:
        """Rows that failed, ended or pad a step write to it, so it may hold NaN; the table names it where a window has
        left a block.  Decode rows, prompts, and chunks whose first tile of keys begins before their window."""
        nan = float("nan")
        world = World(self, self.plain(), 5, 20, poison=nan, null_nan=True)
        seqs = [world.add(6), world.add(5, ended=True), world.add_null(), world.add(9), world.add(0)]
        for _ in range(2):
            world.check([(seqs[0], 1), (seqs[1], 2), (seqs[2], 2), (seqs[3], 1), (seqs[4], 3)])
        if not self.claims("window"):
            return
        for block, setting in list(self.space.each("block", window=2))[: None if self.long else 3]:
            for window in (block + 1, 23):
                spec = replace(setting.specs[0], window=window)
                rows = [(70, 1), (3 * block, 1), (2 * block + 1, 5), (90, 20), (0, 40)]
                windowed = Setting((spec,), setting.dtype, setting.kv_format, block)
                for invariant in (False, True)[: 1 + self.claims("batch_invariant")]:
                    self.run(windowed, rows, poison=nan, null_nan=True, batch_invariant=invariant)

    @since(1, 0)
    def test_ended_and_padded_rows_disturb_nobody(self) -> None:
        """Rows that met their end, and rows without a block, write to the null block; what comes out is dropped."""
        for new in (1, 4):
            world = World(self, self.plain(), 5, 20)
            seqs = [world.add(6), world.add(5, ended=True), world.add_null(), world.add(9), world.add(0)]
            for _ in range(2):
                world.check([(seqs[0], 1), (seqs[1], new), (seqs[2], new), (seqs[3], 1), (seqs[4], new)])

    # ---- features ------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_window_counts_the_query_itself(self) -> None:
        """A query sees the last ``window`` positions up to its own; blocks that left the window are gone from the
        table, whose entries are the null block then."""
        self.need("window")
        for block, setting in list(self.space.each("block", window=2))[: None if self.long else 3]:
            for window in sorted({1, 2, block - 1, block, block + 1, 2 * block + 1, 10_000} - {0}):
                spec = replace(setting.specs[0], window=window)
                rows = [(0, 1), (window % 50, 1), (3 * block, 1), (3 * block + 1, 2), (0, block + 2), (2 * block, 5)]
                self.run(Setting((spec,), setting.dtype, setting.kv_format, block), rows)

    @since(1, 3)
    def test_where_the_rotary_tables_have_a_token_says_nothing_of_what_it_sees(self) -> None:
        """``AttnMeta.position`` is for ``QKPre`` alone: with other numbers there each query sees the same keys."""
        windows = [None, 6] if self.claims("window") else [None]
        for window in windows:
            plain = self.plain() if window is None else self.plain(window=2)
            spec = replace(plain.specs[0], window=window)
            setting = Setting((spec,), plain.dtype, plain.kv_format, plain.block)
            world = World(self, setting, len(ROWS), 60)
            world.behind = 1000
            world.check([(world.add(past), new) for past, new in ROWS])

    @since(1, 0)
    def test_sinks_take_probability_and_give_nothing(self) -> None:
        """exp(sinks[head]) stands in the denominator of every query of the head."""
        self.need("sinks")
        for ratio in self.space.facts["queries_per_kv"]:
            for more in ({}, {"window": 3}) if self.claims("window") else ({},):
                self.run(self.plain(queries_per_kv=ratio, sinks=True, **more))

    @since(1, 0)
    def test_a_softcap_bends_the_scaled_scores(self) -> None:
        """softcap * tanh(scale * q.k / softcap), before the mask and the sink."""
        self.need("softcap")
        for softcap in (0.5, 5.0, 50.0):
            for size in (1.0, 30.0):
                self.run(self.plain(softcap=softcap), q_size=size)

    @since(1, 4)
    def test_slopes_lower_scores_by_the_distance_of_a_key(self) -> None:
        """slopes[head] * (key position - query position) is added behind scale and soft cap (ALiBi); far keys too, in
        chunks, with a window, and by the layer, of which another in the group may have none."""
        self.need("alibi")
        for ratio in self.space.facts["queries_per_kv"]:
            for more in ({}, {"window": 3}) if self.claims("window") else ({},):
                setting = self.plain(queries_per_kv=ratio, **more)
                base = setting.specs[0]
                specs = (replace(base, alibi=slopes(base.heads)), base, replace(base, alibi=slopes(base.heads)[::-1]))
                rows = [(0, 1), (37, 1), (0, 9), (21, 5), (150, 1), (140, 12)]
                self.run(Setting(specs, setting.dtype, setting.kv_format, setting.block), rows)

    @since(1, 0)
    def test_values_in_the_keys_are_their_first_elements(self) -> None:
        """``v_in_k``: v is k[..., :dim_v], and there is no tensor for it."""
        self.need("v_in_k")
        met = 0
        for dim_v in self.space.facts["dim_v"]:
            for dim_qk in [d for d in self.space.facts["dim_qk"] if d >= dim_v][:4]:
                if (setting := self.space.plain(dim_qk=dim_qk, dim_v=dim_v, v_in_k=True)) is not None:
                    self.run(setting)
                    met += 1
        assert met, "v_in_k is claimed for no pair of head sizes with dim_v <= dim_qk"

    @since(1, 0)
    def test_the_same_step_gives_the_same_bits(self) -> None:
        """``repeatable``: whatever ran in between."""
        self.need("repeatable")
        for _, setting in self.space.each("dtype"):
            world, rows = self._crowd(setting, False)
            want = self._bits(world, rows)
            for _ in range(5):
                self._bits(world, rows[::2])
                _assert_same(self._bits(world, rows), want, range(len(rows)), "the step was repeated")

    @since(1, 0)
    def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(self) -> None:
        """``batch_invariant``: alone, beside others and in another order, in the same step shape or not; and cut into
        chunks of any size."""
        self.need("batch_invariant")
        for _, setting in self.space.each("dtype"):
            world, rows = self._crowd(setting, True)
            want = self._bits(world, rows, world.check)
            for chosen in (*([i] for i in range(len(rows))), range(0, len(rows), 2), range(len(rows))[::-1]):
                got = self._bits(world, [rows[i] for i in chosen])
                _assert_same(
                    got, {k: want[i] for k, i in enumerate(chosen)}, chosen, f"beside {len(chosen) - 1} others"
                )
            for size in (1, 16, 64):
                for i, (seq, new) in enumerate(rows):
                    if new > 1 and (size > 1 or new < 20):
                        got = self._in_chunks(world, seq, [min(size, new - at) for at in range(0, new, size)])
                        _assert_same({0: got}, {0: want[i]}, [i], f"it comes in chunks of {size}")

    def _in_chunks(self, world: World, seq: Any, sizes: Sequence[int]) -> Tensor:
        """out [n, heads, dim_v] of steps that bring ``sizes`` tokens, one after another, and leave no trace."""
        length = seq.length
        got = torch.cat([world.step([(seq, n)])[0].out for n in sizes])
        seq.length = length
        return got

    def _crowd(self, setting: Setting, invariant: bool) -> tuple[World, list]:
        """A world and the rows of a step: short and long, one token and several."""
        shapes = [(2, 1), (700, 1), (30, 1), (333, 1), (0, 5), (64, 17), (0, 130), (250, 40)]
        world = World(self, setting, len(shapes), 720, batch_invariant=invariant)
        return world, [(world.add(past), new) for past, new in shapes]

    def _bits(self, world: World, rows: list, step: Any = None) -> dict[int, Tensor]:
        """Index among ``rows`` -> its out [n, heads, dim_v] of a step, which leaves no trace."""
        lengths = [seq.length for seq, _ in rows]
        got = (step or world.step)(rows)[0]
        for (seq, _), length in zip(rows, lengths, strict=True):
            seq.length = length
        order = sorted(range(len(rows)), key=lambda i: rows[i][1] != 1)
        return {i: got.out[p.first : p.first + p.n] for i, p in zip(order, got.places, strict=True)}

    # ---- layout and graphs -----------------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_layout_is_that_of_one_block(self) -> None:
        """The engine allocates [blocks, *shape] of each tensor, and counts its bytes."""
        for block, setting in self.space.each("block"):
            backend = self.build(self.attention_context(setting, 2, 2 * block, False))
            layout = backend.layout(setting.specs[0], backend.ctx.kv_format, block)
            assert layout.block == block, f"layout for blocks of {block} tokens says block={layout.block}"
            assert layout.tensors, "layout without tensors: keys must be kept somewhere"
            for name, t in layout.tensors.items():
                assert t.dtype in DTYPE_BYTES and hasattr(torch, t.dtype), f"{name!r}: unknown dtype {t.dtype!r}"

    @since(1, 0)
    def test_a_captured_step_replays_on_new_data(self) -> None:
        """The trait ``graph``: decode (or any mixed) steps captured once with their ``GraphKey`` give the answers of
        new metadata that is copied into the same tensors, also where captures of two sizes take turns; ``plan`` runs
        before each replay.  On a CPU the step runs again, and sees of the host what it saw at the capture."""
        graph = self.spec.traits.get("graph", "none")
        assert graph in ("none", "decode", "mixed"), f"traits graph={graph!r}: want none, decode or mixed"
        if graph == "none":
            pytest.skip("not claimed: graph")
        for _, setting in self.space.each("dtype"):
            attention_graph.check_decode(self, setting)
            if graph == "mixed":
                attention_graph.check_mixed(self, setting)


def _assert_same(got: dict[int, Tensor], want: dict[int, Tensor], names: Any, how: str) -> None:
    for i, x in got.items():
        differ = int((x != want[i]).sum())
        assert not differ, f"row {names[i]}: {differ} of {x.numel()} elements of out have other bits when {how}"
