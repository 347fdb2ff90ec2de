"""Captured steps on a CPU, compared with the same steps as separate launches; run by engine/test_graphs.py.

The captures are recordings that run no Python when they are replayed (``cpu_captures``), and the kernels at the ends of
a step run under Triton's interpreter.  Padded sizes, copied inputs and the choice of a capture are as on a GPU.
Properties that only CUDA has (streams, memory shared by captures) are tested in engine/test_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cpu_captures import CpuRecorder, cpu_captures
from fuzz import adapters as fuzz_adapters
from greedy import prompts
from prediction_heads import MTPReference

from minivllm import LLM, SamplingParams, Tap
from minivllm.core import progress
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.plan import OVERSHOOT, StepForm, StepPlan
from minivllm.core.interfaces.sampling import Processor, Row
from minivllm.core.timing import form_name
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.kernels.step import commit
from minivllm.device.layers import captured_sizes
from minivllm.device.layers.experts import Mixture
from minivllm.device.worker import captured, graphs, sampling, step
from minivllm.device.worker.graphs import AdaptedKey, TappedKey
from minivllm.device.worker.query_store import QueryStore, StepQueries
from minivllm.device.worker.state import DeviceState
from minivllm.device.worker.taps import TapState
from minivllm.plugins.adapter import ia3_memory, lora_memory, triton_extended
from minivllm.plugins.drafter.mtp import MTP
from minivllm.plugins.processor.spec import LOGIT_BIAS
from minivllm.plugins.sampler.default import DRAWN, GREEDY
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)
SEQS = 5
WINDOW = dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=20, max_window_layers=1)


class Waits(Processor):
    """A back end that waits for the device, although its spec allows captures."""

    spec = replace(LOGIT_BIAS, impl=f"{__name__}:Waits")
    reads = frozenset({"waits"})

    def bind(self, params, prompt_len):
        return Row() if "waits" in params.extra else None

    def apply(self, logits, rows, state):
        if logits[:, 0].sum().item() < 0:
            logits[:, 3] += 1


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    long = dict(max_position_embeddings=512)
    for name, family, more in (
        ("qwen3", "qwen3", {}),
        ("windows", "qwen2", WINDOW),
        ("long", "qwen3", long),
        ("experts", "qwen3_moe", {}),
    ):
        made[name] = tmp_path_factory.mktemp(name)
        tiny_dir(made[name], family, **more)
    return made


def engine(folder, **options):
    base = dict(
        skip_tokenizer_init=True,
        dtype="float32",
        device="cpu",
        attention="cpu_captures:OnDevice",
        max_num_seqs=SEQS,
        num_kvcache_blocks=60,
        kvcache_block_size=16,
        max_num_batched_tokens=64,
        max_model_len=96,
        graph_captures="start",
        allow_targets=["cpu_captures", __name__],
    )
    return LLM(model=str(folder), **{**base, **options})


def play(folder, params, captures, taps=None, lora=None, **options):
    """Return the results of all requests and the captures.

    The prompts have many lengths.  All run twice, so that the second run hits prefixes.
    """
    items = prompts(61, [1 + 13 * i % 50 for i in range(len(params))])
    seen = []
    listening = progress.listening(lambda *report: seen.append(report))
    apart = {**options, "graph": "off", "captured_drafts": False}
    seqs = options.get("max_num_seqs", SEQS)
    with listening, engine(folder, **options if captures else apart) as llm:
        made = [(done, total) for stage, done, total in seen if stage == progress.CAPTURES]
        assert bool(made) == captures and all(done == total for done, total in made[-1:])
        outs = [o for _ in range(2) for o in llm.generate(items, params, False, taps, lora)]
        llm.engine.cache.check()
        assert [o.error for o in outs] == [None] * len(outs)
        runner = llm.engine.executor.runner
        forms = llm.stats()["forms"]
        keys = [*runner.graphs.forwards, *(runner.drafted.forwards if runner.drafted else ())] if captures else ()
        replayed = {form_name(StepForm(key.kind, key.rows, key.tokens)) for key in keys}
        assert set(forms) <= {"separate", *replayed} and bool(set(forms) & replayed) == captures
        if captures:
            state, spare = runner.state, seqs
            assert state.stopped[spare] and not state.known[spare] and not state.tokens[spare].any()
        graphs = runner.graphs
        if graphs is not None:  # a closed runner has no captures
            graphs.runner = SimpleNamespace(drafted=runner.drafted, drafting=runner.drafting)
        return outs, graphs


def made(graphs):
    """Return the number of captures."""
    found = len(graphs.forwards) + len(graphs.samples)
    drafted = graphs.runner.drafted
    if drafted is not None:
        found += len(drafted.forwards) + len(drafted.samples)
        proposals = graphs.runner.drafting.captured
        found += len(proposals.made) if proposals is not None else 0
    return found


def compare(folder, params, **options):
    want, none = play(folder, params, False, **options)
    with cpu_captures() as recorded:
        got, graphs = play(folder, params, True, **options)
    assert none is None and graphs.notes == [] and len(recorded) == made(graphs)
    for a, b in zip(want, got, strict=True):
        assert [(c.token_ids, c.finish_reason) for c in b.outputs] == [
            (c.token_ids, c.finish_reason) for c in a.outputs
        ]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.taps or {}).keys() == (y.taps or {}).keys()
            for point, values in (x.taps or {}).items():
                assert values.shape == y.taps[point].shape and np.abs(values - y.taps[point]).max() <= 1e-4, point
            for p, q in zip(x.logprobs or (), y.logprobs or (), strict=True):
                assert {t: found.rank for t, found in p.items()} == {t: found.rank for t, found in q.items()}
                assert [f.logprob for f in q.values()] == pytest.approx([f.logprob for f in p.values()], abs=1e-4)
    return graphs


# (kind of a step, whether it is long) -> the longest contexts of its captures, where 24 tokens are a short context
SPANS = {("decode", False): {24, 96}, ("mixed", True): {96}}


def requested(*settings, **common):
    return [SamplingParams(**{"seed": i, "max_tokens": 2 + 2 * i, **common, **s}) for i, s in enumerate(settings)]


PLAIN = ({}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": 0})


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3", {"run_ahead": 0}),
        ("qwen3", {"run_ahead": 2}),
        ("windows", {"run_ahead": 1, "num_kvcache_blocks": 9}),
        ("qwen3", {"graph": "decode", "run_ahead": 1}),
    ],
)
def test_rows_that_end_one_after_another_draw_the_same_in_every_captured_size(models, model, options):
    graphs = compare(models[model], requested(*PLAIN, {}, ignore_eos=True), **options)
    used = {(key.kind, key.rows) for key in graphs.forwards}
    assert {("decode", n) for n in (1, 2, 4, SEQS)} <= used
    assert (("mixed", SEQS) in used) == ("graph" not in options)


def test_prompts_around_every_size_of_long_steps_draw_the_same_as_in_separate_launches(models, monkeypatch):
    """The sizes are those of a small table, because the interpreter is slow."""
    monkeypatch.setattr(graphs, "FIRST_TOKENS", (64,))
    monkeypatch.setattr(captured_sizes, "FIRST_TOKENS", (64,))
    monkeypatch.setattr(captured_sizes, "LONG_TOKENS", (128, 192, 256))
    options = dict(max_num_batched_tokens=320, max_model_len=320, num_kvcache_blocks=150)
    items = prompts(61, [n + d for n in (64, 128, 192, 256) for d in (-1, 0, 1)])
    params = requested(*[{"temperature": 0}] * len(items), max_tokens=3, logprobs=2)
    found = []
    for graph in ("off", "auto"):
        with cpu_captures(), engine(models["long"], graph=graph, **options) as llm:
            alone = [llm.generate([item], [one], False)[0] for item, one in zip(items, params, strict=True)]
            found.append([*alone, *llm.generate([item[::-1] for item in items], params, False)])
            made = llm.engine.executor.runner.graphs
    sizes = {key.tokens for key in made.forwards if key.kind == "mixed"}
    assert made.notes == [] and {64, 128, 192, 256, 320} <= sizes
    for a, b in zip(*found, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for p, q in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert [f.logprob for f in q.values()] == pytest.approx([f.logprob for f in p.values()], abs=1e-4)


def test_rows_with_long_contexts_draw_the_same_beside_short_ones_in_captures_for_both(models, monkeypatch):
    monkeypatch.setattr(graphs, "SHORT", 24)
    monkeypatch.setattr(graphs, "WHOLE_TOKENS", 64)
    made = compare(models["qwen3"], requested(*PLAIN, {}, ignore_eos=True), run_ahead=1)
    spans = {kind: {key.span for key in made.forwards if (key.kind, key.tokens >= 64) == kind} for kind in SPANS}
    assert spans == SPANS


def test_a_whole_step_of_separate_launches_runs_before_the_first_request_and_changes_no_column(models, monkeypatch):
    monkeypatch.setattr(captured_sizes, "MOST_TOKENS", 64)
    for module in (graphs, captured_sizes):
        monkeypatch.setattr(module, "FIRST_TOKENS", (64,))
    accept, flags = step.accept, []

    def accepted(*args):
        found = accept(*args)
        flags.append(found[2].tolist())
        return found

    monkeypatch.setattr(step, "accept", accepted)
    with cpu_captures(), engine(models["qwen3"], max_num_batched_tokens=128, max_model_len=128) as llm:
        runner = llm.engine.executor.runner
        state = runner.state
        assert runner.graphs.notes == [] and flags == [[OVERSHOOT]]
        assert bool(state.stopped.all()) and not bool(state.known.any()) and not bool(state.tokens.any())
        stored = [x for cache in runner.worker.caches for layer in cache for x in layer.values()]
        assert stored and not any(bool(x[1:].any()) for x in stored)


SETTINGS = (
    {"repetition_penalty": 1.3}, {"logprobs": 3}, {"logit_bias": {5: 3.0}, "min_tokens": 6, "stop_token_ids": [7, 9]},
    {"n": 2, "logprobs": 0}, {"allowed_tokens_fn": lambda ids: range(10, 50)},
    {"allowed_tokens_fn": lambda ids: range(5, 20), "logprobs": 2},
)  # fmt: skip


def test_processors_masks_stop_ids_and_log_probabilities_are_captured_as_they_are(models):
    params = requested(*SETTINGS, max_tokens=7)
    graphs = compare(models["qwen3"], params, run_ahead=1, processors=["logit_bias", "penalties"])
    kinds = [kind for _, kind in graphs.samples]
    assert any(kind.late for kind in kinds) and any(kind.wants_min for kind in kinds)
    assert {kind.topk for kind in kinds} >= {-1, 3} and len({kind.variants[:-1] for kind in kinds}) > 1


def test_draws_read_float32_logits_where_no_draw_of_their_limits_read_others(models):
    """Top-k and min-p are first drawn together beside a penalty, which needs float32, then without one, then apart."""
    with_penalty = {"top_k": 9, "repetition_penalty": 1.3, "max_tokens": 3}
    params = requested(with_penalty, {"top_k": 9, "max_tokens": 8}, {"min_p": 0.1, "max_tokens": 12})
    graphs = compare(models["qwen3"], params, processors=["penalties"])
    kinds = {kind.variants for _, kind in graphs.samples}
    limits = {variants[-1] & ~(GREEDY | DRAWN) for variants in kinds if variants[0] < 0} - {0}
    assert len(limits) == 2 and not graphs.draw_bits[False] & ~(GREEDY | DRAWN)
    assert all(not bits & ~graphs.draw_bits[True] for bits in limits)


def test_log_probabilities_of_what_is_drawn_from_are_captured_too(models):
    params = requested({"logprobs": 3, "top_k": 9}, {"logprobs": 1, "logit_bias": {5: 3.0}}, {"temperature": 0})
    graphs = compare(models["qwen3"], params, logprobs_mode="processed_logprobs", processors=["logit_bias"])
    assert any(kind.topk == 3 for _, kind in graphs.samples)


@pytest.mark.parametrize("options", [{"sampler": "mirostat"}, {"drafter": "ngram", "speculate": "always"}])
def test_a_sampler_with_state_and_rows_with_drafts_are_those_of_separate_launches(models, options):
    graphs = compare(
        models["qwen3"], requested({"mirostat_tau": 3.0} if "sampler" in options else {}, *PLAIN), **options
    )
    assert len(graphs.samples) > 4 and graphs.runner.drafted is None


def adapters_of(folder, model, count):
    """Write adapters of a model, and return a request for each."""
    fuzz_adapters.write(folder, model.state_dict())
    return [fuzz_adapters.lora_of({"adapter": 1 + n}, folder.parent, folder.name) for n in range(count)]


@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"run_ahead": 2, "num_kvcache_blocks": 9, "max_loras": 1}])
def test_adapters_have_captures_of_their_own_with_the_kernels(tmp_path, monkeypatch, options):
    """Separate launches without kernels give the results of captures with the interpreted kernels."""
    folder, _, model = tiny_dir(tmp_path / "adapted", "qwen3")
    one, two = adapters_of(folder, model, 2)
    params = requested(*[{"temperature": 0}] * 6, max_tokens=6, ignore_eos=True, logprobs=2)
    lora, options = [one, None, two, one, None, two], {"enable_lora": True, **options}
    want, none = play(folder, params, False, lora=lora, **options)
    monkeypatch.setattr(lora_memory, "runs_kernels", lambda device: True)
    expanded = []
    expand = triton_extended.expand_behind
    monkeypatch.setattr(triton_extended, "expand_behind", lambda *args: expanded.append(1) or expand(*args))
    with cpu_captures() as recorded:
        got, made = play(folder, params, True, lora=lora, **options)
    assert none is None and made.notes == [] and len(recorded) == len(made.forwards) + len(made.samples)
    assert expanded, "no product of A is computed with that of the weight"
    kinds = {(type(key), key.kind) for key in made.forwards}
    assert {(AdaptedKey, "decode"), (GraphKey, "decode"), (AdaptedKey, "mixed"), (GraphKey, "mixed")} <= kinds
    for a, b in zip(want, got, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for p, q in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert [f.logprob for f in q.values()] == pytest.approx([f.logprob for f in p.values()], abs=1e-4)
    assert len({tuple(out.outputs[0].token_ids) for out in got}) > 3


@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"run_ahead": 2, "num_kvcache_blocks": 9, "max_loras": 2}])
def test_adapters_of_several_methods_are_those_of_separate_launches(tmp_path, monkeypatch, options):
    """One capture serves rows of any method.  Steps with steering have captures with their points."""
    pytest.importorskip("peft")
    from adapters import lora as request
    from adapters import write_ia3, write_steering

    folder, _, model = tiny_dir(tmp_path / "adapted", "qwen3")
    width = model.config.hidden_size
    vectors = [{f"layers.{n}.residual": torch.randn(width) * 2} for n in range(2)]
    steering = [request(write_steering(tmp_path / f"s{n}", one), 7 + n) for n, one in enumerate(vectors)]
    ia3 = request(write_ia3(model, tmp_path / "ia3"), 9)
    low_rank = adapters_of(folder, model, 1)[0]
    params = requested(*[{"temperature": 0}] * 7, max_tokens=8, ignore_eos=True, logprobs=2)
    lora = [low_rank, None, ia3, steering[0], steering[1], ia3, steering[0]]
    options = {"adapters": ["ia3", "steering", "lora"], **options}
    want, none = play(folder, params, False, lora=lora, **options)
    monkeypatch.setattr(lora_memory, "runs_kernels", lambda device: True)
    monkeypatch.setattr(ia3_memory, "chooses_layers", lambda device: False)
    with cpu_captures() as recorded:
        got, made = play(folder, params, True, lora=lora, **options)
    assert none is None and made.notes == [] and len(recorded) == len(made.forwards) + len(made.samples)
    kinds = {(type(key), key.kind) for key in made.forwards}
    assert {(AdaptedKey, "decode"), (GraphKey, "decode"), (TappedKey, "decode")} <= kinds
    for a, b in zip(want, got, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for p, q in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert [f.logprob for f in q.values()] == pytest.approx([f.logprob for f in p.values()], abs=1e-4)
    assert len({tuple(out.outputs[0].token_ids) for out in got}) > 4


def test_hidden_states_of_captured_steps_are_read_by_a_head(tmp_path, monkeypatch):
    """A head drafts as the reference does behind mixed captures of prompts and decode captures."""
    folder, _, model = tiny_dir(tmp_path / "headed", "qwen3")
    head, seen = MTPReference(model), []
    head.write(folder)

    def propose(self, ask, original=MTP.propose):
        rows = [ask.rows.tokens[slot, :n].tolist() for slot, n in zip(ask.slots, ask.known, strict=True)]
        drafts, count = original(self, ask)
        seen.extend(zip(rows, drafts.tolist(), count.tolist(), strict=True))
        return drafts, count

    monkeypatch.setattr(MTP, "propose", propose)
    options = {"drafter": "mtp", "num_speculative_tokens": 2, "speculate": "auto", "run_ahead": 1}
    graphs = compare(folder, requested(*[{"temperature": 0}] * 6, max_tokens=24, ignore_eos=True), **options)
    assert {key.kind for key in graphs.forwards} == {"decode", "mixed"}
    drafted = [(row, drafts[:n]) for row, drafts, n in seen if n]
    assert len(drafted) > 100
    assert [drafts for _, drafts in drafted] == [head.drafts(row, len(drafts)) for row, drafts in drafted]


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_with_guides_are_drawn_as_separate_launches_behind_captured_layers(models, depth):
    guided = ({"guidance_scale": 2.0, "negative_prompt_token_ids": [5, 9, 2]}, {"guidance_scale": 0.5, "logprobs": 2})
    params = requested(*guided, *PLAIN[:2], ignore_eos=True)
    graphs = compare(models["qwen3"], params, run_ahead=depth, strategies=["single", "guidance"])
    assert {key.kind for key in graphs.forwards} == {"decode", "mixed"}


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_with_taps_run_in_captures_of_their_points_beside_rows_without(models, depth):
    add = np.random.default_rng(3).standard_normal(32)
    steer, read = Tap("layers.0.residual", add=add), [Tap(p, read=True) for p in ("layers.1.q", "norm", "embedding")]
    graphs = compare(
        models["qwen3"],
        requested(*[{"temperature": 0}, {"logprobs": 2}] * 3, max_tokens=22, ignore_eos=True),
        taps=[[steer], [], [*read, steer], [], [Tap("layers.1.mlp", add=add, read=True), Tap("logits", read=True)], []],
        run_ahead=depth,
    )
    tapped = [key for key in graphs.forwards if isinstance(key, TappedKey)]
    assert any(key.kind == "decode" and key.steered and len(key.read) == 4 for key in tapped)
    assert not any(key.read for key in tapped if key.kind == "mixed")


def all_experts(self, h, ids, weights):
    """Multiply all tokens by all experts, as a captured step of separate operations does on a GPU."""
    y = self._all(h.x, ids)
    return (y.float() * weights[..., None]).sum(1).to(h.x.dtype)


def compare_routes(folder, routes, depth):
    """Compare rows with routes beside others in captured steps with separate launches; return the captures."""
    params = requested(*[{"temperature": 0, "routes": r} for r in routes], max_tokens=22, ignore_eos=True)
    want, _ = play(folder, params, False, run_ahead=depth)
    with cpu_captures():
        got, graphs = play(folder, params, True, run_ahead=depth)
    assert graphs.notes == []
    for a, b in zip(want, got, strict=True):
        assert a.tokens == b.tokens and (a.routes is None) == (b.routes is None)
        assert a.routes is None or np.array_equal(a.routes, b.routes)
    for r, out in zip(routes * 2, got, strict=True):
        if r is not None and "given" in r:
            assert np.array_equal(out.routes[: len(r["given"])], r["given"])
    return [key for key in graphs.forwards if isinstance(key, TappedKey)]


def drawn_routes(seed):
    g = np.random.default_rng(seed)
    return np.array([[g.permutation(6)[:2] for _ in range(2)] for _ in range(5)]).repeat(4, 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_with_given_routes_run_in_captures_beside_rows_without(models, monkeypatch, depth):
    monkeypatch.setattr(Mixture, "products", all_experts)
    given = [{"read": True, "given": drawn_routes(i)} for i in (1, 2)]
    keys = compare_routes(
        models["experts"], [given[0], None, {"read": True}, {"pruned": [1], "read": True}, given[1]], depth
    )
    assert any(key.kind == "decode" and key.given and len(key.read) == 2 for key in keys)
    assert any(key.kind == "decode" and not key.given and len(key.read) == 2 for key in keys)
    assert not any(key.given for key in keys if key.kind == "mixed")


def give_nothing(self, plan, rows):
    self._given_buffer()


def give_the_next_row(self, plan, rows, right=TapState.give):
    right(self, plan, rows)
    self.given_rows.copy_(self.given_rows.roll(1, 0))


@pytest.mark.parametrize("give", [give_nothing, give_the_next_row])
def test_captures_with_wrong_given_routes_are_found(models, monkeypatch, give):
    monkeypatch.setattr(Mixture, "products", all_experts)
    monkeypatch.setattr(TapState, "give", give)
    with pytest.raises(AssertionError):
        compare_routes(models["experts"], [{"read": True, "given": drawn_routes(i)} for i in range(4)] + [None], 0)


def test_steps_that_only_add_are_captured_in_mixed_steps_too(models):
    taps = [[Tap("layers.0.residual", add=np.ones(32))], [], [], [], []]
    more = requested(*PLAIN, ignore_eos=True, max_tokens=30)
    graphs = compare(models["qwen3"], more, taps=taps, max_num_batched_tokens=16)
    assert any(isinstance(key, TappedKey) and key.kind == "mixed" for key in graphs.forwards)


@pytest.mark.parametrize("model", ["qwen3", "windows"])
@pytest.mark.parametrize("name", ["streaming", "tova", "h2o", "rerotated"])
def test_compressed_rows_draw_the_same_in_captured_steps(models, model, name):
    if (model, name) == ("windows", "rerotated"):
        pytest.skip("layers with a window keep their positions")
    more = requested(*PLAIN, ignore_eos=True, max_tokens=20, kv_budget=0.5)
    compressor = {"name": "streaming", "options": {"rerotate": True}} if name == "rerotated" else name
    graphs = compare(models[model], more, compressor=compressor, compress_every=7, run_ahead=1)
    assert {"decode", "mixed"} <= {key.kind for key in graphs.forwards}


def queries_of_another_row(real, self, plan, queries):
    rolled = StepQueries()
    rolled.of_layer = {layer: q.roll(1, 0) for layer, q in queries.of_layer.items()}
    real(self, plan, rolled)


def queries_of_another_layer(real, self, plan, queries):
    turned = StepQueries()
    turned.of_layer = dict(zip(queries.of_layer, reversed(queries.of_layer.values()), strict=True))
    real(self, plan, turned)


@pytest.mark.parametrize("fault", [None, queries_of_another_row, queries_of_another_layer])
@pytest.mark.parametrize("name", ["tova", "snapkv"])
def test_captured_steps_return_the_queries_that_a_compressor_reads(models, monkeypatch, name, fault):
    taken, real = [], QueryStore.take

    def take(self, plan, queries):
        taken.append(len(plan.observe))
        (fault or (lambda real, *args: real(*args)))(real, self, plan, queries)

    monkeypatch.setattr(QueryStore, "take", take)
    more = requested(*PLAIN, ignore_eos=True, max_tokens=20, kv_budget=0.5)
    if fault is None:
        compare(models["qwen3"], more, compressor=name, compress_every=5, run_ahead=1)
    else:
        with pytest.raises(AssertionError):
            compare(models["qwen3"], more, compressor=name, compress_every=5, run_ahead=1)
    assert max(taken) > 1


def test_a_step_that_waits_for_the_device_is_not_captured_and_it_is_said_once(models):
    params = requested({"extra": {"waits": 1}}, *PLAIN)
    want, _ = play(models["qwen3"], params, False, processors=[f"{__name__}:Waits"])
    with cpu_captures():
        got, graphs = play(models["qwen3"], params, True, processors=[f"{__name__}:Waits"])
    assert [o.tokens for o in got] == [o.tokens for o in want]
    assert len(graphs.notes) == 1 and "waits for the device" in graphs.notes[0]


def test_a_replay_runs_no_python_and_reads_what_lies_at_its_addresses():
    x, calls = torch.zeros(3), []

    def run():
        calls.append(len(calls))
        x.add_(len(calls))
        return (x[1:] * 2).view(1, 2)

    graph, result = CpuRecorder().capture(run)
    x.copy_(torch.tensor([5.0, 6.0, 7.0]))
    graph.replay()
    assert len(calls) == 2 and x.tolist() == [7, 8, 9] and result.tolist() == [[16, 18]]


# ---- the two forms of each end of a step -----------------------------------------------------------------------------


def columns(slots=7, groups=2, block=4, length=40, seed=0, compresses=False):
    torch.manual_seed(seed)
    state = DeviceState(slots, length, groups, block, torch.device("cpu"), compresses=compresses)
    state.tokens.copy_(torch.randint(0, 50, state.tokens.shape))
    state.known.copy_(torch.randint(1, length - 1, (slots,)))
    state.table.copy_(torch.randint(1, 90, state.table.shape))
    state.stopped.copy_(torch.rand(slots) < 0.3)
    state.end.copy_(state.known + torch.randint(0, 3, (slots,)))
    state.min_end.copy_(state.known + torch.randint(-2, 2, (slots,)))
    state.stop_ids[:, :4] = torch.randint(0, 12, (slots, 4)).int()
    state.n_eos.copy_(torch.randint(0, 4, (slots,)))
    if compresses:
        state.dropped.copy_((torch.rand(groups, slots) * state.known).long())
        state.dropped_host[:] = state.dropped.numpy()
    return state


@pytest.mark.parametrize("compresses", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_one_token_are_read_alike_from_the_columns_and_from_a_table(seed, compresses):
    state, slots = columns(seed=seed, compresses=compresses), np.array([5, 0, 3])
    known = state.known.numpy()[slots]
    plan = StepPlan(0, slots, np.ones(3, np.int32), known - 1, np.arange(3))
    host = step.host_lengths(plan, state.dropped_host)
    want, last = step.read_rows(state, state.to(step.pack_rows(plan, 3, 3, 6)), host)
    static = captured.column_tensors(state, torch.from_numpy(slots), captured.bounds(GraphKey("decode", 3, 3, 64), 2))
    got = captured.read_columns(state, static)
    assert last.tolist() == [0, 1, 2] and torch.equal(got.ids, want.ids) and torch.equal(got.position, want.position)
    for name in ("slots", "cu_q", "q_len", "kv_len", "row", "slot_map"):
        assert torch.equal(getattr(got.meta, name), getattr(want.meta, name)), name
        assert getattr(got.meta, name).dtype == getattr(want.meta, name).dtype


@pytest.mark.parametrize("seed", range(5))
def test_what_pads_a_table_changes_no_row_and_writes_to_the_null_block(seed):
    state, slots, q_len = columns(seed=seed), np.array([2, 4, 1]), np.array([1, 3, 6], np.int32)
    plan = StepPlan(0, slots, q_len, np.array([9, 0, 5]), np.arange(3))
    want, last = step.read_rows(
        state, state.to(step.pack_rows(plan, 3, 10, 6)), step.host_lengths(plan, state.dropped_host)
    )
    table = state.to(step.pack_rows(plan, 5, 16, 6))
    got, most = step.read_rows(state, table, captured.bounds(GraphKey("mixed", 5, 16, 64), 2), padded=True)
    assert torch.equal(got.ids[:10], want.ids) and torch.equal(got.position[:10], want.position)
    assert torch.equal(got.meta.slot_map[:, :10], want.meta.slot_map) and not got.meta.slot_map[:, 10:].any()
    assert torch.equal(most[:3], last) and got.meta.slots.tolist() == [2, 4, 1, 6, 6]
    assert got.meta.cu_q.tolist() == [0, 1, 4, 10, 10, 10] and got.meta.q_len.tolist() == [1, 3, 6, 0, 0]
    assert torch.equal(got.meta.kv_len[:, :3], want.meta.kv_len) and got.meta.decode_rows == 5


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_accepts_what_the_definition_accepts(seed):
    state, other, slots, width = columns(seed=seed), columns(seed=seed), torch.tensor([4, 1, 0, 6]), 12
    drawn, logits = torch.randint(-2, width + 2, (4,)), torch.randn(4, width)
    logits[seed % 4, 0] = (torch.nan, torch.inf, 0.0)[seed % 3]
    rows = step.rows_of(state, slots, state.known[slots], 40)
    want = step.accept(state, rows, drawn, sampling.bad_rows(logits), width)
    given, out = drawn.clone(), torch.zeros(3, 4, dtype=torch.int32)
    commit(slots, given, best_of_tiles(logits), other, out, width)
    assert torch.equal(given, want[0]) and [x.tolist() for x in out] == [x.tolist() for x in want]
    for name in ("tokens", "known", "stopped"):
        assert torch.equal(getattr(state, name), getattr(other, name)), name
