"""Adapters made by PEFT for tiny models, steering vectors, and the answers of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from devices import DEVICE

from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.testing.tiny import quiet

VOCAB = 61
PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 38, 4, 6]


def write_adapter(model: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a random adapter for a model of transformers with PEFT, and leave the model unchanged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    with quiet():
        adapted = get_peft_model(model, LoraConfig(**options))
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "lora_" in name:
                    p.normal_(0, 0.15)
        adapted.save_pretrained(folder)
        adapted.unload()
    return folder


# layers whose outputs IA3 scales, and those whose inputs it scales, by the last part of their names
OUTPUTS = ("q_proj", "k_proj", "v_proj", "up_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn", "dense", "in_proj")
INPUTS = ("o_proj", "down_proj", "dense_4h_to_h", "out_proj", "w2", "mlp.c_proj", "gate_up_proj")


def write_ia3(model: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Let PEFT write random factors (IA3) for a model of transformers, and leave the model as it was."""
    from peft import IA3Config, get_peft_model

    torch.manual_seed(seed)
    options = {"target_modules": [*OUTPUTS, *INPUTS], "feedforward_modules": [*INPUTS], **config}
    with quiet():
        adapted = get_peft_model(model, IA3Config(**options))
        with torch.no_grad():
            for name, p in adapted.named_parameters():
                if "ia3_" in name:
                    p.normal_(1, 0.3)
        adapted.save_pretrained(folder)
        adapted.unload()
    return folder


def write_steering(folder: Path, vectors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write a folder of vectors by tap point."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "STEERING", **config}))
    save_file(vectors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def expected(model: Any, folder: Path | None, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities [T, V] of PEFT's model, of the base model for ``folder`` None."""
    from peft import PeftModel

    if folder is None:
        return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    with quiet():
        adapted = PeftModel.from_pretrained(model, folder)
        found = adapted(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        adapted.unload()
    return found


def engine(folder: Path, **options: Any) -> LLM:
    """Return an engine for a tiny model that serves adapters."""
    base = {
        "dtype": "float32", "device": DEVICE, "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 128,
        "max_num_batched_tokens": 64, "kvcache_block_size": 4, "num_kvcache_blocks": 200, "max_logprobs": -1,
        "enable_lora": True,
    }  # fmt: skip
    return LLM(model=str(folder), **{**base, **options})


def lora(folder: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(folder.name, number, str(folder))


def difference(output: Any, reference: torch.Tensor, tokens: list[int]) -> float:
    """Return the largest difference of the log-probabilities of a prompt's and generated tokens."""
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    largest = 0.0
    for row, wanted in zip(rows, reference, strict=False):
        found = torch.tensor([row[i].logprob for i in range(len(wanted))], dtype=torch.float64)
        largest = max(largest, (found - wanted).abs().max().item())
    assert len(rows) == len(tokens) - 1
    return largest


def all_scores(tokens: int = 8, **options: Any) -> SamplingParams:
    """Return greedy parameters that request all log-probabilities."""
    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=VOCAB, prompt_logprobs=VOCAB, **options
    )
