"""The models of the fuzzer, which are written once for all processes.

Their shapes differ most in their GPU kernels.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from . import adapters
from .configs import HEADED, VOCAB

OTHER = "-other"  # ends the name of a folder with the other set of weights
HEADS = {
    "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "moe_intermediate_size": 32,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "llama": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "qwen2": {
        "hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1,
    },
    # norms before and after, a rotary embedding for each type of layer
    "gemma3": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 3,
        "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    # a part of each head rotates, with other frequencies in requests of more than 60 tokens
    "phi3": {
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
        "original_max_position_embeddings": 60,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 60, "short_factor": [1.0 + i / 32 for i in range(16)],
            "long_factor": [2.0 + i / 4 for i in range(16)]},
    },
    # attention in parallel to the MLP, layers without positions
    "cohere2": {
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "logit_scale": 0.5,
        "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"],
    },
    # LayerNorm and learned positions
    "gpt2": {"hidden_size": 128, "num_attention_heads": 2},
    # mixtures of experts
    "mixtral": {**HEADS, "intermediate_size": 64, "num_experts": 4},
    "qwen2_moe": {**HEADS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen3_moe": {**HEADS, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
    # sinks, a window in every other layer, YaRN
    "gpt_oss": {
        **HEADS, "intermediate_size": 64, "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 16.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    # ALiBi, a head for each query head
    "mpt": {"hidden_size": 128, "num_attention_heads": 2, "max_seq_len": 1024},
    # ALiBi, attention in parallel to the MLP, shared KV heads, q, k and v by groups
    "falcon": {
        "hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True,
        "alibi": True,
    },
    # recurrent states in three of four layers, a gate after attention, a part of each head rotates
    "qwen3_5": {
        **HEADS, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    },
    # short convolutions in every other layer
    "lfm2": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4},
    # unscaled scores, learned positions, a window in every other layer
    "gpt_neo": {"hidden_size": 128, "num_attention_heads": 2, "window_size": 20, "num_hidden_layers": 2},
}  # fmt: skip


def make(folder: Path) -> None:
    """Write each model, its other set of weights, and a draft model that is often right.

    The other weights are those of the model with noise.  The draft model has them too, and no window.  Both sets of a
    model in ``HEADED`` hold the same head for next-token prediction."""
    import torch
    from prediction_heads import MTPReference
    from safetensors.torch import save_file

    import minivllm.pocket
    from minivllm.testing import tiny

    def config(family: str, **more: Any) -> Any:
        sizes = {"vocab_size": VOCAB[family], "intermediate_size": 96, "max_position_embeddings": 1024}
        return tiny.small_config(tiny.CONFIGS[family], **{**sizes, **SHAPES[family], **more})

    for family, shape in SHAPES.items():
        model = tiny.tiny_model(config(family), seed=len(family))
        tiny.save(model, folder / family)
        adapters.write(folder / family, model.state_dict(), transposed=family == "gpt2")
        whole: dict[str, Any] = {"use_sliding_window": False} if "use_sliding_window" in shape else {}
        if "layer_types" in shape:
            whole["layer_types"] = ["full_attention"] * len(shape["layer_types"])
        if "window_size" in shape:
            whole["attention_types"] = [[["global"], shape["num_hidden_layers"]]]
        draft = tiny.tiny_model(config(family, **whole))
        draft.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.manual_seed(1)
            for p in draft.parameters():
                p += 0.02 * torch.randn_like(p)
        tiny.save(draft, folder / f"{family}-draft")
        heads = [MTPReference(model)] if family in HEADED else []
        model.load_state_dict(draft.state_dict())
        tiny.save(model, folder / f"{family}{OTHER}")
        for head in heads:
            head.write(folder / family)
            head.write(folder / f"{family}{OTHER}")
    pocket = Path(minivllm.pocket.__file__).parent / "model"
    adapters.write(folder / "pocket", tiny.read_tensors(pocket))
    shutil.copytree(pocket, folder / f"pocket{OTHER}")
    torch.manual_seed(2)
    changed = {name: x * (1 + 0.1 * torch.randn_like(x)) for name, x in tiny.read_tensors(pocket).items()}
    save_file(changed, folder / f"pocket{OTHER}" / "model.safetensors", metadata={"format": "pt"})
    (folder / "done").touch()


def path_of(folder: Path, model: str, weights: int = 0) -> str:
    """Return the name or folder of a model with one of its sets of weights, for ``LLM``."""
    return model if model == "pocket" and not weights else str(weights_of(folder, model, weights))


def weights_of(folder: Path, model: str, weights: int) -> Path:
    """Return the folder of a model's set of weights, 0 or 1."""
    import minivllm.pocket

    if weights:
        return folder / f"{model}{OTHER}"
    return Path(minivllm.pocket.__file__).parent / "model" if model == "pocket" else folder / model


def draft_of(folder: Path, model: str) -> str:
    return "pocket-draft" if model == "pocket" else str(folder / f"{model}-draft")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
