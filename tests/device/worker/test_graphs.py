"""Which steps run as captures, and what they give; on a GPU they are tested in test_gpu.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")  # the kernels of a step are imported with the captures

from minivllm import LLM
from minivllm.core.interfaces.attention import GraphKey
from minivllm.device.layers.captured_sizes import coarse_sizes, first_mixed, long_decode, row_sizes, token_size
from minivllm.device.worker import build, graphs
from minivllm.device.worker.graphs import CAPTURES, SHORT, SIGHTS, TAPPED_CAPTURES, Captured, Graphs, TappedKey
from minivllm.device.worker.step_costs import HIDDEN, StepCosts, pair_flops, pairs_of
from minivllm.testing.tiny import tiny_dir


def mixed(rows: int, tokens: int) -> GraphKey:
    """Return the shape of a mixed step of short contexts."""
    return GraphKey("mixed", rows, tokens, graphs.SHORT if tokens < graphs.WHOLE_TOKENS else 1 << 15)


def captures(most: int = 64) -> Graphs:
    """Return the captures of a runner for ``most`` rows, without a device."""
    made = Graphs.__new__(Graphs)
    wiring, of_step = SimpleNamespace(max_num_seqs=most, max_model_len=1 << 15), lambda plan: (plan.steered, plan.read)
    taps = SimpleNamespace(of_step=of_step)
    made.runner = SimpleNamespace(
        wiring=wiring, taps=taps, adapts=lambda plan: ((), ()), shared_rows=lambda plan: plan.shared, images=None
    )
    made.mixed, made.sizes, made.coarse, made.shared_sizes = True, row_sizes(most), coarse_sizes(most), [16, 32]
    made.forwards, made.samples, made.paid, made.serving = {}, {}, {}, {}
    made.costs = StepCosts(launch_ms=30.0, token_ms=0.003)  # of a model of 0.6B
    made.refused, made.notes, made.masks, made.times, made.imaged = set(), [], None, {}, None
    made.later = SimpleNamespace(compiled=lambda key: True, begun=True, gradual=False)
    return made


def plan(*q_len: int, computed: int = 10, steered: tuple = (), read: tuple = (), shared: int = 0) -> SimpleNamespace:
    rows, none = np.arange(len(q_len)), np.zeros(0, np.int64)
    return SimpleNamespace(
        slots=rows,
        q_len=np.array(q_len),
        computed=np.full(len(q_len), computed),
        samples=rows,
        host=none,
        prompt=none,
        draft=none,
        pooled=none,
        observe=none,
        sums=none,
        steered=steered,
        given=none,
        read=read,
        shared=shared,
    )


def test_a_gradual_step_runs_in_a_larger_capture_that_reads_prefixes_as_it_does():
    some = captures()
    some.later.gradual = True
    alone, shared = (GraphKey("decode", 64, 64, graphs.SHORT, shared=shares) for shares in (False, True))
    some.shared_sizes = [16, 64]
    some.forwards = {shared: None}
    assert some.key(plan(*[1] * 9)) == GraphKey("decode", 16, 16, graphs.SHORT), "no capture reads each row alone"
    some.serving.clear()
    some.forwards[alone] = None
    assert some.key(plan(*[1] * 9)) == alone and some.key(plan(*[1] * 9, shared=5)) == shared


def test_a_step_whose_queries_are_read_runs_only_in_a_capture_that_keeps_them():
    """A size that takes longer than the next larger one is removed, so that few rows run in a capture of many."""
    some = captures(256)
    observed = plan(*[1] * graphs.OBSERVED_ROWS)
    observed.observe = np.array([[3, 1, 0]])
    assert some.key(observed) == GraphKey("decode", graphs.OBSERVED_ROWS, graphs.OBSERVED_ROWS, graphs.SHORT)
    some.sizes.remove(graphs.OBSERVED_ROWS)
    assert some.key(observed) is None and some.key(plan(*[1] * graphs.OBSERVED_ROWS)).rows > graphs.OBSERVED_ROWS


def test_sizes_of_shared_prefixes_stay_when_a_decode_size_is_removed(monkeypatch):
    some, made = captures(), []
    monkeypatch.setattr(some, "_try_forward", made.append)
    shared = GraphKey("decode", 16, 16, graphs.SHORT, shared=True)
    some.sizes.remove(16)
    some.measured_from = 1
    some.capture_shape(GraphKey("decode", 16, 16, graphs.SHORT))
    some.capture_shape(shared)
    some.forwards[shared] = None
    assert not some.unmeasured(shared)
    assert made == [shared] and not some.times


def test_a_decode_step_runs_in_the_next_size_and_a_mixed_one_once_it_was_seen_often():
    some = captures()
    assert some.key(plan(*[1] * 9)) == GraphKey("decode", 16, 16, graphs.SHORT)
    assert some.key(plan(*[1] * 9, computed=graphs.SHORT)).span == 1 << 15
    shares = GraphKey("decode", 16, 16, graphs.SHORT, shared=True)
    assert some.key(plan(*[1] * 9, shared=5)) == shares != some.key(plan(*[1] * 9))
    assert not some.key(plan(*[1] * 40, shared=40)).shared, "no capture of shared prefixes is that large"
    seen = [some.key(plan(1, 1, 70)) for _ in range(SIGHTS)]
    assert seen[:-1] == [None] * (SIGHTS - 1) and seen[-1] == GraphKey("mixed", 16, 128, graphs.SHORT)
    assert [some.key(plan(1, graphs.MOST_TOKENS)) for _ in range(SIGHTS + 1)] == [None] * (SIGHTS + 1)


def test_steps_with_taps_have_captures_of_their_own_points_once_seen_often_and_no_more_than_a_share():
    some = captures()
    for more in ({"steered": (3,)}, {"read": (3,)}, {"steered": (3,), "read": (1, 3)}):
        seen = [some.key(plan(*[1] * 9, **more)) for _ in range(SIGHTS)]
        want = TappedKey("decode", 16, 16, graphs.SHORT, more.get("steered", ()), more.get("read", ()))
        assert seen == [None] * (SIGHTS - 1) + [want] and want != GraphKey("decode", 16, 16, graphs.SHORT)
    steered = [some.key(plan(1, 70, steered=(2,))) for _ in range(SIGHTS)]
    assert steered[-1] == TappedKey("mixed", 16, 128, graphs.SHORT, (2,))
    assert [some.key(plan(1, 70, read=(2,))) for _ in range(SIGHTS + 1)] == [None] * (SIGHTS + 1)
    keys = [TappedKey("decode", 1, 1, graphs.SHORT, (i,)) for i in range(TAPPED_CAPTURES)]
    some.forwards = dict.fromkeys(keys, Captured(None))
    assert [some.key(plan(1, steered=(500,))) for _ in range(SIGHTS + 1)] == [None] * (SIGHTS + 1)
    assert some.key(plan(1, steered=(5,))) == keys[5]
    assert [some.key(plan(1, 1, 70)) for _ in range(SIGHTS)][-1] == GraphKey("mixed", 16, 128, graphs.SHORT)
    for i in range(graphs.MOST_KINDS):
        some.key(plan(1, steered=(1000 + i,)))
    assert len(some.paid) <= graphs.MOST_KINDS


def test_what_is_captured_stays_in_use_however_many_kinds_of_steps_there_are():
    some = captures()
    mine = GraphKey("mixed", 16, 128, graphs.SHORT)
    some.forwards = {i: Captured(None) for i in range(CAPTURES - 1)} | {mine: Captured(None)}
    assert some.key(plan(1, 1, 70)) == mine
    assert [some.key(plan(1, 1, 700)) for _ in range(SIGHTS + 1)] == [None] * (SIGHTS + 1)


def test_a_mixed_step_runs_in_a_larger_capture_until_that_has_cost_as_much_as_its_own():
    some = captures()
    served, larger = GraphKey("mixed", 16, 192, graphs.SHORT), GraphKey("mixed", 64, 512, graphs.SHORT)
    some.forwards = {GraphKey("decode", 64, 64, graphs.SHORT): None, larger: None, GraphKey("mixed", 16, 128): None}
    often = 1 + int(SIGHTS * 30.0 / (0.003 * (512 - 192 + 64 - 16)))
    assert [some.key(plan(1, 1, 170)) for _ in range(often)] == [larger] * (often - 1) + [served]
    some.refused.add(served)
    assert some.key(plan(1, 1, 170)) == larger, "one that could not be captured is not tried again"
    some.forwards[TappedKey("mixed", 16, 256, graphs.SHORT, (1,))] = None
    assert some.key(plan(1, 1, 240)) == larger, "captures of steps with taps serve those alone"
    assert some.key(plan(1, 200, computed=graphs.SHORT)) is None, "a capture of short contexts serves no long ones"
    assert some.key(plan(1, 600)) is None


SMALL, LARGE = StepCosts(30.0, 0.003, 6e-7), StepCosts(33.0, 0.024, 1.5e-6)  # models of 0.6B and 8B on an H200


@pytest.mark.parametrize("costs", [SMALL, LARGE, StepCosts(5.0, 0.003), StepCosts(30.0, 0.003, 6e-7, narrow=2.2)])
def test_padding_never_costs_more_than_the_launches_that_a_capture_saves(costs):
    some = captures(128)
    some.costs = costs
    most = min(1 << 14, max(costs.most_tokens(), 64))
    some.forwards = {mixed(*size): None for size in first_mixed(some.coarse, most)}
    for tokens in range(2, graphs.MOST_TOKENS + 1, 37):
        for computed in (0, 100):
            step = plan(1, tokens - 1, computed=computed)
            key = some.key(step)
            if key is not None:
                pairs = pairs_of(step)
                attention = pairs * costs.pair_ms
                own = tokens * costs.token_ms + attention
                captured = key.tokens * costs.token_ms + attention * costs.narrow
                assert captured <= max(HIDDEN * costs.launch_ms, own) + 1e-9, (tokens, key)


def test_long_prompts_of_a_small_model_are_captured_at_the_start_and_those_of_a_large_model_never_padded():
    small, large = captures(512), captures(512)
    for some, costs in ((small, SMALL), (large, LARGE)):
        some.costs = costs
        sizes = first_mixed(some.coarse, min(1 << 14, costs.most_tokens()))
        some.forwards = {mixed(*size): None for size in sizes}
    for tokens in (2049, 3000, 4000, 5000, 6000):
        key = small.key(plan(tokens, computed=0))
        assert key is not None and tokens <= key.tokens <= 1.34 * tokens
        assert [large.key(plan(tokens, computed=0)) for _ in range(50)] == [None] * 50
    assert small.key(plan(7500, computed=0)) is None, "attention over so many keys hides the launches"
    assert small.key(plan(*[750] * 10, computed=0)) is not None, "ten short prompts have little attention"


def test_a_step_with_its_own_capture_leaves_it_once_its_padding_costs_more_than_launches():
    some = captures()
    mine = mixed(16, 2304)
    some.forwards = {mine: None}
    assert some.key(plan(2100, computed=0)) == mine
    some.costs, some.paid[mine] = LARGE, 5.0
    assert some.key(plan(2100, computed=0)) is None and some.key(plan(2304, computed=0)) == mine


def test_pairs_are_the_keys_that_all_tokens_of_a_step_see():
    step = plan(1, 3, 5, computed=10)
    assert pairs_of(step) == sum(10 + i + 1 for n in (1, 3, 5) for i in range(n))
    layers = [SimpleNamespace(spec=SimpleNamespace(dim_qk=8, dim_v=4, heads=2, window=w)) for w in (None, None, 16)]
    assert pair_flops(layers) == 2 * (2 * 8 * 2 + 2 * 4 * 2)


@pytest.mark.parametrize("most_tokens", [16, 100, 700, 1 << 14])
@pytest.mark.parametrize("most", [1, 100, 512, 768, 1024])
def test_every_mixed_step_is_served_from_the_start(most, most_tokens):
    some = captures(most)
    sizes = first_mixed(some.coarse, most_tokens)
    assert len(sizes) <= 40 and sizes == sorted(set(sizes), key=lambda size: (-size[1], -size[0]))
    some.forwards = {mixed(*size): None for size in sizes}
    for rows in {1, most // 4 + 1, most // 2 + 1, most} & set(range(1, most_tokens)):
        for tokens in range(rows + 1, min(most_tokens, graphs.MOST_TOKENS) + 1, 13):
            key = some.key(plan(*[1] * (rows - 1), tokens - rows + 1, computed=0))
            assert key is not None and key.rows >= rows and key.tokens >= tokens, (rows, tokens)


def test_a_step_that_is_served_buys_a_capture_no_sooner_than_one_that_is_not():
    some = captures(512)
    some.costs = StepCosts(30.0, 0.05)
    some.forwards = {GraphKey("mixed", 512, 512, graphs.SHORT): None}
    assert [some.key(plan(1, 1, 170)).tokens for _ in range(SIGHTS)] == [512] * (SIGHTS - 1) + [192]


def test_captures_of_long_contexts_serve_all_contexts_and_others_only_short_ones():
    some = captures()
    short, long = GraphKey("mixed", 16, 256, graphs.SHORT), GraphKey("mixed", 16, 256, 1 << 15)
    some.forwards = {long: None}
    assert some.key(plan(1, 200)) == some.key(plan(1, 200, computed=graphs.SHORT)) == long
    some.forwards[short] = None
    some.serving.clear()
    assert some.key(plan(1, 200)) == short and some.key(plan(1, 200, computed=graphs.SHORT)) == long


def test_long_mixed_steps_have_one_capture_for_contexts_of_any_length():
    some = captures(128)
    some.forwards = {mixed(*size): None for size in first_mixed(some.coarse, 1 << 14)}
    for tokens in (10, 500, 1100, 4000, graphs.MOST_TOKENS - 64):
        near, far = (some.key(plan(1, tokens, computed=n)) for n in (0, graphs.SHORT))
        assert near is not None and far is not None and far in some.forwards
        assert tokens < graphs.WHOLE_TOKENS or near == far


def test_decode_steps_of_long_contexts_run_in_a_larger_capture_until_their_size_is_frequent():
    some = captures()
    far = {"computed": graphs.SHORT}
    assert some.key(plan(*[1] * 9, **far)) == GraphKey("decode", 16, 16, 1 << 15), "there is no larger capture"
    assert long_decode(some.sizes) == [64, 8] and long_decode([1, 2]) == [2]
    some.forwards = {GraphKey("decode", n, n, 1 << 15): None for n in long_decode(some.sizes)}
    some.serving.clear()
    seen = [some.key(plan(*[1] * 9, **far)).rows for _ in range(graphs.DECODE_SIGHTS)]
    assert seen == [64] * (graphs.DECODE_SIGHTS - 1) + [16]
    assert some.key(plan(*[1] * 9)) == GraphKey("decode", 16, 16, graphs.SHORT), "short contexts have their own"


def test_draws_beyond_those_that_are_kept_run_uncaptured_and_it_is_said_once():
    some = captures()
    some.samples = dict.fromkeys(range(CAPTURES))
    for _ in range(2):
        assert some.sample(GraphKey("decode", 16, 16, graphs.SHORT), ("new",), None, None) is None
    assert len(some.notes) == 1 and str(CAPTURES) in some.notes[0]


@pytest.mark.parametrize("most", [1, 3, 16, 100, 1024, 5000])
def test_sizes_reach_what_may_run_at_once(most):
    for sizes in (row_sizes(most), coarse_sizes(most)):
        assert sizes == sorted(set(sizes)) and sizes[0] >= 1 and sizes[-1] == min(most, 1024)


def test_tokens_of_a_mixed_step_are_filled_up_by_little():
    assert all(n <= token_size(n) < n + 64 for n in range(1, 257))
    assert all(n <= token_size(n) <= n * 1.25 for n in range(256, 1025))
    assert all(n <= token_size(n) <= n * 1.125 for n in range(1024, graphs.MOST_TOKENS + 1))


def test_the_trial_step_has_all_tokens_of_the_largest_and_writes_to_the_null_block_alone(tmp_path, monkeypatch):
    tiny_dir(tmp_path, "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)
    monkeypatch.setattr(build, "synchronize", lambda: None)
    options = dict(dtype="float32", skip_tokenizer_init=True, num_kvcache_blocks=20, max_model_len=48, max_num_seqs=3)
    with LLM(model=str(tmp_path), device="cpu", max_num_batched_tokens=100, **options) as llm:
        runner, seen = llm.engine.executor.runner, []
        model = runner.worker.model

        class Looks:
            logits = model.logits

            def __call__(self, step):
                seen.append((len(step.ids), len(step.meta.slots), int(step.position.max())))
                return model(step)

        runner.worker.model = Looks()
        build._trial_step(runner.worker, runner.wiring)
        assert seen == [(99, 3, 32)]
        assert not any(x[1:].any() for group in runner.worker.caches for layer in group for x in layer.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["captured_steps.py", "captured_drafts.py", "captured_shared.py", "captured_images.py"]
)
def test_captured_steps_give_what_separate_launches_give(file):
    """Run the tests in a process of its own, because Triton's interpreter is chosen when Triton is imported."""
    here = Path(__file__).parents[2] / "helpers"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here / file)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:]


TINY = StepCosts(33.0, 0.00174)  # measured for 0.6B on an H200


@pytest.mark.parametrize(
    "budget, costs, tokens",
    [(1 << 14, TINY, 8192), (1 << 15, TINY, 0), (8192, TINY, 0), (1 << 14, SMALL, 0), (1 << 14, LARGE, 0)],
)
def test_steps_are_limited_to_captures_only_if_the_longest_step_takes_longer_to_launch(budget, costs, tokens):
    some = captures(512)
    some.runner.wiring.max_num_batched_tokens, some.costs = budget, costs
    sizes = first_mixed(some.coarse, min(budget, costs.most_tokens()))
    some.forwards = {GraphKey("mixed", rows, size, SHORT): None for rows, size in sizes}
    some.later.queue = [some.forwards.popitem()[0] for _ in sizes[:2]]  # they are made later
    assert some.step_tokens() == tokens
    captured = sorted({size for _, size in sizes if size >= 2048})
    assert list(some.step_sizes()) == captured and (captured != []) == (costs != LARGE)


def test_steps_are_not_limited_to_short_captures():
    some = captures(512)
    some.runner.wiring.max_num_batched_tokens, some.costs = 1 << 14, TINY
    some.forwards, some.later.queue = {GraphKey("mixed", 16, 64, SHORT): None}, []
    assert some.step_tokens() == 0
