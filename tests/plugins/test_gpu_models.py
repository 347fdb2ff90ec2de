"""Models on a CUDA device: router hooks and the fallback in captured steps, and the blocks that a window keeps."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import greedy as by_argmax
import numpy as np
import pytest
import torch
import transformers
from greedy import hf_greedy, prompts
from test_transformers_fallback import OTHERS, greedy, make

from minivllm import LLM, SamplingParams, Tap
from minivllm.device.layers.experts import route
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.testing.tiny import save, small_config, tiny_dir, tiny_model

pytestmark = pytest.mark.gpu
HERE = __name__
GONE = [1, 4]
SIZES = {"device": "cuda", "max_num_seqs": 8, "num_kvcache_blocks": 200, "skip_tokenizer_init": True}
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i * i + 3 * i + n) % 61 for i in range(n)] for n in (24, 7, 40)]


class Pruned(Qwen3Moe):
    """The example of docs/taps.md: two experts of each layer are left out, the others counted."""

    last: Pruned

    def build(self, cfg, parts):
        table = self.describe(cfg)
        mlp = table.layers[0].mlp
        gone = torch.zeros(mlp.count, dtype=parts.dtype, device=parts.device)
        gone[GONE] = -torch.inf
        experts = torch.arange(mlp.count, device=parts.device)
        self.counts = torch.zeros(len(table.layers), mlp.count, dtype=torch.long, device=parts.device)
        Pruned.last = self

        def hook(layer, logits, weights, ids):
            weights, ids = route(logits + gone, mlp.chosen, mlp.router)
            self.counts[layer] += (ids.flatten()[:, None] == experts).sum(0)
            return weights, ids

        return parts.decoder(replace(table, router_hook=hook))


@contextmanager
def counting(llm):
    """How many steps ran captured, by kind, and how many ran at all (``all``)."""
    runner, seen = llm.engine.executor.runner, Counter()
    if runner.graphs is None:
        yield seen
        return
    forward, replay = runner.forward, runner.graphs.forward

    def one(plan):
        seen["all"] += 1
        return forward(plan)

    def captured(key, *args):
        made = replay(key, *args)
        seen[type(key).__name__, key.kind] += made is not None
        return made

    runner.forward, runner.graphs.forward = one, captured
    yield seen
    runner.forward, runner.graphs.forward = forward, replay


def play(llm, prompts, taps=None):
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, False, taps)
    assert [out.error for out in outs] == [None] * len(outs)
    return outs


def test_a_router_hook_and_taps_of_experts_run_in_captured_steps(tmp_path):
    path = str(tiny_dir(tmp_path, "qwen3_moe")[0])
    more = {"model_arch": f"{HERE}:Pruned", "allow_targets": [HERE], "dtype": "float32", **SIZES}
    read = [Tap(f"layers.{i}.{what}", read=True) for i in (0, 1) for what in ("router", "experts")]
    taps, found = [read, [], [Tap("layers.1.router", add=[0, 0, 0, 0, 90, 100]), *read]], []
    for options in ({}, {"graph": "off"}):
        with LLM(model=path, **more, **options) as llm:
            with torch.inference_mode():
                Pruned.last.counts.zero_()
            if options:
                found.append(play(llm, PROMPTS, taps))
            else:
                with counting(llm) as seen:
                    for _ in range(2):
                        found.append(play(llm, PROMPTS, taps))
                assert not llm.engine.executor.runner.graphs.notes
                assert seen["TappedKey", "decode"] >= 40
            counts = Pruned.last.counts.cpu()
            assert not counts[:, GONE].any() and (counts.sum(1) > 0).all()
    for outs in found:
        for out, want in zip(outs, found[-1], strict=True):
            assert out.tokens == want.tokens
            for point, x in (want.taps or {}).items():
                assert np.abs(out.taps[point] - x).max() < 1e-3, point
                if point.endswith("experts"):
                    assert not set(np.unique(x)) & set(GONE)


WAYS = [{}, {"max_num_batched_tokens": 40}, {"graph": "off"}, {"kv_format": "int8"}]
FAMILIES = {
    "BloomForCausalLM": {"hidden_size": 192, "num_attention_heads": 3},
    "FalconForCausalLM": {"hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2, "alibi": True,
                          "new_decoder_architecture": True},
    "MptForCausalLM": {"hidden_size": 128, "num_attention_heads": 2, "max_seq_len": 512},
    "GPTNeoForCausalLM": {"hidden_size": 128, "num_attention_heads": 2, "window_size": 20},
    "StableLmForCausalLM": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "Ministral3ForCausalLM": {
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 16.0, "llama_4_scaling_beta": 0.5,
                            "original_max_position_embeddings": 32}},
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 40}, {"graph": "off"}, {"kv_format": "int8"}], ids=str
)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_slopes_groups_unscaled_windows_and_growing_queries_give_the_tokens_of_transformers(
    architecture, options, tmp_path
):
    cls = getattr(transformers, architecture)
    config = small_config(cls.config_class, max_position_embeddings=512, **FAMILIES[architecture])
    model = tiny_model(config, 0, cls)
    save(model, tmp_path)
    items = prompts(61, (5, 33, 70, 301))
    want = [hf_greedy(model, p) for p in items]
    with LLM(model=str(tmp_path), dtype="float32", **SIZES, **options) as llm:
        for what in ("prefill", "prefix hits"):
            found = by_argmax.tokens(llm, items)
            same = sum(a == b for got, hf in zip(found, want, strict=True) for a, b in zip(got, hf, strict=True))
            assert found == want or (options.get("kv_format") == "int8" and same >= 64), what


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["gpt_neox", "exaone4", "olmoe", "deepseek_v3"])
def test_the_fallback_gives_what_transformers_gives_in_captured_steps(model_type, dtype, tmp_path):
    path, hf = make(tmp_path, model_type, **OTHERS[model_type][0])
    want = [greedy(hf, p, 40) for p in PROMPTS]
    with LLM(model=path, dtype=dtype, **SIZES) as llm, counting(llm) as seen:
        assert llm.engine.wiring.parts["model"].name == "minivllm/transformers"
        for _ in range(2):
            found = [out.tokens for out in play(llm, PROMPTS)]
            assert found == want or dtype == "bfloat16"
    assert seen["GraphKey", "decode"] >= 70


@pytest.mark.parametrize("which", ["pairs", "norms", "gate", "draw"])
def test_torchs_operations_in_the_place_of_one_kind_of_kernels_give_nearly_the_same_logits(which, tmp_path):
    folder, params = str(tiny_dir(tmp_path, "qwen3")[0]), replace(GREEDY, max_tokens=1, logprobs=5)
    found = []
    for unfused in ([], [which]):
        with LLM(folder, unfused=unfused, **SIZES) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([sorted(one.logprob for one in o.outputs[0].logprobs[0].values()) for o in outputs])
    for fused, plain in zip(*found, strict=True):
        assert np.allclose(fused, plain, atol=0.05), which


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_norm_before_the_addition_has_the_bits_that_two_kernels_have(dtype):
    from minivllm.device.kernels.norm import add_rms_norm  # Triton is not everywhere that these tests are read

    draw = lambda *size: torch.randn(*size, device="cuda")  # noqa: E731
    for tokens, dim in ((3, 64), (40, 2304), (5, 5376)):
        x, stream = draw(tokens, dim).to(dtype), draw(tokens, dim).to(dtype)
        first, weight = draw(dim).abs() + 0.5, draw(dim).abs() + 0.5
        want, _ = add_rms_norm(x, None, first, 1e-6)
        want, wanted_stream = add_rms_norm(want, stream.clone(), weight, 1e-6)
        got, got_stream = add_rms_norm(x, stream.clone(), weight, 1e-6, first, 1e-6)
        assert torch.equal(got, want) and torch.equal(got_stream, wanted_stream)


def test_of_a_prompt_of_32k_a_window_keeps_its_own_blocks_alone(tmp_path):
    path = str(
        tiny_dir(
            tmp_path,
            "qwen2",
            use_sliding_window=True,
            sliding_window=512,
            max_window_layers=0,
            max_position_embeddings=40_000,
        )[0]
    )
    prompt = [(7 * i * i + 3 * i) % 61 for i in range(32_000)]
    sizes = {**SIZES, "num_kvcache_blocks": 400, "max_num_batched_tokens": 2048, "max_model_len": 33_000}
    with LLM(model=path, dtype="bfloat16", enable_prefix_caching=False, **sizes) as llm:
        least, engine = [], llm.engine
        step = engine.step

        def stepped(*args, **kw):
            received = step(*args, **kw)
            stats = engine.stats()
            least.append((stats["blocks_total"] - stats["blocks_free"]) * engine.wiring.block)
            return received

        engine.step = stepped
        (out,) = play(llm, [prompt])
        assert len(out.tokens) == 40 and max(least) <= 2 * 2048 + 512 + 64 and 0 < min(least[-20:-4]) <= 512 + 64
