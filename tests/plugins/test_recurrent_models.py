"""Models with recurrent layers against transformers: whole, chunked, batched, hit, forked, preempted, drafted."""

from __future__ import annotations

import json
import re
from typing import ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minivllm import LLM, SamplingParams, explain
from minivllm.cli import main
from minivllm.core.interfaces.drafter import Drafter
from minivllm.device.native import library
from minivllm.errors import ConfigError, ModelError, PluginError, ResourceError

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe")
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "num_experts": 6,
    "num_experts_per_tok": 2,
}  # fmt: skip
CONVOLUTIONS = {
    "head_dim": 8, "conv_L_cache": 4, "block_multiple_of": 16, "num_dense_layers": 1, "norm_topk_prob": True,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip
TOKENS = 12


def make(folder, family, **values):
    """Write a tiny random model, and return it as transformers' object."""
    torch.manual_seed(0)
    sizes = {**SIZES, **(CONVOLUTIONS if family.startswith("lfm2") else {}), **values}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
            elif p.dim() > 1:
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 * 1.5)
            elif "dt_bias" in name:
                p.copy_(torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if "expert_bias" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(folder)
    return model


def greedy(model, prompt, tokens=TOKENS):
    """Return greedy tokens, each computed from the whole sequence."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def draw(generator, n):
    return torch.randint(3, 61, (n,), generator=generator).tolist()


class Case:
    """A model with prompts of one beginning and others, and the tokens that follow each."""

    def __init__(self, folder, family):
        self.folder, self.family = str(folder), family
        self.model = make(folder, family)
        g = torch.Generator().manual_seed(4)
        begin, again = draw(g, 37), draw(g, 5) * 6
        prompts = [draw(g, 1), draw(g, 4), draw(g, 19), begin + draw(g, 9), begin + draw(g, 22), again, draw(g, 70)]
        self.want = [(prompt, greedy(self.model, prompt)) for prompt in prompts]
        prompt, answer = self.want[3]
        self.turn = [*prompt, *answer, *draw(g, 6)]
        self.want.append((self.turn, greedy(self.model, self.turn)))

    def check(self, llm, **params):
        """Compare all prompts at once, and return the number of tokens that prefix hits saved."""
        found = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in self.want],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, **params),
            use_tqdm=False,
        )
        for (prompt, want), output in zip(self.want, found, strict=True):
            for branch in output.outputs:
                assert list(branch.token_ids) == want, f"prompt of {len(prompt)} tokens: {branch}"
        llm.check()
        return sum(output.num_cached_tokens for output in found)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp(request.param), request.param)


def engine(case, **options):
    options = {"max_num_seqs": 8, "max_model_len": 160, "dtype": "float32", **options}
    return LLM(case.folder, skip_tokenizer_init=True, **options)


WAYS = {
    "whole": {},
    "without a prefix cache": {"enable_prefix_caching": False},
    "chunked, rows wait": {"max_num_seqs": 3, "max_num_batched_tokens": 9, "kvcache_block_size": 8},
    "blocks of 4, run ahead": {"kvcache_block_size": 4, "run_ahead": 2},
    "preempted": {"num_kvcache_blocks": 12, "kvcache_block_size": 16},
    "two checkpoints": {"num_state_checkpoints": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers_however_a_request_is_computed(case, way):
    llm = engine(case, **WAYS[way])
    try:
        cached = [case.check(llm) for _ in range(3)]
        assert case.check(llm, n=2) >= 0
        assert (cached[-1] > 0) == (way != "without a prefix cache")
        assert way != "preempted" or llm.stats()["preemptions"]
    finally:
        llm.close()


class Oracle(Drafter):
    """Proposes the tokens that follow, and a wrong one now and then."""

    sequences: ClassVar[list[list[int]]] = []

    def propose(self, ask):
        drafts = torch.zeros(len(ask.slots), ask.k, dtype=torch.int64)
        for row, history in enumerate(ask.rows.history()):
            known = int(ask.known[row])
            begun = history[:known].tolist()
            whole = next((one for one in self.sequences if one[:known] == begun), begun)
            for j, token in enumerate(whole[known : known + ask.k]):
                drafts[row, j] = token if (known + j) % 3 else (token + 1) % 61
        device = ask.rows.position.device
        return drafts.to(device), torch.full((len(ask.slots),), ask.k, device=device)


@pytest.mark.parametrize("tokens", [1, 4])
def test_rejected_drafts_change_no_token(case, tokens, monkeypatch):
    monkeypatch.setattr(Oracle, "sequences", [prompt + answer for prompt, answer in case.want])
    llm = engine(case, drafter=Oracle, num_speculative_tokens=tokens, speculate="always")
    try:
        for _ in range(2):
            case.check(llm)
        drafts = llm.stats()["speculation"]
        assert drafts["proposed"] > drafts["accepted"] > 0
    finally:
        llm.close()


def test_beams_are_those_of_an_engine_that_preempts_them(case):
    prompt, found = case.want[4][0], []
    params = SamplingParams(beam_width=3, n=3, temperature=0, max_tokens=6, ignore_eos=True)
    for options in ({}, {"num_kvcache_blocks": 14, "kvcache_block_size": 8, "max_num_seqs": 6}):
        llm = engine(case, max_model_len=96, **options)
        try:
            outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, params, use_tqdm=False)
            found += [[list(beam.token_ids) for beam in output.outputs] for output in outputs]
        finally:
            llm.close()
    assert all(beams == found[0] for beams in found) and len(set(map(tuple, found[0]))) == 3
    scores = []
    for beam in found[0]:
        with torch.no_grad():
            logits = case.model(torch.tensor([[*prompt, *beam]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        scores.append(sum(float(row[token]) for row, token in zip(logits, beam, strict=True)))
    assert scores == sorted(scores, reverse=True)


def test_processes_share_a_model_with_states(case):
    llm = engine(case, tensor_parallel_size=2, executor="multiprocess")
    try:
        for _ in range(2):
            case.check(llm)
        size = llm.stats()["states"]["bytes_per_sequence"]
        text = explain(case.folder, skip_tokenizer_init=True, dtype="float32").text("model")
        assert f"recurrent state: {size / 1024:.1f} KiB for each" in text
    finally:
        llm.close()


@pytest.mark.parametrize(("options", "says"), [
    ({}, "; as many checkpoints as fit are taken at the start"),
    ({"num_state_checkpoints": 10}, ", and 10 checkpoints (15.0 KiB)"),
    ({"enable_prefix_caching": False}, ", and no checkpoints"),
])  # fmt: skip
def test_explain_has_the_bytes_and_the_numbers_of_states(options, says, tmp_path):
    make(tmp_path, "lfm2")
    found = explain(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, **options).text("model")
    line = next(line for line in found.splitlines() if line.startswith("model.states"))
    assert line.partition("states")[2].strip() == (
        "3 of 4 layers have a recurrent state: 1.5 KiB for each of 9 states (max_num_seqs and a spare one, 13.5 KiB)"
        + says
    )


def test_the_explanation_names_the_states_of_a_draft_model(tmp_path):
    make(tmp_path, "lfm2")
    drafter = {"name": "model", "options": {"model": str(tmp_path)}}
    options = {"dtype": "float32", "max_num_seqs": 8, "drafter": drafter, "num_speculative_tokens": 2}
    found = explain(str(tmp_path), skip_tokenizer_init=True, **options).text()
    line = next(line for line in found.splitlines() if line.startswith("draft_model.states"))
    assert line.partition("states")[2].strip() == (
        "3 of 4 layers have a recurrent state: 1.5 KiB for each of 18 states "
        "(two for each of max_num_seqs slots and a spare one, 27.0 KiB)"
    )


def test_bench_memory_names_what_the_states_take(tmp_path, capsys):
    make(tmp_path, "lfm2")
    sizes = {"max_num_seqs": 4, "num_kvcache_blocks": 32, "num_state_checkpoints": 5, "dtype": "float32"}
    options = [f"--set={name}={value}" for name, value in sizes.items()]
    command = ["bench", "memory", f"--set=model={tmp_path}", "--set=skip_tokenizer_init=true", *options]
    assert main([*command, "--num-prompts", "2", "--output-len", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state_bytes_per_request"], found["state_checkpoints"]) == (1536, 5)
    assert found["state_bytes"] == (5 + 5) * 1536


def test_a_wrapper_with_images_is_served_as_text(tmp_path):
    model = make(tmp_path, "qwen3_5_text")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_num_seqs=2, max_model_len=64)
    try:
        prompt = [5, 6, 7, 8]
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        found = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert list(found[0].outputs[0].token_ids) == greedy(model, prompt, 5)
    finally:
        llm.close()


@pytest.mark.parametrize(("values", "says"), [
    ({"linear_num_value_heads": 3}, "linear_num_value_heads=3: expected a multiple of linear_num_key_heads=2"),
    ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0: expected a whole number >= 1"),
    ({"layer_types": ["linear_attention"] * 4}, "expected at least one layer with attention"),
    ({"layer_types": ["full_attention"] * 3}, "`num_hidden_layers` (4) must be equal"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu': expected 'silu'"),
])  # fmt: skip
def test_a_config_that_describes_no_model_is_refused_by_its_field(values, says, tmp_path):
    make(tmp_path, "qwen3_5_text")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | values))
    with pytest.raises(ModelError, match=re.escape(says)):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize(("values", "says"), [
    ({"conv_L_cache": 0}, "conv_L_cache=0: expected a whole number >= 1"),
    ({"block_multiple_of": 0}, "block_multiple_of=0: expected a whole number >= 1"),
    ({"layer_types": ["conv"] * 4}, "expected at least one layer with attention"),
    ({"layer_types": ["conv", "conv", "full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
])  # fmt: skip
def test_a_convolution_that_describes_no_model_is_refused_by_its_field(values, says, tmp_path):
    make(tmp_path, "lfm2")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | values))
    with pytest.raises(ModelError, match=re.escape(says)):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize("values", [{"conv_bias": True}, {"conv_L_cache": 1}, {"block_auto_adjust_ff_dim": False}])
def test_convolutions_with_biases_of_one_token_and_beside_an_mlp_of_its_own_width(values, tmp_path):
    model = make(tmp_path, "lfm2", **values)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 4}
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, **options)
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        found = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert list(found[0].outputs[0].token_ids) == greedy(model, prompt, 8)
    finally:
        llm.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_the_same_alone_and_in_a_batch(family, tmp_path):
    if not family.startswith("lfm2") and library.load() is None:
        pytest.skip(f"the native part: {library.why_not()}")
    case, found = Case(tmp_path, family), []
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in case.want]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    for options in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 24, "kvcache_block_size": 8, "run_ahead": 1}):
        llm = engine(case, batch_invariant=True, **options)
        try:
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                found.append([output.outputs[0].cumulative_logprob for output in outputs])
        finally:
            llm.close()
    assert all(numbers == found[0] for numbers in found) and len(set(found[0])) == len(prompts)


def test_without_the_native_part_bits_that_do_not_depend_on_the_batch_are_refused(tmp_path, monkeypatch):
    make(tmp_path, "qwen3_5_text")
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "why_not", lambda: "not built")
    with pytest.raises(
        PluginError, match=r"x minivllm/qwen3_5 +device with batch_invariant: expected cpu, supports \{cuda\}"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True, batch_invariant=True)


def test_checkpoints_of_a_model_without_states_are_refused():
    with pytest.raises(ConfigError, match="num_state_checkpoints=4: the model has no recurrent states"):
        LLM("pocket", num_state_checkpoints=4)


def test_checkpoints_without_a_prefix_cache_are_refused(tmp_path):
    make(tmp_path, "qwen3_5_text")
    with pytest.raises(ConfigError, match="num_state_checkpoints=4: enable_prefix_caching=false uses no checkpoints"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_state_checkpoints=4, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"kvstore: num_state_checkpoints=0 .* expected 1 or more, or -1"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_state_checkpoints=0, kvstore="cpu")


def test_states_without_room_are_refused_with_their_size(tmp_path):
    make(tmp_path, "qwen3_5_text")
    with pytest.raises(ResourceError, match=r"recurrent states of max_num_seqs=16 requests and .* checkpoints, .* GiB"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_num_seqs=16, num_state_checkpoints=10**9)


@pytest.fixture(scope="module", params=["qwen3_5_text", "lfm2"])
def small(request, tmp_path_factory):
    """A model with states, other weights of its shape, and a model without states."""
    case = Case(tmp_path_factory.mktemp(request.param), request.param)
    other = make(tmp_path_factory.mktemp("other"), request.param)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    other.save_pretrained(folder := tmp_path_factory.mktemp("moved"))
    return case, str(folder)


WAYS_OF_DRAFTS = {
    "whole": {},
    "chunked, rows wait": {"max_num_seqs": 3, "max_num_batched_tokens": 12, "kvcache_block_size": 8},
    "preempted": {"num_kvcache_blocks": 14, "kvcache_block_size": 16},
}


@pytest.mark.parametrize("way", WAYS_OF_DRAFTS)
def test_drafts_of_a_model_with_states_change_no_token(small, way):
    """The model itself as draft model: all its drafts are accepted.  Other weights: some are rejected."""
    case, other = small
    for folder, all_right in ((case.folder, True), (other, False)):
        drafter = {"name": "model", "options": {"model": folder}}
        llm = engine(case, drafter=drafter, num_speculative_tokens=3, speculate="always", **WAYS_OF_DRAFTS[way])
        try:
            for _ in range(2):
                case.check(llm)
            case.check(llm, n=2)
            found = llm.stats()["speculation"]
            assert found["proposed"] and (found["accepted"] == found["proposed"]) == all_right, found
            assert all_right or found["accepted"]
        finally:
            llm.close()


def test_a_model_without_states_takes_the_drafts_of_one_with_states(small, tmp_path):
    case, _ = small
    model = make(tmp_path, "qwen3")
    drafter = {"name": "model", "options": {"model": case.folder}}
    options = {"max_num_seqs": 4, "max_model_len": 160, "dtype": "float32", "num_speculative_tokens": 3}
    with LLM(str(tmp_path), skip_tokenizer_init=True, drafter=drafter, speculate="always", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        prompts = [prompt for prompt, _ in case.want]
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        for prompt, output in zip(prompts, found, strict=True):
            assert list(output.outputs[0].token_ids) == greedy(model, prompt)
        assert llm.stats()["speculation"]["proposed"]


def test_a_state_that_does_not_fit_its_row_ends_the_request_and_no_other(tmp_path):
    make(tmp_path, "qwen3_5_text")
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_num_seqs=2, max_model_len=64, dtype="float32")
    try:
        memory = llm.engine.executor.runner.state.recurrent
        of_step = memory.of_step

        def stale(slots, start, *args):
            if int(start.max()) == 3:  # the second step
                memory.valid[int(slots[0])] += 1
            return of_step(slots, start, *args)

        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        good = llm.generate({"prompt_token_ids": [4, 5, 6]}, params, use_tqdm=False)[0].outputs[0]
        memory.of_step = stale
        prompts = [{"prompt_token_ids": [4, 5, 6]}] * 2
        found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
        assert [one.finish_reason for one in found] == ["error", "length"]
        assert found[0].token_ids == good.token_ids[:1] and found[1].token_ids == good.token_ids
    finally:
        llm.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_embeddings_equal_those_of_transformers(tmp_path, family):
    """There are two rounds, so that the second finds states of prefixes, with chunks of 16 tokens."""
    model = make(tmp_path, family)
    prompts = [[(7 * i + n) % 61 for i in range(n)] for n in (1, 5, 17, 40)]
    with torch.no_grad():
        outputs = [model(torch.tensor([ids]), output_hidden_states=True) for ids in prompts]
    states = [out.hidden_states[-1][0] for out in outputs]
    options = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), skip_tokenizer_init=True, kvcache_block_size=4, **options) as llm:
        for kind in ("last", "mean", "last"):
            found = llm.embed(prompts, kind, normalize=False, use_tqdm=False)
            for out, state in zip(found, states, strict=True):
                expected = state.mean(0) if kind == "mean" else state[-1]
                assert (torch.tensor(out.outputs.embedding) - expected).abs().max() < 1e-5
