"""Attention back ends that read memory which they must not read, or differ from the definition, with one fault each."""

from __future__ import annotations

from functools import partial

import torch

from .attention import RowByRow, spec

SEAM = "attention"
ANSWER = "test_any_steps_give_the_answer_of_the_definition"
BORDER = "test_rows_end_at_either_side_of_a_block_border"
FAULTS = {
    "OffByOneAtBlockEnd": (ANSWER, BORDER),
    "HeadsModulo": (ANSWER, "test_each_number_of_query_heads_for_a_kv_head"),
    "HeadZeroOnItsFastPath": ("test_common_sizes_have_no_answer_of_their_own",),
    "ReadsToBlockEnd": (ANSWER, BORDER, "test_nan_of_a_failed_row_stays_in_its_blocks"),
    "WindowTooLong": ("test_a_window_counts_the_query_itself", ANSWER),
    "WindowOnlyInDecode": ("test_a_window_counts_the_query_itself", ANSWER),
    "HostLengths": ("test_lengths_of_decode_rows_come_from_the_device",),
    "TopLeft": (ANSWER, "test_a_prompt_in_chunks_sees_what_came_before"),
    "HalfSoftmax": (ANSWER, "test_each_dtype_with_each_kv_format"),
    "SumsInBfloat16": ("test_each_dtype_with_each_kv_format",),
    "Overflows": ("test_large_scores_do_not_overflow",),
    "RowForSlot": (ANSWER, BORDER),
    "GroupZero": ("test_layers_of_several_kv_groups_share_a_step",),
    "ScaleOfValues": ("test_the_softmax_scale_is_the_layers",),
    "DefaultScaleOnly": ("test_the_softmax_scale_is_the_layers", ANSWER),
    "FailsOnNullRows": ("test_ended_and_padded_rows_disturb_nobody",),
    "ZeroTimesNan": ("test_nan_of_a_failed_row_stays_in_its_blocks",),
    "SinkNotInDenominator": ("test_sinks_take_probability_and_give_nothing",),
    "SoftcapIgnored": ("test_a_softcap_bends_the_scaled_scores",),
    "SlopesIgnored": ("test_slopes_lower_scores_by_the_distance_of_a_key",),
    "SlopesFromTheTokensOfTheStep": ("test_slopes_lower_scores_by_the_distance_of_a_key",),
    "SoftcapBeforeScale": ("test_a_softcap_bends_the_scaled_scores",),
    "LastElementsAsValues": ("test_values_in_the_keys_are_their_first_elements",),
    "LseInBase2": (
        "test_lse_is_the_logarithm_of_the_denominator",
        "test_answers_over_parts_of_a_context_merge_by_their_lse",
    ),
    "LseWithoutSink": ("test_lse_is_the_logarithm_of_the_denominator",),
    "NeverTheSame": ("test_the_same_step_gives_the_same_bits",),
    "SplitsByBatch": ("test_a_rows_bits_do_not_depend_on_the_rows_beside_it",),
}
RIGHT = ()
spec = partial(spec, module=__name__)


# ---- what is read ---------------------------------------------------------------------------------------------------


class OffByOneAtBlockEnd(RowByRow):
    """The last token of a block is looked for in the next one."""

    spec = spec("OffByOneAtBlockEnd")

    def slots(self, layer, meta, row, positions):
        blocks = meta.table[layer.group, meta.slots[row], (positions + 1) // meta.block].long()
        return blocks * meta.block + positions % meta.block


class HeadsModulo(RowByRow):
    spec = spec("HeadsModulo")

    def kv_head(self, head, group, spec):
        return head % spec.kv_heads


class HeadZeroOnItsFastPath(RowByRow):
    """Reads the first KV head where tiles of 32 tokens lie in a block."""

    spec = spec("HeadZeroOnItsFastPath")

    def kv_head(self, head, group, spec):
        fast = self.ctx.block % 32 == 0 and spec.dim_qk in (64, 128)
        return 0 if fast else super().kv_head(head, group, spec)


class ReadsToBlockEnd(RowByRow):
    """Decode rows see their last block to its end."""

    spec = spec("ReadsToBlockEnd")

    def length(self, layer, meta, row):
        length = super().length(layer, meta, row)
        return -(-length // meta.block) * meta.block if row < meta.decode_rows else length


class WindowTooLong(RowByRow):
    """The query itself is not counted."""

    spec = spec("WindowTooLong")

    def hidden(self, spec, n, length):
        key, query = torch.arange(length), torch.arange(length - n, length)[:, None]
        return (key > query) | (key < query - (spec.window or length))


class WindowOnlyInDecode(RowByRow):
    """All queries of a chunk see the keys that the first query sees."""

    spec = spec("WindowOnlyInDecode")

    def hidden(self, spec, n, length):
        key, query = torch.arange(length), torch.arange(length - n, length)[:, None]
        return (key > query) | (key <= length - n - (spec.window or length))


class HostLengths(RowByRow):
    spec = spec("HostLengths")

    def length(self, layer, meta, row):
        return int(meta.host_kv_len[layer.group, row])


class TopLeft(RowByRow):
    """The first query of a chunk sees one key (top-left alignment of the mask)."""

    spec = spec("TopLeft")

    def hidden(self, spec, n, length):
        if n == 1:
            return super().hidden(spec, n, length)
        key, query = torch.arange(length), torch.arange(n)[:, None]
        return (key > query) | (key <= query - (spec.window or length))


class RowForSlot(RowByRow):
    """Looks for row r in row r of the table."""

    spec = spec("RowForSlot")

    def slots(self, layer, meta, row, positions):
        blocks = meta.table[layer.group, row, positions // meta.block].long()
        return blocks * meta.block + positions % meta.block


class GroupZero(RowByRow):
    """All KV groups read the table of the first."""

    spec = spec("GroupZero")

    def slots(self, layer, meta, row, positions):
        blocks = meta.table[0, meta.slots[row], positions // meta.block].long()
        return blocks * meta.block + positions % meta.block


class ZeroTimesNan(RowByRow):
    """Masks the keys behind a row's end only by their scores, so their values are still multiplied by 0."""

    spec = spec("ZeroTimesNan")

    def keys(self, layer, meta, row, length):
        return super().keys(layer, meta, row, -(-length // meta.block) * meta.block)

    def hidden(self, spec, n, length):
        hidden = super().hidden(spec, n, length)
        behind = torch.ones(n, -(-length // self.ctx.block) * self.ctx.block - length, dtype=torch.bool)
        return torch.cat([hidden, behind], dim=1)


class FailsOnNullRows(RowByRow):
    """Takes the null block for a fault."""

    spec = spec("FailsOnNullRows")

    def length(self, layer, meta, row):
        if int(meta.table[layer.group, meta.slots[row], 0]) == 0 and layer.spec.window is None:
            raise RuntimeError(f"row {row} has no blocks")
        return super().length(layer, meta, row)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


class HalfSoftmax(RowByRow):
    spec = spec("HalfSoftmax")

    def softmax(self, s, sink):
        p, lse = super().softmax(s, sink)
        return p.half().float(), lse


class SumsInBfloat16(RowByRow):
    """Adds weighted values in bfloat16.  It does not claim float32, where the error would be obvious."""

    spec = spec("SumsInBfloat16", dtype={"bfloat16"}, kv_format={"bf16"})

    def mixed(self, p, v, dtype):
        total = torch.zeros(len(p), v.shape[1], dtype=dtype)
        for i in range(len(v)):
            total += (p[:, i, None] * v[i]).to(dtype)
        return total


class Overflows(RowByRow):
    """exp of the scores as they are."""

    spec = spec("Overflows")

    def softmax(self, s, sink):
        e = s.exp()
        total = e.sum(-1, keepdim=True) + (0 if sink is None else sink.exp())
        return e / total, total.log()[:, 0]


class ScaleOfValues(RowByRow):
    """dim_v ** -0.5 where dim_qk ** -0.5 is meant."""

    spec = spec("ScaleOfValues")

    def scored(self, q, k, spec):
        return super().scored(q * (spec.dim_qk / spec.dim_v) ** (0.5 if spec.scale is None else 0), k, spec)


class DefaultScaleOnly(RowByRow):
    spec = spec("DefaultScaleOnly")

    def scored(self, q, k, spec):
        return super().scored(q * (spec.dim_qk**-0.5 / spec.softmax_scale), k, spec)


class SinkNotInDenominator(RowByRow):
    spec = spec("SinkNotInDenominator")

    def softmax(self, s, sink):
        return super().softmax(s, None)


class SoftcapIgnored(RowByRow):
    spec = spec("SoftcapIgnored")

    def scored(self, q, k, spec):
        return q @ k.T * spec.softmax_scale


class SlopesIgnored(RowByRow):
    spec = spec("SlopesIgnored")

    def ahead(self, n, length):
        return torch.zeros(n, length)


class SlopesFromTheTokensOfTheStep(RowByRow):
    """Distances are bounded by the step's tokens: right for whole prompts."""

    spec = spec("SlopesFromTheTokensOfTheStep")

    def ahead(self, n, length):
        return super().ahead(n, length).clamp(min=-max(n, 2) + 1)


class SoftcapBeforeScale(RowByRow):
    spec = spec("SoftcapBeforeScale")

    def scored(self, q, k, spec):
        s = q @ k.T
        return (s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)) * spec.softmax_scale


class LastElementsAsValues(RowByRow):
    spec = spec("LastElementsAsValues")

    def values(self, v, spec):
        return v[..., -spec.dim_v :]


class LseInBase2(RowByRow):
    spec = spec("LseInBase2")

    def softmax(self, s, sink):
        p, lse = super().softmax(s, sink)
        return p, lse * 1.4426950408889634


class LseWithoutSink(RowByRow):
    spec = spec("LseWithoutSink")

    def softmax(self, s, sink):
        return super().softmax(s, sink)[0], s.logsumexp(-1)


class NeverTheSame(RowByRow):
    """The order of a sum is another one each time, as with atomic additions."""

    spec = spec("NeverTheSame")
    calls = 0

    def mixed(self, p, v, dtype):
        self.calls += 1
        order = torch.randperm(len(v), generator=torch.Generator().manual_seed(self.calls))
        return p[:, order] @ v[order]


class SplitsByBatch(RowByRow):
    """A small batch has its contexts cut into parts, a large one has not."""

    spec = spec("SplitsByBatch")

    def forward(self, layer, q, meta, out, lse=None):
        self.parts = 1 if len(meta.host_q_len) > 2 else 3
        super().forward(layer, q, meta, out, lse)

    def mixed(self, p, v, dtype):
        return sum(a @ b for a, b in zip(p.chunk(self.parts, 1), v.chunk(self.parts, 0), strict=True))
