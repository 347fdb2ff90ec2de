"""Heads of tiny random models, and references of them from modules of transformers."""

from __future__ import annotations

import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from minivllm.testing.tiny import read_tensors, write_tensors

CLASSES = {
    "qwen3_5_text": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding),
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


def causal(n):
    return torch.full((n, n), -torch.inf).triu(1)[None, None]


class MTPReference(torch.nn.Module):
    """A head that is computed from the whole text for each draft."""

    def __init__(self, model):
        super().__init__()
        cfg = model.config
        layer, norm, rope = CLASSES[cfg.model_type]
        index = max(i for i, kind in enumerate(cfg.layer_types) if kind == "full_attention")
        self.pre_fc_norm_embedding = norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([layer(cfg, index)])
        self.norm = norm(cfg.hidden_size, cfg.rms_norm_eps)
        self.rope, self.model = rope(cfg), [model]
        torch.manual_seed(7)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.normal_(0, 0.3 if p.dim() > 1 else 0.1)
                if "norm" in name and cfg.model_type == "qwen3":
                    p.add_(1)

    def states(self, ids, hidden):
        """Return the states [T, H] of pairs: the embeddings of ids [T] and hidden states [T, H]."""
        model = self.model[0]
        embedding = model.get_input_embeddings()(ids)
        both = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, -1))[None]
        positions = torch.arange(len(ids))[None]
        x = self.layers[0](
            x,
            position_embeddings=self.rope(x, positions),
            attention_mask=causal(len(ids)),
            position_ids=positions,
        )
        x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)[0]

    @torch.no_grad()
    def drafts(self, tokens, k):
        """Return k greedy drafts behind known tokens."""
        model = self.model[0]
        hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        ids, found = torch.tensor(tokens[1:]), []
        for _ in range(k):
            last = self.states(ids, hidden)[-1]
            found.append(int(model.lm_head(last).argmax()))
            hidden = torch.cat([hidden, last[None]])
            ids = torch.cat([ids, torch.tensor(found[-1:])])
        return found

    def write(self, folder):
        """Add the tensors of the head to a checkpoint."""
        own = {f"mtp.{name}": tensor for name, tensor in self.state_dict().items()}
        write_tensors(folder, {**read_tensors(folder), **own})
