"""The models of the fuzzer, written once for all its processes: the shapes that differ most in how a GPU runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .configs import VOCAB

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "llama": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
    "qwen2": {
        "hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1,
    },
}  # fmt: skip


def make(folder: Path) -> None:
    """Write each model, and a draft model that is often right: the model with noise, and without a window."""
    import torch

    from minivllm.testing import tiny

    for family, shape in SHAPES.items():
        values = {**tiny.SMALL, "vocab_size": VOCAB[family], "intermediate_size": 96, "max_position_embeddings": 1024}
        if family == "qwen2":
            values.pop("head_dim")
        model = tiny.tiny_model(tiny.CONFIGS[family](**{**values, **shape}), seed=len(family))
        tiny.save(model, folder / family)
        whole = {"use_sliding_window": False} if "use_sliding_window" in shape else {}
        draft = tiny.tiny_model(tiny.CONFIGS[family](**{**values, **shape, **whole}))
        draft.load_state_dict(model.state_dict())
        with torch.no_grad():
            torch.manual_seed(1)
            for p in draft.parameters():
                p += 0.02 * torch.randn_like(p)
        tiny.save(draft, folder / f"{family}-draft")
    (folder / "done").touch()


def path_of(folder: Path, model: str) -> str:
    return model if model == "pocket" else str(folder / model)


def draft_of(folder: Path, model: str) -> str:
    return "pocket-draft" if model == "pocket" else str(folder / f"{model}-draft")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
