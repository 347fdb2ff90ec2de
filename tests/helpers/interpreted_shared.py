"""Decode rows that share prefixes, under Triton's interpreter, against float64; run by test_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shared_prefixes import Case, table_of

from minivllm.core.interfaces.attention import AttnSpec, GraphKey
from minivllm.plugins.attention import triton_decode, triton_shared
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV

torch.set_num_threads(1)
BLOCK = 16
MOST = 2e-5


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch):
    """Share from 64 tokens on, in chunks of at least 32, because the interpreter is slow."""
    monkeypatch.setattr(triton_shared, "LEAST_TOKENS", 64)
    monkeypatch.setattr(triton_shared, "LEAST_CHUNK", 32)
    monkeypatch.setattr(triton_shared, "TILE", triton_shared.Tile(programs=16))
    monkeypatch.setattr(triton_decode, "PROGRAMS", 20)


def spec_of(group=2, kv_heads=2, dim=16, **more):
    return AttnSpec(group * kv_heads, kv_heads, dim, dim, **more)


def case_of(rows, spec=None, block=BLOCK, ends=(), **more):
    """Return the case of rows (shared blocks, number of blocks); ``ends`` has the tokens in each row's last block."""
    table, slots = table_of(rows, seed=len(rows))
    ends = ends or [1 + 5 * i % block for i in range(len(rows))]
    lengths = [(n - 1) * block + end for (_, n), end in zip(rows, ends, strict=True)]
    return Case(spec or spec_of(), block, lengths, table, slots, **more)


PREFIX = list(range(1, 12))
OTHER = list(range(21, 27))
MIXED = [
    (PREFIX, 12),
    (OTHER, 9),
    (PREFIX, 14),
    ([], 3),
    (OTHER, 7),
    (PREFIX, 12),
    (OTHER, 8),
    (PREFIX, 13),
    (OTHER, 7),
]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_rows_of_several_prefixes_in_any_order_read_them_once(group):
    shared = case_of(MIXED, spec_of(group)).check(MOST)
    # 11 blocks of 16 tokens are 176, in tiles of 32 keys; 6 are 96
    assert shared == [160 if n[0] is PREFIX else 96 if n[0] is OTHER else 0 for n in MIXED]


@pytest.mark.parametrize(
    "more", [{"sinks": True}, {"softcap": 2.0}, {"alibi": (0.5, 0.1, 0.02, 0.3)}, {"scale": 0.7}], ids=str
)
def test_sinks_caps_and_slopes_count_once(more):
    assert max(case_of(MIXED, spec_of(**more)).check(MOST)) == 160


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_heads_of_each_size(dim):
    assert max(case_of(MIXED[:6:2] + MIXED[5:8:2] + MIXED[3:4], spec_of(kv_heads=1, dim=dim)).check(MOST)) == 160


def test_values_in_the_keys():
    spec = AttnSpec(4, 1, 32, 16, v_in_k=True)
    assert max(case_of(MIXED, spec).check(MOST)) == 160


@pytest.mark.parametrize("block", [4, 24, 64])
def test_blocks_of_each_size(block):
    n = -(-150 // block)
    prefix = list(range(1, n + 1))
    rows = [(prefix, n + 1), (prefix, n + 2), ([], 2), (prefix, n + 1), (prefix, n + 3)]
    assert max(case_of(rows, block=block).check(MOST)) == n * block // 32 * 32


@pytest.mark.parametrize("fmt, dim", [(Fp8KV(), 16), (Int8KV(), 16), (Int8KV(), 18)], ids=["fp8", "int8", "odd"])
def test_keys_and_values_of_one_byte(fmt, dim):
    case = case_of(MIXED, spec_of(dim=dim), fmt=fmt)
    assert max(case.check(1e-4)) == 160


def test_half_precision():
    assert max(case_of(MIXED, dtype="float16").check(4e-3)) == 160


def test_a_different_block_in_the_middle_ends_the_prefix_of_its_row():
    rows = [*MIXED]
    rows[2] = ([*PREFIX[:7], 40, *PREFIX[8:]], 14)
    shared = case_of(rows).check(MOST)
    assert shared[2] == shared[0] == 96, "the group has the prefix of all its members: 7 blocks"


def test_null_blocks_are_not_shared():
    rows = [([*PREFIX[:6], 0, *PREFIX[7:]], 12)] * 5
    assert case_of(rows).check(MOST) == [96] * 5
    rows = [([0, *PREFIX[1:]], 12)] * 5
    assert case_of(rows).check(MOST) == [0] * 5


def test_few_rows_and_short_prefixes_are_read_alone():
    rows = [(PREFIX, 12)] * 3 + [(OTHER[:3], 7)] * 5 + [([], 4)]
    assert case_of(rows).check(MOST) == [0] * 9


def test_the_block_that_a_step_writes_is_not_shared():
    rows = [(PREFIX, 11)] * 4 + [(PREFIX, 12)]
    assert case_of(rows, ends=[1, 16, 3, 16, 2]).check(MOST) == [160] * 5
    rows = [(PREFIX, 6)] * 4 + [(PREFIX, 12)]
    assert case_of(rows, ends=[16] * 5).check(MOST) == [64] * 5, "five whole blocks, in tiles of 32"


def test_the_depth_that_saves_most_is_shared():
    long = [(PREFIX, 13)] * 6
    short = [([*PREFIX[:4], 50 + i], 13) for i in range(4)]
    shared = case_of(long + short).check(MOST)
    assert shared == [160] * 6 + [64] * 4


def test_random_groups_give_the_answer_of_the_definition():
    for seed in range(4):
        random = np.random.default_rng(seed)
        prefixes = [list(range(1 + 40 * i, 1 + 40 * i + random.integers(1, 20))) for i in range(3)]
        rows = []
        for _ in range(random.integers(4, 12)):
            prefix = prefixes[random.integers(3)]
            cut = random.integers(0, len(prefix) + 1) if random.random() < 0.3 else len(prefix)
            rows.append((prefix[:cut], int(cut + random.integers(1, 5))))
        ends = random.integers(1, BLOCK + 1, len(rows)).tolist()
        case_of(rows, spec_of(int(random.integers(1, 5))), ends=ends).check(MOST)


@pytest.mark.parametrize("programs, lines", [(2, 16), (2, 64), (40, 16), (40, 64)])
def test_any_cut_of_prefixes_gives_the_same_answer(programs, lines, monkeypatch):
    monkeypatch.setattr(triton_shared, "TILE", triton_shared.Tile(lines, 32, 4, 3, programs))
    rows = [(PREFIX, 12), (OTHER, 7)] * 6
    case = case_of(rows, spec_of(4, kv_heads=2))
    assert case.check(MOST) == [160, 96] * 6


def test_rows_that_fill_the_device_are_joined_by_the_decode_kernel(monkeypatch):
    """Rows that are not cut have no merge, so the decode kernel joins the chunks of their prefixes."""
    monkeypatch.setattr(triton_decode, "PROGRAMS", 4)
    case = case_of(MIXED, spec_of(sinks=True))
    assert max(case.check(MOST)) == 160
    (work,) = (work for key, work in case.last.work.items() if key[0] == "work")
    assert not work.cut


def test_a_plan_serves_other_rows_over_other_blocks():
    """A captured step has the addresses of its tensors only: rows leave, and slots get other blocks."""
    case = case_of(MIXED)
    key = GraphKey("decode", len(MIXED), len(MIXED), 400, shared=True)
    case.check(MOST, key)
    case.table[case.slots[0]] = case.table[case.slots[1]]
    case.table[case.slots[2], :3] = 0
    case.lengths[0], case.lengths[7] = case.lengths[1] - 3, 40
    shared = case.check(MOST, key)
    assert shared[0] == shared[1] == 96 and shared[2] == shared[7] == 0


def test_rows_without_a_key_of_shared_steps_have_the_bits_of_the_option_off():
    case = case_of(MIXED)
    for a, b in zip(case.run(case.on, GraphKey()), case.run(case.off, GraphKey(shared=True)), strict=True):
        assert torch.equal(a, b)
    assert case.off.shares_from is None
