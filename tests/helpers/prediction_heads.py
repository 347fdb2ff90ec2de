"""Heads of tiny random models, and references of them from modules of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from minivllm.core.interfaces.plan import group_rows
from minivllm.device.layers.native_drafts import NativeDrafts
from minivllm.device.worker.drafting import Drafting
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
        self.of_images = cfg.model_type.startswith("qwen3_5")
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
            position_embeddings=self.rope(x, self.of_rope(positions)),
            attention_mask=causal(len(ids)),
            position_ids=positions,
        )
        x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)[0]

    def of_rope(self, positions):
        """Return positions [1, T] in the shape that the model's rope takes: [3, 1, T] for that of images."""
        return positions.expand(3, 1, -1) if self.of_images else positions

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


class Eagle3Reference(torch.nn.Module):
    """An EAGLE-3 head for 40 of the model's tokens that is computed from the whole text for each draft."""

    def __init__(self, model, layers, received=True, drafted=40, seed=7):
        super().__init__()
        self.of, self.layers, self.received = model.config, layers, received
        size, vocab = model.config.hidden_size, model.config.vocab_size
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
        sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 256, "tie_word_embeddings": False}
        self.cfg = cfg = LlamaConfig(vocab_size=vocab, hidden_size=size, **sizes)
        linear = lambda inp, out: torch.nn.Linear(inp, out, bias=False)  # noqa: E731
        self.fc = linear(len(layers) * size, size)
        self.midlayer = torch.nn.ModuleDict(
            {
                "self_attn": torch.nn.ModuleDict(
                    {
                        "q_proj": linear(2 * size, 32),
                        "k_proj": linear(2 * size, 16),
                        "v_proj": linear(2 * size, 16),
                        "o_proj": linear(32, size),
                    }
                ),
                "mlp": LlamaMLP(cfg),
                "hidden_norm": LlamaRMSNorm(size),
                "input_layernorm": LlamaRMSNorm(size),
                "post_attention_layernorm": LlamaRMSNorm(size),
            }
        )
        self.norm, self.lm_head = LlamaRMSNorm(size), linear(size, drafted)
        torch.manual_seed(seed)
        ids = torch.randperm(vocab)[:drafted].sort()[0]
        self.register_buffer("d2t", ids - torch.arange(drafted))
        self.register_buffer("t2d", torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True))
        self.rope, self.model = LlamaRotaryEmbedding(cfg), [model]
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.normal_(0, 0.3 if p.dim() > 1 else 0.1)
                if "norm" in name:
                    p.add_(1)

    def states(self, ids, states):
        """Return the states [T, H] of pairs: the embeddings of ids [T] and states [T, H]."""
        layer, n = self.midlayer, len(ids)
        embedding = self.model[0].get_input_embeddings()(ids)
        x = torch.cat([layer["input_layernorm"](embedding), layer["hidden_norm"](states)], -1)
        q, k, v = (layer["self_attn"][f"{name}_proj"](x).view(n, -1, 8).transpose(0, 1)[None] for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rope(x, torch.arange(n)[None]))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) * 8**-0.5 + causal(n)
        y = (scores.softmax(-1) @ v)[0].transpose(0, 1).reshape(n, -1)
        x = states + layer["self_attn"]["o_proj"](y)
        return x + layer["mlp"](layer["post_attention_layernorm"](x))

    def of_rope(self, positions):
        """Return positions [1, T] in the shape that the model's rope takes: [3, 1, T] for that of images."""
        return positions.expand(3, 1, -1) if self.of_images else positions

    @torch.no_grad()
    def drafts(self, tokens, k):
        """Return k greedy drafts behind known tokens."""
        found = self.model[0](torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        states = self.fc(torch.cat([found[i][0] for i in self.layers], -1))
        ids, drafts = torch.tensor(tokens[1:]), []
        for _ in range(k):
            last = self.states(ids, states)[-1]
            best = int(self.lm_head(self.norm(last)).argmax())
            drafts.append(best + int(self.d2t[best]))
            states, ids = torch.cat([states, last[None]]), torch.cat([ids, torch.tensor(drafts[-1:])])
        return drafts

    def write(self, folder, change=None, **config):
        """Write the files of the head, as published ones; ``change`` replaces tensors, and None leaves one out."""
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        outputs = [i - 1 for i in self.layers]
        more = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs}} if self.received else {}
        values = {**self.cfg.to_dict(), "draft_vocab_size": len(self.d2t), **more, **config}
        values["architectures"] = ["LlamaForCausalLMEagle3"]
        (folder / "config.json").write_text(json.dumps(values))
        tensors = {**self.state_dict(), **(change or {})}
        kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        return folder


def watch_drafts(monkeypatch, prompts=(), want=()):
    """Return a list to which each proposal of a drafter appends (known tokens, drafts) of its rows.

    Drafts of random heads are rarely right.  So every other call returns the right tokens instead, which the engine
    accepts: ``want`` has the tokens of the answer to each of ``prompts``.  Native calls end no drafts early.
    """
    found, calls = [], itertools.count()
    texts = [prompt + answer[0] for prompt, answer in zip(prompts, want, strict=True)]

    def note(state, slots, known, counts):
        replaces = bool(texts) and next(calls) % 2
        for slot, n, k in zip(slots, known, counts, strict=True):
            history = state.tokens[slot]
            row, drafts = history[:n].tolist(), history[n : n + k].tolist()
            if n > 1:
                found.append((row, drafts))
            text = next((text for text in texts if text[:n] == row), row)
            right = text[n : n + k]
            if replaces:
                history[n : n + len(right)] = torch.tensor(right, dtype=torch.int32)

    def propose(self, running, ask, original=Drafting.propose):
        count = original(self, running, ask)
        if count is None:
            return None
        known = self.state.known[torch.from_numpy(ask.slots).long()].tolist()  # the host may have upper bounds
        assert count.tolist() == [ask.k * (n > 1) for n in known]
        note(self.state, ask.slots.tolist(), known, [ask.k] * len(known))
        return count

    def draft(self, original=NativeDrafts.draft):
        counts = original(self)
        if counts is None:
            return None
        rows = int(self._box[0])
        slots, computed, draft = self._box[1 : 1 + 3 * rows].reshape(3, rows)
        first, heads = group_rows(draft)
        sizes = np.bincount(first, minlength=rows)[heads] - 1
        known = computed[heads] + 1
        assert counts.tolist() == np.where(known > 1, sizes, 0).tolist()
        note(self.steps.state, slots[heads].tolist(), known.tolist(), sizes.tolist())
        return counts

    monkeypatch.setattr(NativeDrafts, "least", 0.0)
    monkeypatch.setattr(NativeDrafts, "draft", draft)
    monkeypatch.setattr(Drafting, "propose", propose)
    return found
