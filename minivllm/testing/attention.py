"""The conformance suite of attention back ends.

A back end must compute exact attention for any mix of rows.  It must not read data of other rows, and must write only
the slots and outputs that the engine names.  ``attention_math`` defines the allowed error, and ``attention_world`` the
contents of the cache.
"""

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
from .attention_shared import AttentionShared
from .attention_sizes import AttentionSizes
from .attention_spans import AttentionSpans
from .attention_world import WORLD_OPTIONS, LayerResult, Rows, Setting, World, WorldSeq
from .attention_write import Writing
from .base import Seen, find, since
from .kept import Lasting
from .spec import SpecConformance

LONGEST = 4300  # most keys of a row (a sequence in a step)
# (cached tokens, new tokens) of each row of a step: a prompt, a decode row, a chunk of a prompt, a one-token prompt
ROWS = ((0, 5), (7, 1), (6, 4), (0, 1))
NAN = float("nan")
Shapes = Sequence[tuple[int, int]]  # (cached tokens, new tokens) of each row of a step


class AttentionConformance(
    Writing,
    AttentionLse,
    AttentionShared,
    AttentionSizes,
    AttentionSpans,
    AttentionApproximate,
    Lasting,
    SpecConformance,
):
    """The conformance suite of attention back ends.

    Override ``load`` if the back end stores keys and values in another layout than the KV format.  Override
    ``formats`` to test with KV formats that are not installed as plug-ins.
    """

    kind = "attention"

    # ---- what an author may override -----------------------------------------------------------------------------

    def formats(self) -> Sequence[str]:
        """Return the KV formats to test with: the plain name of a built-in format, and ``dist/name`` of any other
        one."""
        entries = Catalog.discover()["kvformat"].entries
        names = []
        for entry in entries:
            names.append(entry.name if entry.builtin else entry.label)
        return names

    def load(self, backend: AttentionBackend, layer: AttnLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer's cache holds in some blocks (int64 [n]).

        Both are float32 [n * block, kv_heads, dim].
        """
        ctx = backend.ctx
        fmt = ctx.kv_format
        layout = fmt.layout(layer.spec, ctx.block)
        if backend.layout(layer.spec, fmt, ctx.block) != layout:
            pytest.skip("the layout is not the KV format's: override `load` in a test class to have this tested")
        return fmt.load(layer.cache, blocks, torch.float32)

    def format(self, name: str) -> KVFormat:
        """Create the KV format of a name."""
        part = find("kvformat", name).part({})
        return build_part("kvformat", part)

    def format_serves(self, name: str, dtype: str) -> bool:
        """Return whether a KV format serves models of a dtype."""
        limits = find("kvformat", name).spec.limits
        if not isinstance(limits, dict):
            return True
        return allows(limits["dtype"], dtype)

    # ---- making worlds -------------------------------------------------------------------------------------------

    @cached_property
    def space(self) -> Space:
        """Return all settings that the plug-in claims to serve."""
        return Space(self)

    def plain(self, **fixed: Any) -> Setting:
        """Return the plainest setting (model, KV format and block size) that the plug-in claims to serve.

        ``fixed`` has facts that the setting must have.  Skip the test if the plug-in claims no such setting.
        """
        setting = self.space.plain(**fixed)
        if setting is None:
            pytest.skip(f"no setting with {fixed or 'anything known'} is claimed")
        return setting

    def attention_context(self, setting: Setting, rows: int, tokens: int, invariant: bool) -> AttentionContext:
        """Return the arguments to build a back end for a setting.

        ``rows`` is the largest number of rows of a step, and ``tokens`` the largest number of tokens of a row.
        ``invariant`` demands results that do not depend on the batch.
        """
        fmt = self.format(setting.kv_format)
        return AttentionContext(self.place(), setting.dtype, fmt, setting.block, rows, tokens, prepare_qk, invariant)

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        ctx = self.attention_context(self.plain(), len(ROWS) + 2, 24, False)
        return (ctx,)

    def exercise(self, instance: AttentionBackend) -> Any:
        """Run one step with a back end and return its outputs."""
        world = World(self, self.plain(), len(ROWS), 24, backend=instance)
        rows = world.add_rows(ROWS)
        return [result.out.tolist() for result in world.step(rows)]

    def run(self, setting: Setting, rows: Shapes = ROWS, **options: Any) -> list[LayerResult]:
        """Run one step of a new back end and cache, and compare its results with exact attention.

        ``options`` has fields of ``WorldOptions``, and keyword arguments of ``World.check``.
        """
        longest = max(past + new for past, new in rows)
        most = longest + options.get("ahead", 0)
        of_world = {name: options.pop(name) for name in WORLD_OPTIONS & options.keys()}
        world = World(self, setting, len(rows), most, **of_world)
        step = world.add_rows(rows)
        return world.check(step, **options)

    def around(self, block: int) -> list[tuple[int, int]]:
        """Return rows (cached tokens, new tokens) that end before, at and after block borders.

        They have one, two and ``block`` new tokens.
        """
        borders = {block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
        rows = []
        for new in sorted({1, 2, block}):
            for end in sorted(borders):
                if end >= new:
                    rows.append((end - new, new))
        return rows

    def with_windows(self) -> tuple[dict[str, Any], ...]:
        """Return AttnSpec fields to test a feature with: no field, and a window of 3 tokens if windows are claimed."""
        fields: list[dict[str, Any]] = [{}]
        if self.claims("window"):
            fields.append({"window": 3})
        return tuple(fields)

    def windowed_settings(self) -> list[tuple[int, Setting]]:
        """Return (block size, setting with a window) for the first three block sizes, or for all in the long
        profile."""
        settings = list(self.space.each("block", window=2))
        return settings if self.long else settings[:3]

    # ---- the answer ----------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_any_steps_give_the_answer_of_the_definition(self) -> None:
        """Check steps of prompts, chunks and decode rows in any mix, in all claimed settings.

        The steps follow each other, and blocks are shuffled and shared.  Rows that have ended, rows that pad a step,
        and slots that a query may not see must not change the results of other rows.
        """
        seen = Seen()
        settings = self.space.settings()

        @self.for_all(120, st.data(), st.integers(0, 1 << 20))
        def _(data: Any, seed: int) -> None:
            setting = data.draw(settings)
            most = room(setting)
            plan = data.draw(lives(setting.block, most))
            fused = data.draw(st.booleans())
            world = World(self, setting, len(plan), most, seed=seed)
            seqs = settle(world, plan)
            lse = self.claims("lse")
            for step in range(len(plan[0].news)):
                rows = rows_of(plan, seqs, step)
                cases = seen_in(rows, plan, setting.block)
                seen.update(cases)
                world.check(rows, fused=fused, lse=lse)

        least = {"decode": 30, "prompt": 5, "chunk": 20, "mixed": 15, "border": 15, "shared": 5, "padded": 10}
        least["mid-block"] = 10
        self.meet(seen, **least)

    @since(1, 0)
    def test_rows_end_at_either_side_of_a_block_border(self) -> None:
        """Check rows that end near a block border, and rows of hundreds of tokens, for every claimed block size."""
        for block, setting in self.space.each("block"):
            rows = self.around(block)
            for first in (0, 6, 12):
                part = rows[first : first + 6]
                self.run(setting, part or [(0, 1)])
            self.run(setting, [(700, 1), (3, 1), (401, 3)])

    @since(1, 0)
    def test_each_number_of_query_heads_for_a_kv_head(self) -> None:
        """Check that query head h reads KV head h // (heads / kv_heads), for each claimed number of query heads per
        KV head."""
        for ratio, setting in self.space.each("queries_per_kv"):
            self.run(setting)
            self.run(setting, seed=ratio, fused=False)
            single = self.space.plain(kv_heads=1, queries_per_kv=ratio)
            if single is not None:
                self.run(single)

    @since(1, 0)
    def test_each_head_size(self) -> None:
        """Check every claimed size of keys and of values, also with different sizes of keys and values."""
        for fact, other in (("dim_qk", "dim_v"), ("dim_v", "dim_qk")):
            for size, setting in self.space.each(fact):
                self.run(setting)
                different = [dim for dim in self.space.facts[other] if dim != size]
                for dim in different[:2]:
                    uneven = self.space.plain(**{fact: size, other: dim})
                    if uneven is not None:
                        self.run(uneven)

    @since(1, 0)
    def test_common_sizes_have_no_answer_of_their_own(self) -> None:
        """Check the sizes for which back ends have fast paths, with each dtype.

        These are heads of 64 and 128 elements in blocks of 32 and 64 tokens.  The step has prompts, chunks and decode
        rows over many keys.
        """
        sizes = {64: 32, 128: 64}  # elements of a head -> tokens of a block
        found = []
        for dtype in self.space.facts["dtype"]:
            for dim, block in sizes.items():
                setting = self.space.plain(dtype=dtype, block=block, dim_qk=dim, dim_v=dim)
                if setting is not None:
                    found.append(setting)
        if not found:
            names = [f"heads of {dim} in blocks of {block}" for dim, block in sizes.items()]
            pytest.skip(f"no setting with {' or '.join(names)} is claimed")
        rows = [(0, 70), (57, 40), (61, 3), (200, 1)]
        for setting in found:
            self.run(setting, rows)

    @since(1, 0)
    def test_each_dtype_with_each_kv_format(self) -> None:
        """Check each claimed dtype with each KV format, for rows of one key and of many keys.

        The allowed error is twice that of naive attention in the same dtype, so sums and probabilities need its
        precision.
        """
        rows = [*ROWS, (130, 1), (290, 3), (0, 40)]
        lse = self.claims("lse")
        for dtype, _ in self.space.each("dtype"):
            for kv_format, setting in self.space.each("kv_format", dtype=dtype):
                self.run(setting, rows, lse=lse)
                assert kv_format == setting.kv_format

    @since(1, 0)
    def test_the_softmax_scale_is_the_layers(self) -> None:
        """Check that scores are multiplied by ``AttnSpec.scale``.

        None means dim_qk ** -0.5.  Neither dim_v nor a padded size counts.
        """
        for dim, setting in self.space.each("dim_qk", scale=None):
            self.run(setting)
            self.run(self.plain(dim_qk=dim, scale=0.37))

    @since(1, 0)
    def test_large_scores_do_not_overflow(self) -> None:
        """Check that scores of several hundred, positive and negative, give finite and exact results.

        A back end subtracts the greatest score before the exponential.
        """
        rows = [(0, 1), (1, 1), (2, 1), (17, 1), (0, 6), (21, 5)]
        lse = self.claims("lse")
        for _, setting in self.space.each("dtype"):
            for seed in (0, 1):
                results = self.run(setting, rows, q_size=80.0, seed=seed, lse=lse)
                _require_score(results[0], 150)

    @since(1, 0)
    def test_scores_that_rise_along_a_long_context(self) -> None:
        """Check thousands of keys whose scores rise or fall by hundreds, for every claimed block size.

        A running maximum must cover all keys.  Partial sums for a smaller maximum must be rescaled.
        """
        for block, setting in self.space.each("block"):
            blocks = 66 * block + 7
            n = min(max(620, blocks), LONGEST)
            rows = [(n, 1), (600, 3), (2, 1)]
            results = self.run(setting, rows, q_size=60.0, slope=6.0)
            _require_score(results[0], 500)

    @since(1, 0)
    def test_layers_of_several_kv_groups_share_a_step(self) -> None:
        """Check a step through layers of several KV groups, each of which has its own block table.

        Layers of one group may differ in heads, scale, sinks and soft cap.  A layer must not use data that a different
        layer has prepared in ``meta.work``.
        """
        first = self.plain()
        base = first.specs[0]
        ratios = self.space.facts["queries_per_kv"]
        ratio = ratios[0]
        changes: list[dict[str, Any]] = [{}, {"scale": 0.9}]
        changes.append({"heads": base.kv_heads * ratios[-1]})
        changes.append({"kv_heads": 1, "heads": ratio})
        changes.append({"kv_heads": 3, "heads": 3 * ratio})
        if self.claims("window"):
            changes += [{"window": 2}, {"window": 5}]
        if self.claims("sinks"):
            changes.append({"sinks": True})
        if self.claims("softcap"):
            changes.append({"softcap": 1.5})
        if self.claims("alibi"):
            changes.append({"alibi": slopes(base.heads)})
        specs = [replace(base, **fields) for fields in changes]
        for order in (specs, specs[::-1]):
            setting = replace(first, specs=tuple(order))
            if not self.space.serves(setting):
                pytest.skip("the plug-in serves no such mix of layers")
            self.run(setting, [(9, 1), (4, 1), (0, 7), (6, 3)])

    @since(1, 0)
    def test_steps_of_one_shape_over_other_blocks(self) -> None:
        """Check that a back end does not reuse the plan of an earlier step.

        The next step may have the same shape, but other rows, lengths and blocks in the same tensors.  The engine
        always uses the same tensor for the block table, and may reuse the memory of other metadata.
        """
        pairs = ((0, 2), (1, 3), (4, 5), (2, 0), (0, 2), (0, 1), (2, 3), (1, 0))
        for static in (False, True):
            world = World(self, self.plain(), 6, 30, static=static)
            seqs = [world.add(past) for past in (9, 9, 4, 5, 14, 9)]
            for number, (i, j) in enumerate(pairs):
                new = 1 if number < 5 else 3
                world.check([(seqs[i], new), (seqs[j], new)])

    @since(1, 0)
    def test_a_prompt_in_chunks_sees_what_came_before(self) -> None:
        """Check a prompt in chunks, whose queries see all cached tokens (the causal mask is aligned bottom-right)."""
        world = World(self, self.plain(), 3, 40)
        a = world.add()
        b = world.add(3)
        news = [(5, 1), (1, 1), (7, 2), (2, 4), (1, 9), (9, 3)]
        for new_of_a, new_of_b in news:
            world.check([(a, new_of_a), (b, new_of_b)])

    # ---- what is read --------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_lengths_of_decode_rows_come_from_the_device(self) -> None:
        """Check decode rows whose ``host_kv_len`` is too large.

        It is an upper bound: a back end may size a launch by it, but not the softmax.
        """
        for ahead in (1, 3, 9):
            rows = [(5, 1), (15, 1), (0, 1), (2, 4)]
            self.run(self.plain(), rows, ahead=ahead)

    @since(1, 0)
    def test_nan_of_a_failed_row_stays_in_its_blocks(self) -> None:
        """Check that NaN in slots after the end of a row, and in blocks that the row does not own, has no effect.

        The engine ends a row whose numbers become NaN, and gives its blocks to other rows.  A back end must not
        multiply the contents of such slots, not even by 0.
        """
        for block, setting in self.space.each("block"):
            decode = [(block, 1), (block + 1, 1), (2 * block - 1, 1), (2, 1)]
            chunks = [(0, 3), (block, 2), (5, 1)]
            self.run(setting, decode, poison=NAN)
            self.run(setting, chunks, poison=NAN)

    @since(1, 0)
    def test_the_null_block_is_never_multiplied(self) -> None:
        """Check that NaN in the null block has no effect on decode rows, prompts and chunks.

        Rows that failed, ended or pad a step write to the null block.  The block table names it in place of blocks that
        a window has left.  The first tile of a chunk's keys may begin before its window.
        """
        self._check_unlike_rows([1, 2, 2, 1, 3], poison=NAN, null_nan=True)
        if not self.claims("window"):
            return
        invariants = [False]
        if self.claims("batch_invariant"):
            invariants.append(True)
        for block, setting in self.windowed_settings():
            rows = [(70, 1), (3 * block, 1), (2 * block + 1, 5), (90, 20), (0, 40)]
            for window in (block + 1, 23):
                windowed = _windowed(setting, window)
                for invariant in invariants:
                    self.run(windowed, rows, poison=NAN, null_nan=True, batch_invariant=invariant)

    def _check_unlike_rows(self, news: Sequence[int], **options: Any) -> None:
        """Check two steps with live rows, a row that has ended and a row without a block.

        ``news`` has the number of new tokens of each row.  ``options`` has keyword arguments of ``World``.
        """
        world = World(self, self.plain(), 5, 20, **options)
        seqs = [world.add(6)]
        seqs.append(world.add(5, ended=True))
        seqs.append(world.add_null())
        seqs.append(world.add(9))
        seqs.append(world.add(0))
        rows = list(zip(seqs, news, strict=True))
        world.check(rows)
        world.check(rows)

    @since(1, 0)
    def test_ended_and_padded_rows_disturb_nobody(self) -> None:
        """Check that rows that have ended, and rows without a block, do not change other rows.

        Both write to the null block, and their results are dropped.
        """
        for new in (1, 4):
            self._check_unlike_rows([1, new, new, 1, new])

    # ---- features ------------------------------------------------------------------------------------------------

    @since(1, 0)
    def test_a_window_counts_the_query_itself(self) -> None:
        """Check that a query sees the last ``window`` positions, its own position included.

        The block table names the null block in place of blocks that have left the window.
        """
        self.need("window")
        for block, setting in self.windowed_settings():
            windows = {1, 2, block - 1, block, block + 1, 2 * block + 1, 10_000}
            for window in sorted(windows - {0}):
                rows = [(0, 1), (window % 50, 1), (3 * block, 1), (3 * block + 1, 2), (0, block + 2), (2 * block, 5)]
                self.run(_windowed(setting, window), rows)

    @since(1, 3)
    def test_where_the_rotary_tables_have_a_token_says_nothing_of_what_it_sees(self) -> None:
        """Check that ``AttnMeta.position`` does not change the keys that a query sees: it only selects rows of
        rotary tables."""
        settings = [self.plain()]
        if self.claims("window"):
            with_window = self.plain(window=2)
            settings.append(_windowed(with_window, 6))
        for setting in settings:
            world = World(self, setting, len(ROWS), 60)
            world.position_offset = 1000
            world.check(world.add_rows(ROWS))

    @since(1, 0)
    def test_sinks_take_probability_and_give_nothing(self) -> None:
        """Check that exp(sinks[head]) is added to the softmax denominator of every query of the head."""
        self.need("sinks")
        for ratio in self.space.facts["queries_per_kv"]:
            for fields in self.with_windows():
                setting = self.plain(queries_per_kv=ratio, sinks=True, **fields)
                self.run(setting)

    @since(1, 0)
    def test_a_softcap_bends_the_scaled_scores(self) -> None:
        """Check that scores are softcap * tanh(scale * q.k / softcap), before the mask and the sink."""
        self.need("softcap")
        for softcap in (0.5, 5.0, 50.0):
            for size in (1.0, 30.0):
                self.run(self.plain(softcap=softcap), q_size=size)

    @since(1, 4)
    def test_slopes_lower_scores_by_the_distance_of_a_key(self) -> None:
        """Check that slopes[head] * (key position - query position) is added after scale and soft cap (ALiBi).

        The rows have distant keys, chunks and windows.  Another layer of the same group has no slopes.
        """
        self.need("alibi")
        rows = [(0, 1), (37, 1), (0, 9), (21, 5), (150, 1), (140, 12)]
        for ratio in self.space.facts["queries_per_kv"]:
            for fields in self.with_windows():
                setting = self.plain(queries_per_kv=ratio, **fields)
                base = setting.specs[0]
                steep_first = slopes(base.heads)
                steep = replace(base, alibi=steep_first)
                gentle = replace(base, alibi=steep_first[::-1])
                self.run(replace(setting, specs=(steep, base, gentle)), rows)

    @since(1, 0)
    def test_values_in_the_keys_are_their_first_elements(self) -> None:
        """Check that the values are the first dim_v elements of the keys where the cache stores no values
        (``v_in_k``)."""
        self.need("v_in_k")
        facts = self.space.facts
        tested = 0
        for dim_v in facts["dim_v"]:
            sizes = [dim_qk for dim_qk in facts["dim_qk"] if dim_qk >= dim_v]
            for dim_qk in sizes[:4]:
                setting = self.space.plain(dim_qk=dim_qk, dim_v=dim_v, v_in_k=True)
                if setting is not None:
                    self.run(setting)
                    tested += 1
        assert tested, "v_in_k is claimed for no pair of head sizes with dim_v <= dim_qk"

    @since(1, 0)
    def test_the_same_step_gives_the_same_bits(self) -> None:
        """Check that a repeated step gives the same bits, whatever steps ran in between, if ``repeatable`` is
        claimed."""
        self.need("repeatable")
        for _, setting in self.space.each("dtype"):
            world, rows = self._many_rows(setting, False)
            expected = self._outputs(world, rows)
            for _ in range(5):
                self._outputs(world, rows[::2])
                repeated = self._outputs(world, rows)
                for i in range(len(rows)):
                    _assert_same_bits(repeated[i], expected[i], i, "the step was repeated")

    @since(1, 0)
    def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(self) -> None:
        """Check that output bits of a row do not depend on the other rows of its step (``batch_invariant``).

        The row is alone, beside other rows, in another order, and in chunks of any size.
        """
        self.need("batch_invariant")
        for _, setting in self.space.each("dtype"):
            world, rows = self._many_rows(setting, True)
            expected = self._outputs(world, rows, world.check)
            every = range(len(rows))
            alone = [[i] for i in every]
            for chosen in (*alone, every[::2], every[::-1]):
                outputs = self._outputs(world, [rows[i] for i in chosen])
                for at, i in enumerate(chosen):
                    _assert_same_bits(outputs[at], expected[i], i, f"beside {len(chosen) - 1} others")
            for size in (1, 16, 64):
                for i, (seq, new) in enumerate(rows):
                    single_tokens = size == 1 and new >= 20  # too many steps
                    if new == 1 or single_tokens:
                        continue
                    sizes = [min(size, new - start) for start in range(0, new, size)]
                    out = self._in_chunks(world, seq, sizes)
                    _assert_same_bits(out, expected[i], i, f"it comes in chunks of {size}")

    def _in_chunks(self, world: World, seq: WorldSeq, sizes: Sequence[int]) -> Tensor:
        """Return the outputs [n, heads, dim_v] of a sequence whose next tokens come in steps of ``sizes`` tokens.

        The length of the sequence is restored.
        """
        length = seq.length
        parts = []
        for n in sizes:
            (result,) = world.step([(seq, n)])
            parts.append(result.out)
        seq.length = length
        return torch.cat(parts)

    def _many_rows(self, setting: Setting, invariant: bool) -> tuple[World, Rows]:
        """Return a test cache and the rows of a step, (sequence, new tokens): short and long, with one and several new
        tokens.

        ``invariant`` demands a back end whose results do not depend on the batch.
        """
        shapes = [(2, 1), (700, 1), (30, 1), (333, 1), (0, 5), (64, 17), (0, 130), (250, 40)]
        world = World(self, setting, len(shapes), 720, batch_invariant=invariant)
        return world, world.add_rows(shapes)

    def _outputs(self, world: World, rows: Rows, step: Any = None) -> dict[int, Tensor]:
        """Run a step, and return its outputs [n, heads, dim_v] by index in ``rows``.

        The lengths of the sequences are restored.
        """
        lengths = [seq.length for seq, _ in rows]
        run = step or world.step
        (result, *_) = run(rows)
        for (seq, _), length in zip(rows, lengths, strict=True):
            seq.length = length
        decode = [i for i, (_, new) in enumerate(rows) if new == 1]
        longer = [i for i, (_, new) in enumerate(rows) if new != 1]
        found = {}
        for i, place in zip(decode + longer, result.places, strict=True):
            end = place.first + place.n
            found[i] = result.out[place.first : end]
        return found

    # ---- layout and graphs -----------------------------------------------------------------------------------------

    @since(1, 0)
    def test_the_layout_is_that_of_one_block(self) -> None:
        """Check that the cache layout describes a single block, for which the engine allocates [blocks, *shape] per
        tensor."""
        for block, setting in self.space.each("block"):
            ctx = self.attention_context(setting, 2, 2 * block, False)
            backend = self.build(ctx)
            layout = backend.layout(setting.specs[0], backend.ctx.kv_format, block)
            assert layout.block == block, f"the layout for blocks of {block} tokens has block={layout.block}"
            assert layout.tensors, "the layout has no tensors: expected at least one for the keys"
            for name, tensor in layout.tensors.items():
                known = tensor.dtype in DTYPE_BYTES and hasattr(torch, tensor.dtype)
                assert known, f"{name!r}: unknown dtype {tensor.dtype!r}"

    @since(1, 0)
    def test_a_captured_step_replays_on_new_data(self) -> None:
        """Check that a decode step or a mixed step that was captured in a CUDA graph gives exact results for new data.

        This is the trait ``graph``.  The step is captured once with its ``GraphKey``.  New metadata is copied into the
        same tensors, and ``plan`` runs before each replay.  Captures of two sizes take turns.  On a CPU the step runs
        again, with the host arrays of the capture.
        """
        graph = self.spec.traits.get("graph", "none")
        assert graph in ("none", "decode", "mixed"), f"traits graph={graph!r}: expected none, decode or mixed"
        if graph == "none":
            pytest.skip("not claimed: graph")
        for _, setting in self.space.each("dtype"):
            attention_graph.check_decode(self, setting)
            if graph == "mixed":
                attention_graph.check_mixed(self, setting)


def _windowed(setting: Setting, window: int) -> Setting:
    """Return a one-layer copy of a setting with another sliding window, in tokens."""
    (spec, *_) = setting.specs
    windowed = replace(spec, window=window)
    return replace(setting, specs=(windowed,))


def _require_score(result: LayerResult, least: float) -> None:
    """Fail if every score of a step is at most ``least``, because then the test would prove nothing."""
    largest = max(exact.largest for exact in result.exact)
    seen = Seen(large=int(largest > least))
    seen.require(large=1)


def _assert_same_bits(out: Tensor, expected: Tensor, row: int, how: str) -> None:
    """Fail unless two outputs of a row are bitwise equal; ``how`` describes the difference of their steps in the
    message."""
    differ = int((out != expected).sum())
    assert not differ, f"row {row}: {differ} of {out.numel()} elements of out have other bits when {how}"
