"""Taps: what is read equals what transformers' hooks see, each position once; what is added changes its row alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from devices import DEVICE
from greedy import hf_greedy, prompts, tokens

from minivllm import LLM, AsyncLLM, RequestError, SamplingParams, Tap
from minivllm.device.layers.decoder import Decoder
from minivllm.testing.sim import at_rest
from minivllm.testing.tiny import save, small_config, tiny_model

torch.set_num_threads(1)
NEAR = 1e-4
SMALL = dict(
    skip_tokenizer_init=True, dtype="float32", device=DEVICE, max_model_len=96, max_num_seqs=6, kvcache_block_size=8
)
AROUND = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
PLAIN = {"attention": "self_attn", "mlp": "mlp"}
# architecture -> fields of its config, and the modules of a layer whose output the branches give to the stream
FAMILIES = {
    "Llama": ({"attention_bias": True}, PLAIN),
    "Qwen3": ({}, PLAIN),
    "Gemma3": ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}, AROUND),
    "Cohere": ({}, PLAIN),
    "Olmo2": ({}, AROUND),
    "Glm4": (
        {"pad_token_id": 0},
        {"attention": "post_self_attn_layernorm", "mlp": "post_mlp_layernorm"},
    ),
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, {"attention": "self_attn", "mlp": "fc2"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Create (folder, transformers' model) of a name at its first use."""
    made = {}

    def get(name):
        if name not in made:
            cls = getattr(transformers, f"{name}ForCausalLM")
            model = tiny_model(small_config(cls.config_class, **FAMILIES[name][0]), cls=cls)
            made[name] = str(save(model, tmp_path_factory.mktemp(name))), model
        return made[name]

    return get


def first(out):
    return out[0] if isinstance(out, tuple) else out


def hooked(model, branches, ids, add=None):
    """What transformers has at each point for these token ids, [tokens, width].  ``add``: point of a residual stream ->
    vector that a hook adds there."""
    inner = getattr(model.model, "decoder", model.model)
    seen, hooks = {}, []

    def after(module, point):
        def hook(_, args, out):
            x = first(out)
            seen[point] = (x[0] if x.dim() == 3 else x).clone()

        hooks.append(module.register_forward_hook(hook))

    def before(module, *points):
        def hook(_, args, kwargs):
            x = args[0] if args else kwargs["hidden_states"]
            seen.update(dict.fromkeys(points, x[0].clone()))

        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    for i, layer in enumerate(inner.layers):
        name = f"layers.{i}."
        before(layer, name + "input", *(["embedding"] if i == 0 else []))
        after(layer, name + "residual")
        for x in "qkv":
            projection = getattr(layer.self_attn, f"{x}_proj", None)
            if projection is not None:
                after(projection, name + x)
        for branch, module in branches.items():
            after(getattr(layer, module), name + branch)
    after(inner.norm if hasattr(inner, "norm") else inner.final_layer_norm, "norm")
    try:
        with torch.inference_mode():
            seen["logits"] = model(torch.tensor([ids])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return {point: x.float().numpy() for point, x in seen.items()}


def everything(llm):
    return [Tap(point, read=True) for point in llm.tap_points()]


def read_as_hooked(model, branches, prompt, out):
    """Check that every point equals transformers' value at every position."""
    want = hooked(model, branches, prompt + out.token_ids[:-1])
    want["logits"] = want["logits"][len(prompt) - 1 :]
    assert set(out.taps) == set(want)
    for point, got in out.taps.items():
        assert got.dtype == np.float32 and got.shape == want[point].shape, point
        assert np.abs(got - want[point]).max() <= NEAR, point


@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_every_point_are_those_of_transformers_hooks(models, name):
    folder, model = models(name)
    items = prompts(61, [19, 7, 1])
    with LLM(folder, **SMALL, max_num_batched_tokens=10) as llm:
        points = llm.tap_points()
        assert next(iter(points)) == "embedding" and list(points)[-2:] == ["norm", "logits"]
        taps = [everything(llm), [], everything(llm)]
        outs = llm.generate(items, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), False, taps)
        assert outs[1].taps is None
        for prompt, out in zip(items[::2], outs[::2], strict=True):
            assert {point: x.shape[1] for point, x in out.taps.items()} == points
            read_as_hooked(model, FAMILIES[name][1], prompt, out.outputs[0])


WAYS = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 6},
    "run-ahead": {"run_ahead": 2},
    "preempted": {"num_kvcache_blocks": 14, "run_ahead": 1},
    "process": {"executor": "process", "run_ahead": 1, "num_kvcache_blocks": 14},
    "drafts beside them": {"drafter": "ngram", "speculate": "always"},
    "invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_position_is_read_once_however_the_request_runs(models, way):
    """Beside rows without taps, twice, so that the second time the prompts are in the prefix cache."""
    folder, model = models("Llama")
    items = prompts(61, [40, 17, 25, 3, 30, 9], seed=3)
    points = ["layers.0.q", "layers.1.input", "layers.1.residual", "logits"]
    taps = [[Tap(p, read=True) for p in points] if i % 2 == 0 else [] for i in range(len(items))]
    with LLM(folder, **{**SMALL, **WAYS[way]}) as llm:
        for _ in range(2):
            outs = llm.generate(items, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), False, taps)
            for prompt, own, out in zip(items, taps, outs, strict=True):
                assert out.tokens == hf_greedy(model, prompt, 20) and out.error is None
                if not own:
                    assert out.taps is None
                    continue
                assert out.metrics.cached_tokens == 0
                want = hooked(model, PLAIN, prompt + out.tokens[:-1])
                want["logits"] = want["logits"][len(prompt) - 1 :]
                for point in points:
                    assert out.taps[point].shape == want[point].shape, point
                    assert np.abs(out.taps[point] - want[point]).max() <= NEAR, point
        assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in WAYS[way])
        at_rest(llm.engine)


def test_what_a_reading_request_has_computed_others_find_in_the_prefix_cache(models):
    folder, _ = models("Llama")
    prompt = prompts(61, [33])[0]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(folder, **SMALL) as llm:
        llm.generate([prompt], params, False, [Tap("norm", read=True)])
        assert llm.generate([prompt], params, False)[0].metrics.cached_tokens == 32


@pytest.mark.parametrize("extra", [{"n": 2}, {"n": 3, "guidance_scale": 1.5}], ids=["forked", "guided"])
@pytest.mark.parametrize("blocks", [60, 16])
def test_each_branch_of_a_request_has_the_prompts_values_and_its_own(models, extra, blocks):
    folder, model = models("Qwen3")
    items = prompts(61, [21, 9, 12], seed=4)
    more = {"strategies": ["single", "parallel", "guidance"], "run_ahead": 1, "num_kvcache_blocks": blocks}
    params = SamplingParams.make(seed=5, max_tokens=24, ignore_eos=True, **extra)
    with LLM(folder, **{**SMALL, **more}) as llm:
        read = [Tap("layers.1.mlp", read=True), Tap("logits", read=True)]
        outs = llm.generate(items, params, False, read)
        assert (llm.stats()["preemptions"] > 0) == (blocks < 60)
        for prompt, out in zip(items, outs, strict=True):
            assert out.error is None and len({tuple(o.token_ids) for o in out.outputs}) > 1
            for one in out.outputs:
                want = hooked(model, PLAIN, prompt + one.token_ids[:-1])
                assert one.taps["layers.1.mlp"].shape == want["layers.1.mlp"].shape
                assert np.abs(one.taps["layers.1.mlp"] - want["layers.1.mlp"]).max() <= NEAR
                assert np.abs(one.taps["logits"] - want["logits"][len(prompt) - 1 :]).max() <= NEAR
            assert out.taps is out.outputs[0].taps


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_kvcache_blocks": 12}], ids=str)
def test_logits_are_read_at_each_token_of_a_prompt_that_is_scored(models, options):
    folder, model = models("Gemma3")
    items = prompts(61, [23, 1, 14, 9], seed=12)
    wanted = [{"prompt_logprobs": 0, "n": 2}, {"prompt_logprobs": 0}, {}, {"prompt_logprobs": 1}]
    params = [SamplingParams(seed=1, max_tokens=16, ignore_eos=True, **more) for more in wanted]
    with LLM(folder, **{**SMALL, **options}) as llm:
        outs = llm.generate(items, params, False, [Tap("logits", read=True), Tap("norm", read=True)])
        assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in options)
    for prompt, more, out in zip(items, wanted, outs, strict=True):
        for one in out.outputs:
            want = hooked(model, AROUND, prompt + one.token_ids[:-1])
            first = 0 if more else len(prompt) - 1
            assert one.taps["logits"].shape == want["logits"][first:].shape
            assert np.abs(one.taps["logits"] - want["logits"][first:]).max() <= NEAR
            assert np.abs(one.taps["norm"] - want["norm"]).max() <= NEAR


@pytest.mark.parametrize("slots", [2, 4])
def test_branches_that_begin_after_the_prompt_was_scored_have_its_logits_too(models, slots):
    """With two slots and guides the second branch begins when the first has ended."""
    folder, _ = models("Llama")
    params = SamplingParams(n=2, prompt_logprobs=1, seed=1, max_tokens=5, ignore_eos=True, guidance_scale=1.5)
    taps = [Tap("logits", read=True), Tap("norm", read=True)]
    prompt = prompts(61, [23])[0]
    with LLM(folder, **{**SMALL, "strategies": ["guidance", "parallel"], "max_num_seqs": slots}) as llm:
        out = llm.generate([prompt], params, False, taps)[0]
    for one in out.outputs:
        assert one.taps["logits"].shape == (27, 61) and one.taps["norm"].shape == (27, 32)
    first, second = (one.taps["logits"][:22] for one in out.outputs)
    assert np.array_equal(first, second)


# ---- what is added ---------------------------------------------------------------------------------------------------


def vector(seed, width=32, size=0.5):
    return size * np.random.default_rng(seed).standard_normal(width)


def steered_greedy(model, prompt, layer, added, n=32):
    """Return transformers' tokens with a hook that adds a vector to the output of a layer."""
    inner = getattr(model.model, "decoder", model.model)

    def hook(_, args, out):
        x = first(out) + torch.tensor(added, dtype=torch.float32)
        return (x, *out[1:]) if isinstance(out, tuple) else x

    handle = inner.layers[layer].register_forward_hook(hook)
    try:
        return hf_greedy(model, prompt, n)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Cohere", "OPT"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 6, "run_ahead": 2}, {"num_kvcache_blocks": 14}, {"executor": "process"}],
    ids=["plain", "chunks", "preempted", "process"],
)
def test_a_steered_row_equals_transformers_with_a_hook_and_its_neighbours_are_as_they_were(models, name, options):
    if options and name != "Llama":
        pytest.skip("one architecture in every way to run")
    folder, model = models(name)
    items = prompts(61, [23, 12, 31, 8], seed=6)
    a, b = vector(1), vector(2)
    taps = [[Tap("layers.0.residual", add=a, scale=2)], [], [Tap("layers.1.residual", add=torch.tensor(b))], []]
    with LLM(folder, **{**SMALL, **options}) as llm:
        plain = tokens(llm, items)
        llm.reset_prefix_cache()
        for _ in range(2):
            outs = llm.generate(items, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), False, taps)
            assert outs[0].tokens == steered_greedy(model, items[0], 0, 2 * a) != plain[0]
            assert outs[2].tokens == steered_greedy(model, items[2], 1, b) != plain[2]
            assert [outs[1].tokens, outs[3].tokens] == [plain[1], plain[3]]
            assert [out.taps for out in outs] == [None] * 4
        assert (llm.stats()["preemptions"] > 0) == ("num_kvcache_blocks" in options)
        assert tokens(llm, items) == plain  # nobody is steered who follows in the slots
        at_rest(llm.engine)


def test_several_vectors_at_a_point_add_up_and_are_read_with_what_they_add(models):
    folder, model = models("Qwen3")
    (prompt,) = prompts(61, [15], seed=7)
    taps = [
        Tap("layers.0.residual", add=vector(1).tolist(), scale=2),
        Tap("layers.0.residual", add=vector(2), read=True),
        Tap("layers.0.mlp", read=True),
        Tap("layers.1.input", read=True),
    ]
    added = 2 * vector(1) + vector(2)
    with LLM(folder, **SMALL) as llm:
        out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), False, taps)[0]
    assert out.tokens == steered_greedy(model, prompt, 0, added, 8)
    want = hooked(model, PLAIN, prompt + out.tokens[:-1])
    assert np.abs(out.taps["layers.0.residual"] - want["layers.0.residual"] - added).max() <= NEAR
    assert np.abs(out.taps["layers.0.mlp"] - want["layers.0.mlp"]).max() <= NEAR
    assert (out.taps["layers.1.input"] == out.taps["layers.0.residual"]).all()


def test_a_vector_at_each_point_changes_what_comes_behind_it_and_nothing_before(models):
    folder, _ = models("Cohere")
    (prompt,) = prompts(61, [9], seed=8)
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(folder, **SMALL) as llm:
        points = llm.tap_points()
        plain = llm.generate([prompt], params, False, everything(llm))[0].taps
        for i, (point, width) in enumerate(list(points.items())[:-1]):
            taps = [*everything(llm), Tap(point, add=vector(i, width))]
            got = llm.generate([prompt], params, False, taps)[0].taps
            same = [p for p in points if np.array_equal(got[p], plain[p])]
            assert np.abs(got[point] - plain[point] - vector(i, width)).max() <= NEAR
            layer = point.split(".")[1] if "." in point else None
            beside = {f"layers.{layer}.{x}" for x in ("q", "k", "v", "attention", "mlp")}  # they do not see each other
            assert set(same) >= set(list(points)[:i]) - beside and "logits" not in same, point
            assert set(same) <= set(list(points)[:i]) | beside, point


@pytest.mark.parametrize("extra", [{"n": 3}, {"beam_width": 3}], ids=["forked", "beams"])
def test_branches_and_beams_are_steered_as_their_request(models, extra):
    folder, model = models("Llama")
    items = prompts(61, [14, 20], seed=9)
    added = vector(3)
    params = SamplingParams.make(max_tokens=10, temperature=0, ignore_eos=True, **extra)
    with LLM(folder, **SMALL) as llm:
        steered, plain = llm.generate(items, params, False, [[Tap("layers.0.residual", add=added)], []])
        if "n" in extra:
            assert {tuple(o.token_ids) for o in steered.outputs} == {
                tuple(steered_greedy(model, items[0], 0, added, 10))
            }
        unsteered = llm.generate(items, params, False)
        assert unsteered[1].tokens == plain.tokens and unsteered[0].tokens != steered.tokens


def test_equally_steered_requests_share_prefixes_and_others_do_not(models):
    folder, _ = models("Llama")
    (prompt,) = prompts(61, [33], seed=10)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(*taps):
        return llm.generate([prompt], params, False, list(taps))[0].metrics.cached_tokens

    add = vector(4)
    with LLM(folder, **SMALL) as llm:
        assert [cached(), cached()] == [0, 32]
        assert [cached(Tap("layers.0.residual", add=add)), cached(Tap("layers.0.residual", add=add))] == [0, 32]
        assert cached(Tap("layers.0.residual", add=add / 2, scale=2.0)) == 32
        assert [cached(Tap("layers.0.residual", add=add, scale=s)) for s in (1.5, -1)] == [0, 0]
        assert cached(Tap("layers.1.residual", add=add)) == 0 and cached() == 32


# ---- what is refused, and what is too much ---------------------------------------------------------------------------


def test_what_cannot_be_tapped_is_refused_by_name(models):
    folder, _ = models("Llama")
    ids = prompts(61, [5])[0]
    for taps, says in (
        ([Tap("layers.9.residual", read=True)], r"no point 'layers\.9\.residual'.*tap_points.*Did you mean 'layers"),
        ([Tap("layers.0.residual", add=[1.0])], r"a vector of 1 numbers for layers\.0\.residual; expected 32"),
        (
            [Tap("logits", add=[0.0] * 61)],
            "own logits cannot add a vector; use it with read=True only",
        ),
        ([Tap("norm", add=[3e38] * 32, scale=9)], "norm has values out of the range of float32"),
        ("norm", "taps of str; expected a list of Tap"),
        (["norm"], "expected a list of Tap"),
        ([[], []], "2 lists of taps for 1 prompts"),
    ):
        with LLM(folder, **SMALL) as llm, pytest.raises(RequestError, match=says) as e:
            llm.generate([ids], SamplingParams(max_tokens=1), False, taps)
        assert e.value.param == "taps"
    with (
        LLM(folder, **SMALL) as llm,
        pytest.raises(RequestError, match="values cannot be read in a request"),
    ):
        llm.generate([ids], SamplingParams.make(beam_width=2, max_tokens=2), False, [Tap("norm", read=True)])
    with LLM(folder, **{**SMALL, "executor": "sim"}) as llm:
        assert llm.tap_points() == {}
        with pytest.raises(RequestError, match="the executor Sim does not support taps"):
            llm.generate([ids], SamplingParams(max_tokens=1), False, [Tap("norm", read=True)])


def test_a_model_that_overrides_its_call_has_no_points_until_it_says_so(models, monkeypatch):
    class Own(Decoder):
        def __call__(self, step):
            return super().__call__(replace(step, logits_indices=None))

    monkeypatch.setattr("minivllm.device.layers.parts.Decoder", Own)
    folder, _ = models("Llama")
    with LLM(folder, **SMALL) as llm:
        assert llm.tap_points() == {}
        with pytest.raises(RequestError, match="the model minivllm/llama has no tap points"):
            llm.generate([[1, 2]], SamplingParams(max_tokens=1), False, [Tap("norm", read=True)])


def test_a_point_that_a_model_names_and_passes_nothing_through_fails_the_step_by_its_name(models, monkeypatch):
    folder, _ = models("Llama")
    with LLM(folder, **SMALL) as llm:
        block = llm.engine.executor.runner.model.blocks[1]
        block.tapped = block.__call__
        (out,) = llm.generate([[1, 2]], SamplingParams(max_tokens=1), False, [Tap("layers.1.mlp", read=True)])
        assert out.finish_reason == "error" and "names the tap point 'layers.1.mlp'" in out.error
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1), False)[0].error is None


def test_coroutines_read_and_steer_too(models):
    folder, model = models("Llama")
    (prompt,) = prompts(61, [12], seed=11)

    async def main():
        llm = AsyncLLM(folder, **SMALL)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        taps = [Tap("layers.0.residual", add=vector(5)), Tap("norm", read=True)]
        pieces = [piece async for piece in llm.generate(prompt, params, taps=taps)]
        llm.close()
        return pieces[-1].output

    out = asyncio.run(main())
    assert out.tokens == steered_greedy(model, prompt, 0, vector(5), 6) and out.taps["norm"].shape == (17, 32)


@pytest.mark.parametrize(
    "values",
    [
        {"point": ""}, {"point": 3}, {"point": "a"}, {"point": "a", "read": 1},
        {"point": "a", "read": True, "scale": "2"}, {"point": "a", "read": True, "scale": 2.0},
        *({"point": "a", "add": x} for x in ([], [[1.0]], "x", [1.0, float("nan")], [1e300], [1j], [None], 3.0)),
        *({"point": "a", "add": [1.0], "scale": s} for s in (float("inf"), None, True)),
    ],
    ids=str,
)  # fmt: skip
def test_a_tap_of_the_wrong_kind_is_refused_when_it_is_made(values):
    with pytest.raises(RequestError, match=r"taps: .*expected") as e:
        Tap(**values)
    assert e.value.param == "taps"


def test_a_request_that_says_no_number_of_tokens_reads_up_to_the_longest(models):
    folder, _ = models("Llama")
    with LLM(folder, **{**SMALL, "max_model_len": 48}) as llm:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        (out,) = llm.generate(prompts(61, [3]), params, False, [Tap("norm", read=True)])
    assert out.finish_reason == "length" and len(out.outputs[0].taps["norm"]) == 47
