"""The text model of checkpoints that hold encoders, too: what transformers' whole model gives for text alone."""

from __future__ import annotations

import random
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING
from transformers.models.aria import modeling_aria
from wrapper_models import LAYOUTS, NATIVE, OTHERS, PROMPT, body_of, greedy, logits, make, relay

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError

SIZES = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64,
    "max_model_len": 64, "skip_tokenizer_init": True,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, prompt_logprobs=0)
QUICK = ("gemma3", "qwen2_5_vl", "qwen3_vl_moe", "llava")


def answer(path, **more):
    """Return (16 greedy tokens, log-probabilities of the prompt's tokens, notes) of an engine that agrees with
    ``explain``."""
    explained = minivllm.explain(str(path), **SIZES, **more)
    assert explained.error is None
    with LLM(model=str(path), **SIZES, **more) as llm:
        out = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)[0]
        notes = llm.engine.executor.runner.worker.notes
    skipped = [text for what, text in explained.notes if what == "model.skipped"]
    assert [note for note in notes if "not loaded" in note] == skipped, "explain and the loader disagree"
    return list(out.outputs[0].token_ids), [next(iter(d.values())).logprob for d in out.prompt_logprobs[1:]], skipped


def same(path, hf, **more):
    tokens, found, skipped = answer(path, **more)
    ref = logits(hf, PROMPT)
    assert ref.std() > 0.5, "the test has no power"
    wanted = ref.log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    assert (torch.tensor(found) - wanted).abs().max() < 1e-3
    assert tokens == greedy(hf, PROMPT, 16)
    return skipped


def count(sentences):
    return sum(int(re.search(r"(\d+) tensors", text)[1]) for text in sentences)


@pytest.mark.parametrize(
    "model_type",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in sorted((*NATIVE, *OTHERS))],
)
def test_the_text_model_gives_what_the_whole_gives_for_text(model_type, tmp_path):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    hf = make(tmp_path, model_type)
    if model_type == "aria" and hasattr(modeling_aria, "sequential_experts_gemm"):
        # up to transformers 5.17, Aria's experts copy the numbers of their tokens to the host
        with pytest.raises(ModelError, match="AriaTextForCausalLM cannot run without values of tensors on the host"):
            answer(tmp_path)
        return
    skipped = same(tmp_path, hf)
    text = sum(name.startswith((body_of(hf), "lm_head.")) for name in hf.state_dict())
    text -= hf.lm_head.weight is hf.get_input_embeddings().weight
    stored = len(load_file(tmp_path / "model.safetensors"))
    if model_type in NATIVE and "moe" not in model_type and "hybrid" not in model_type:
        assert count(skipped) == stored - text, "every tensor is of the text model or reported"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(NATIVE))
def test_the_fallback_serves_the_same_text_models(model_type, tmp_path):
    same(tmp_path, make(tmp_path, model_type), model_impl="transformers")


def drawn(seed, path):
    """Return (transformers' model, tensors outside of the text model or None) of a random family, config and layout."""
    r = random.Random(seed)
    family = r.choice(sorted(NATIVE))
    tied, layout = r.random() < 0.5, r.choice(sorted(LAYOUTS))
    text = {
        "num_hidden_layers": r.choice((1, 2, 3)),
        "num_key_value_heads": r.choice((1, 2, 4)),
        "intermediate_size": r.choice((48, 40)),
        "tie_word_embeddings": tied,
    }
    hf = make(path, family, seed, text, tie_word_embeddings=tied)
    return family, hf, layout, relay(path, hf, layout)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))])
def test_any_layout_of_any_family_is_read(seed, tmp_path):
    family, hf, layout, others = drawn(seed, tmp_path)
    try:
        assert count(same(tmp_path, hf)) == others
    except BaseException as exc:
        exc.add_note(f"{family}, {layout}")
        raise
