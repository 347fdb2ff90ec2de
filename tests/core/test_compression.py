"""KV compression in the engine's tables: any order of events, planted faults, and refused requests."""

from __future__ import annotations

import numpy as np
import pytest
from compression_machine import CompressionMachine, PressureMachine, SummedMachine, drive

from minivllm.core.engine import publication
from minivllm.core.engine.blocks import NO_BLOCKS, BlockPool
from minivllm.core.engine.cache import KVCache
from minivllm.core.engine.compaction import Compaction
from minivllm.core.engine.compression import Compression
from minivllm.core.engine.planner import Planner
from minivllm.core.engine.slots import Slots
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Guide
from minivllm.errors import EngineDeadError, RequestError
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.strategy.beam import Beam
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

FAULTS = {}
READS = ("temperature", "kv_budget", "beam_width")


def fault(cls):
    """Return a decorator for a method of ``cls``.

    The decorated function replaces the method, and gets it as first argument.
    """

    def plant(fn):
        FAULTS[fn.__name__] = (cls, fn.__doc__.split("``")[1], fn, fn.__doc__)
        return fn

    return plant


@fault(KVCache)
def a_compressed_block_is_published_under_the_uncompressed_key(real, self, compactions):
    """In ``compact``, the row continues to publish its blocks."""
    before = {one.slot: int(self.slots.prefix_published[one.slot]) for one in compactions}
    real(self, compactions)
    for slot, published in before.items():
        self.slots.prefix_published[slot] = min(published, int(self.slots.blocks[0, slot]) - 1)


@fault(KVCache)
def blocks_are_free_before_the_device_has_read_them(real, self, compactions):
    """In ``compact``, the old blocks are released at once."""
    real(self, compactions)
    for one in compactions:
        self.pools[one.group].release(one.retired)
        one.retired = NO_BLOCKS


@fault(KVCache)
def old_blocks_are_never_released(real, self):
    """In ``changes``, the blocks that a compressed row has left stay in use."""
    for one in self.compactions:
        one.retired = NO_BLOCKS
    return real(self)


@fault(KVCache)
def kept_tokens_move_into_a_cached_prefix(real, self, slot, keep):
    """In ``to_compact``, a published block counts as the row's own."""
    found = real(self, slot, keep)
    for one in found:
        one.own[:] = self.pools[one.group].ref[one.blocks[: len(one.own)]] == 1
    return found


@fault(KVCache)
def kept_tokens_move_into_a_block_of_another_branch(real, self, slot, keep):
    """In ``to_compact``, a block that two rows share counts as the row's own."""
    found = real(self, slot, keep)
    for one in found:
        one.own[:] = self.pools[one.group].key[one.blocks[: len(one.own)]] == 0
    return found


@fault(KVCache)
def the_device_reads_one_block_less(real, self):
    """In ``changes``, the last source is named twice, in place of the first."""
    found = real(self)
    if "sources" in found and len(found["sources"]) > 1:
        found["sources"] = np.roll(found["sources"], 1)
    return found


@fault(KVCache)
def a_compression_of_a_preempted_row_is_sent(real, self, slot):
    """In ``release``, the order of a compression stays for the next row of the slot."""
    kept = [one for one in self.compactions if one.slot == slot]
    real(self, slot)
    for one in kept:
        one.retired = NO_BLOCKS
    self.compactions += kept


@fault(Slots)
def a_row_that_returns_counts_as_compressed(real, self, seq):
    """In ``enter``, the number of dropped tokens of the slot's last row stays."""
    before = self.dropped[:, self.free[-1]].copy()
    slot = real(self, seq)
    self.dropped[:, slot] = before
    return slot


@fault(Compression)
def sums_have_no_first_chunk(real, self, s, slots, computed):
    """In ``_summed``, rows that begin their prompt are left out."""
    return real(self, s, slots, np.where(computed == 0, s.prompt[slots], computed))


@fault(Compression)
def a_step_goes_beyond_the_prompt_while_attention_is_added_up(real, self, s, rows, upto):
    """In ``upto``, only compressions end a step."""
    sums, self.sums = self.sums, False
    found = real(self, s, rows, upto)
    self.sums = sums
    return found


@fault(Compression)
def a_prompt_that_is_added_up_has_a_prefix_hit(real, self, request):
    """In ``bind``, no token of the prompt must be computed."""
    real(self, request)
    if self.sums and request.observed:
        request.observed = 1


@fault(Planner)
def a_step_goes_beyond_a_compression(real, self, run):
    """In ``need``, the row computes all missing tokens."""
    compression, self.compression = self.compression, None
    try:
        return real(self, run)
    finally:
        self.compression = compression


@fault(Sim)
def the_device_keeps_a_token_less(real, self, d):
    """In ``_compact``, the last kept place is not written."""
    before = self.kv[0].copy()
    real(self, d)
    g, slot, _, kept, _ = d.compact[-1].tolist()
    block, inside = self.table[g, slot, (kept - 1) // self.block], (kept - 1) % self.block
    if g == 0:
        self.kv[0][block, inside] = before[block, inside] + 1


@fault(Sim)
def a_row_keeps_tokens_of_the_row_before(real, self, j):
    """In ``_join``, the positions of the slot's last row stay."""
    held = dict(self.held)
    real(self, j)
    self.held = held


@fault(BlockPool)
def a_block_of_another_row_is_taken_under_pressure(real, self, blocks):
    """Let ``private_from`` count all blocks of a row as its own under pressure."""
    return 0


@fault(BlockPool)
def a_block_stays_in_the_prefix_cache_and_is_overwritten(real, self, blocks):
    """Let ``unpublish`` leave all blocks in the prefix cache under pressure."""


@fault(Slots)
def a_row_that_returns_forgets_its_compressions_under_pressure(real, self, seq):
    """Let ``enter`` lose the compressions recorded under pressure."""
    seq.compressions = {}
    return real(self, seq)


OF_SUMS = {  # faults that only rows can show whose attention is added up
    "sums_have_no_first_chunk",
    "a_step_goes_beyond_the_prompt_while_attention_is_added_up",
    "a_prompt_that_is_added_up_has_a_prefix_hit",
}


def plant(monkeypatch, name):
    cls, method, fn, _ = FAULTS[name]
    real = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda self, *args: fn(real, self, *args))


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_caught(name, monkeypatch):
    plant(monkeypatch, name)
    machine = PressureMachine if "pressure" in FAULTS[name][3] else CompressionMachine
    with pytest.raises(Exception) as caught:
        drive(1000, shrink=False, machine_of=SummedMachine if name in OF_SUMS else machine)
    message = f"{type(caught.value).__name__}: {caught.value}"
    print(f"{name}: {message.splitlines()[0][:160]}")
    assert not any(error in message for error in ("TypeError", "AttributeError", "NameError")), message


def test_compression_changes_no_token_of_the_simulated_device_and_loses_no_block():
    seen = drive(100)
    seen.require(compressed=1, preempted=1, forked=1, aborted=1, evicted=1, summed=50)


def test_compression_under_pressure_changes_no_token_of_the_simulated_device_and_is_repeated_after_a_preemption():
    seen = drive(100, machine_of=PressureMachine)
    seen.require(compressed=1, preempted=1, forked=1, aborted=1, evicted=1, pressed=20, repeated=5)


def test_sums_of_attention_are_those_of_the_prompt_after_preemptions():
    seen = drive(100, machine_of=SummedMachine)
    seen.require(compressed=1, preempted=20, summed=50)


@pytest.mark.parametrize("planted", [False, True])
def test_the_last_block_of_a_compressed_row_is_not_published(planted, monkeypatch):
    real = publication.publish_tail

    def publish_tail(cache, slot, seq):
        cache.slots.dropped[:, slot] = 0
        real(cache, slot, seq)

    if planted:
        monkeypatch.setattr(publication, "publish_tail", publish_tail)
    made = engine(compress=(1, 1))
    first = request(made, "a", [7], max_tokens=3, ignore_eos=True)
    run(made)
    request(made, "b", [7, *outputs(first)[0][0], 5, 6], max_tokens=3, ignore_eos=True, kv_budget=0)
    if planted:
        with pytest.raises(EngineDeadError, match="KV of another history"):
            run(made)
    else:
        run(made, check=True)


def engine(**options):
    options = dict(slots=4, max_len=128, blocks=40, compress=(0, 0), reads=READS) | options
    return sim_engine(**options)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_is_compressed_at_its_prompts_end_and_after_every_so_many_tokens(depth):
    made = engine(compress=(6, 4), depth=depth)
    r = request(made, "a", range(1, 21), max_tokens=14, ignore_eos=True)
    most = 0
    while made.busy:
        made.step()
        for slot in made.slots.running.tolist():
            if made.slots.dropped[0, slot]:
                most = max(most, int(made.slots.blocks[0, slot]))
    at_rest(made)
    assert outputs(r)[0] == answer(range(1, 21), r.params, max_len=128)
    # compressions at 20, 24, 28 and 32 tokens; 33 of the 34 tokens are computed
    assert made.compression.stats() == {"compressions": 4, "dropped_tokens": 14 + 4 + 4 + 4}
    assert most == -(-(6 + 4) // made.wiring.block)


@pytest.mark.parametrize("prefix", [False, True])
def test_rows_wait_for_steps_in_flight_only_before_a_compression_of_blocks_that_are_published(prefix, monkeypatch):
    """A second row of other length decodes beside the compressed one, so that steps go on while the latter waits."""
    made = engine(compress=(6, 4), depth=1, prefix=prefix, slots=2)
    plans, real = [], Planner._make_plan

    def noted(planner, *args):
        plan = real(planner, *args)
        plans.append([] if plan is None else plan.slots.tolist())
        return plan

    monkeypatch.setattr(Planner, "_make_plan", noted)
    row = request(made, "a", range(1, 21), max_tokens=14, ignore_eos=True)
    other = request(made, "b", range(31, 41), max_tokens=30, ignore_eos=True, kv_budget=0)
    slot = None
    absent = 0
    while made.busy:
        made.step()
        slot = row.sequences[0].slot if row.sequences[0].slot >= 0 else slot
    for r in (row, other):
        assert outputs(r)[0] == answer(r.prompt, r.params, max_len=128)
    computing = [slot in slots for slots in plans]
    first, last = computing.index(True), len(computing) - computing[::-1].index(True)
    absent = computing[first:last].count(False)
    assert made.compression.compressions == 4
    assert absent == int(prefix)


@pytest.mark.parametrize("planted", [False, True])
def test_the_blocks_of_a_prompt_are_published_before_the_row_is_compressed(planted, monkeypatch):
    if planted:
        monkeypatch.setattr(Compression, "_waits", lambda *args: False)
    made = engine(compress=(6, 4), depth=1)
    for name in "ab":
        request(made, name, range(1, 21), max_tokens=14, ignore_eos=True)
        run(made, check=True)
    at_rest(made)
    # the last token of a prompt is always computed
    expected = 0 if planted else 19
    assert made.stats()["prefix_hits"] == expected


def test_a_share_is_one_of_the_prompt_and_a_budget_above_it_compresses_nothing():
    made = engine()
    half = request(made, "a", range(1, 31), max_tokens=3, ignore_eos=True, kv_budget=0.5)
    whole = request(made, "b", range(1, 31), max_tokens=3, ignore_eos=True, kv_budget=30)
    assert (half.keep, whole.keep) == (15, 0)
    run(made, check=True)
    assert made.compression.stats() == {"compressions": 1, "dropped_tokens": 15}


def test_rows_are_compressed_under_pressure_before_one_is_preempted():
    """Six rows of 40 tokens take 60 blocks of 4 tokens; 39 are there."""
    preempted = {}
    for pressure in (0, 0.4):
        made = engine(slots=6, blocks=40, pressure=pressure, prefix=pressure > 0)
        requested = [request(made, str(i), range(i + 1, i + 13), max_tokens=28, ignore_eos=True) for i in range(6)]
        run(made, check=True)
        at_rest(made)
        preempted[pressure] = made.planner.preemptions
        for r in requested:
            assert outputs(r)[0] == answer(r.prompt, r.params, max_len=128)
    assert preempted[0.4] == 0 < preempted[0]


def test_a_request_without_a_budget_of_its_own_is_compressed_under_pressure_only():
    made = engine(slots=6, blocks=40, compress=(0, 3), pressure=0.4)
    r = request(made, "a", range(1, 13), max_tokens=28, ignore_eos=True)
    assert (r.keep, r.pressure) == (0, 0.4)
    run(made, check=True)
    assert made.compression.stats()["compressions"] == 0


def test_a_request_that_forbids_compression_is_never_compressed_under_pressure():
    made = engine(slots=6, blocks=40, pressure=0.4)
    for i in range(6):
        request(made, str(i), range(i + 1, i + 13), max_tokens=28, ignore_eos=True, kv_budget=0)
    run(made, check=True)
    assert made.compression.stats()["compressions"] == 0 < made.planner.preemptions


def test_pressure_compresses_a_row_with_a_budget_to_its_budget():
    made = engine(slots=6, blocks=40, compress=(20, 0), pressure=0.1)
    requested = [request(made, str(i), range(i + 1, i + 13), max_tokens=28, ignore_eos=True) for i in range(6)]
    seqs = [r.sequences[0] for r in requested]
    run(made, check=True)
    at_rest(made)
    assert {kept for seq in seqs for kept in seq.compressions.values()} == {20}


def test_more_requests_run_at_once_when_they_are_compressed():
    """Ten prompts of 32 tokens with 24 generated tokens take 140 blocks of 4 tokens, and there are 48."""
    most = {}
    for budget in (0, 8):
        made = engine(slots=10, blocks=49, compress=(budget, 0), prefix=False, budget=32)
        for i in range(10):
            request(made, str(i), range(i + 1, i + 33), max_tokens=24, ignore_eos=True)
        most[budget] = 0
        while made.busy:
            made.step()
            most[budget] = max(most[budget], len(made.slots.running))
        at_rest(made)
    assert most[8] >= 1.9 * most[0]


def test_a_request_is_refused_if_the_cache_cannot_hold_its_prompt_and_the_kept_tokens():
    made = engine(blocks=12, max_len=128, compress=(0, 4))
    request(made, "a", range(1, 29), max_tokens=90, ignore_eos=True, kv_budget=4)
    with pytest.raises(RequestError, match="needs the KV cache of up to 120 tokens"):
        request(made, "b", range(1, 31), max_tokens=90, ignore_eos=True)
    run(made, check=True)
    at_rest(made)


@pytest.mark.parametrize(
    ("budget", "reported"), [(1.5, "a whole number of tokens"), (-1, "kv_budget"), ("x", "kv_budget")]
)
def test_a_budget_that_is_no_number_of_tokens_is_refused(budget, reported):
    made = engine()
    with pytest.raises(RequestError, match=reported):
        request(made, "a", range(1, 9), kv_budget=budget)
    assert not made.requests


class Guided(DecodingStrategy):
    def start(self, params):
        return [Branch(0, guide=Guide(2.0, (5, 6)))]

    def result(self, params, ends):
        return [0]


@pytest.mark.parametrize(
    ("strategy", "more", "reported"),
    [(Beam(), {"beam_width": 2}, "beam search is not compressed"), (Guided(), {}, "with a guide is not compressed")],
)
def test_rows_of_searches_and_guides_are_refused_by_name(strategy, more, reported):
    made = engine(strategy=strategy)
    with pytest.raises(RequestError, match=reported):
        request(made, "a", range(1, 9), kv_budget=4, **more)


def test_a_budget_of_a_request_takes_the_place_of_the_engines():
    made = engine(compress=(8, 0))
    plain = request(made, "a", range(1, 31), max_tokens=3, ignore_eos=True, kv_budget=0)
    other = request(made, "b", range(1, 31), max_tokens=3, ignore_eos=True, kv_budget=12)
    usual = request(made, "c", range(1, 31), max_tokens=3, ignore_eos=True)
    assert (plain.keep, other.keep, usual.keep) == (0, 12, 8)
    run(made, check=True)


def test_protected_rows_that_wait_for_a_compression_do_not_stop_the_oldest():
    """The blocks of these rows were checked before, and a block table is too short to reserve all of them."""
    made = engine(max_len=40, blocks=25, budget=72)
    request(made, "old", range(1, 37), max_tokens=4, ignore_eos=True, kv_budget=32, arrival=10.0)
    prompt = [1 + (7 * i + 3) % 48 for i in range(36)]
    row = request(made, "protected", prompt, max_tokens=4, ignore_eos=True, kv_budget=32, arrival=0.0)
    row.sequences[0].preempted = 8
    run(made, limit=200, check=True)
    at_rest(made)


def test_a_budget_without_a_compressor_is_refused():
    made = sim_engine(reads=("temperature",))
    request(made, "fine", range(1, 9), kv_budget=0)
    with pytest.raises(RequestError, match="compressor=none compresses nothing"):
        request(made, "a", range(1, 9), kv_budget=4)


def test_the_books_of_a_compression_name_blocks_of_the_row_only_once():
    one = Compaction(0, 1, 10, 4, np.array([7, 8, 9, 3, 4], np.int32), 3, np.array([False]))
    assert one.lacking == 1 and one.to_take == 0 and one.sources.tolist() == [7, 8, 9]
