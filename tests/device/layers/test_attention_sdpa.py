"""How sdpa cuts a step into batches; what any back end must do is in the conformance kit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.kvformat import KVLayout, TensorSpec
from minivllm.errors import PluginError
from minivllm.plugins.attention import sdpa
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.testing import AttentionConformance
from minivllm.testing.attention_cases import lives, rows_of, settle
from minivllm.testing.attention_world import World, make_meta
from minivllm.testing.session import run

SUITE = AttentionConformance()
SUITE.plugin, SUITE.device = "sdpa", "cpu"


def test_any_cut_into_batches_gives_the_answer():
    """Every limit is tiny, so that rows are split and joined in all the ways that large steps are."""
    settings = [
        SUITE.plain(block=block, window=window, sinks=sinks, dim_qk=8)
        for block in (1, 4, 16)
        for window in (None, 1, 4, 7)
        for sinks in (False, True)
    ]

    @SUITE.for_all(100, st.data(), st.sampled_from(settings))
    def _(data, setting):
        plan = data.draw(lives(setting.block, 60))
        world = World(SUITE, setting, len(plan), 60)
        world.backend.limits = sdpa.Limits(gather=3000, pairs=40, batch_bytes=500, batch_pairs=20)
        seqs = settle(world, plan)
        for step in range(len(plan[0].news)):
            world.check(rows_of(plan, seqs, step), lse=data.draw(st.booleans()))


@pytest.mark.gpu
def test_sdpa_conforms_on_a_gpu():
    failed = [(o.test, o.text) for o in run([("attention", "sdpa")], device="cuda") if o.status == "failed"]
    assert not failed


def test_rows_of_very_different_length_are_not_padded_to_the_longest():
    lens = np.array([20] * 60 + [2000] + [30] * 3)
    groups = sdpa.split_by_length(lens, 1024, sdpa.GPU)
    assert sorted(i for rows, _ in groups for i in np.arange(64)[rows]) == list(range(64))
    assert sum(len(np.arange(64)[rows]) * longest for rows, longest in groups) < 2 * lens.sum()
    assert len(sdpa.split_by_length(np.full(64, 300), 1024, sdpa.GPU)) == 1


@pytest.mark.parametrize("limits", [sdpa.CPU, sdpa.GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("low", [10, 1000, 1499])
def test_no_batch_gathers_more_than_the_limit_unless_a_row_does(limits, low):
    lens, token_bytes = np.random.default_rng(0).integers(low, 1500, 512), 8 * 256 * 2
    groups = sdpa.split_by_length(lens, token_bytes, limits)
    for rows, most in groups:
        mine = lens[rows]
        assert mine.max() <= most and (len(mine) == 1 or len(mine) * most * token_bytes <= limits.gather)
    assert sorted(i for rows, _ in groups for i in np.arange(512)[rows]) == list(range(512))


def test_rows_without_a_length_or_a_query_give_finite_numbers_and_disturb_nobody():
    """More than the contract asks: no length at all on the device, and rows that bring no token."""
    world = World(SUITE, SUITE.plain(), 4, 12)
    seqs = [world.add(n) for n in (5, 5, 9, 9)]
    rows = [(seqs[0].slot, 1, 5), (seqs[1].slot, 1, 5), (seqs[2].slot, 0, 9), (seqs[3].slot, 4, 9)]
    meta = make_meta(rows, world.table, world.block)
    meta.kv_len = meta.kv_len.clone()
    meta.kv_len[0, 1] = 0
    meta.table[0, seqs[1].slot] = 0
    (layer,) = world.layers
    q = torch.randn(6, layer.spec.heads, layer.spec.dim_qk)
    out = torch.full((6, layer.spec.heads, layer.spec.dim_v), torch.nan)
    world.backend.plan(meta, GraphKey())
    world.backend.forward(layer, q, meta, out)
    assert out.isfinite().all()
    for i, new, part in ((0, 1, slice(0, 1)), (3, 4, slice(2, 6))):
        alone = torch.empty_like(out[part])
        meta = make_meta([(seqs[i].slot, new, seqs[i].length)], world.table, world.block)
        world.backend.forward(layer, q[part], meta, alone)
        assert (out[part] - alone).abs().max() < 1e-5


def test_a_layout_that_is_not_token_by_token_is_refused():
    class PerBlock(Fp32):
        def layout(self, spec, block):
            return KVLayout(block, {"k_scale": TensorSpec((1,), "float32")})

    setting = SUITE.plain()
    backend = SUITE.build(SUITE.attention_context(setting, 2, 8, False))
    with pytest.raises(PluginError, match="k_scale"):
        backend.layout(setting.specs[0], PerBlock(), 4)
