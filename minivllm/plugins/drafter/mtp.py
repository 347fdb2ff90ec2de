"""Drafts of the head for next-token prediction (MTP) that a checkpoint holds, as Qwen3.5's do (``mtp.*``).

The head reads the hidden states of the model behind its last norm, and the embedding of the next token.  It is one
decoder layer, with the embedding and output layer of the model.  It is applied once for each draft."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import DecoderSpec
from minivllm.core.interfaces.drafter import Ask, Head, HeadFiles
from minivllm.core.interfaces.model import Model, ModelArch, Parts, Rule, decoder_rules
from minivllm.errors import ModelError

from .model import ModelDrafter

if TYPE_CHECKING:
    from torch import Tensor

ROOT = "mtp."
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # keys of config.json for the number of layers of a head
OWN = {"fc": "fc", "pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm"}


class MTP(ModelDrafter):
    """A drafter that uses the checkpoint's own prediction head.  It draws each draft with the random numbers that the
    row will use for the same position."""

    native = 1  # whether compiled CPU code can compute these drafts: 1 means a head of one layer

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        tokens, count = super().propose(ask)
        # no draft for the first token, which has no preceding hidden state
        return tokens, count.where(ask.rows.position > 1, 0)

    @classmethod
    def head(cls, options: Any, files: HeadFiles, target: ModelArch, cfg: Any) -> Head:
        return Head(PredictionArch(target, cfg), _one_layer(cfg), ("norm",))


class PredictionArch(ModelArch):
    """The head of a model whose architecture is ``target``.

    Its layer is like the model's last layer with attention.
    """

    def __init__(self, target: ModelArch, cfg: Any) -> None:
        self.target, self.target_cfg = target, cfg

    def describe(self, cfg: Any) -> DecoderSpec:
        """Return the description of the head's layers.  ModelError if the model has no such description, or if the head
        has several layers."""
        if type(self.target).describe is ModelArch.describe:
            raise ModelError(f"the model {type(self.target).__name__} has no table of layers; use another drafter")
        for key in COUNTS:
            count = getattr(cfg, key, None)
            if count not in (None, 1):
                raise ModelError(f"{key}={count}: the head has several layers; expected one, or another drafter")
        spec = self.target.describe(self.target_cfg)
        layer = spec.layers[-1]
        attention = None
        for one in spec.layers:
            if isinstance(one.attention, AttnSpec):
                layer, attention = one, one.attention
        if attention is None or attention.window is not None:
            raise ModelError("the last layer with attention has a sliding window; use another drafter")
        return replace(spec, layers=(layer,), embed_norm=False, positions=0)

    def build(self, cfg: Any, parts: Parts) -> Model:
        from minivllm.device.layers.heads import PredictionHead

        return PredictionHead(self.describe(cfg), parts)  # type: ignore[arg-type]

    def weights(self, cfg: Any) -> Sequence[Rule]:
        spec = self.describe(cfg)
        names = replace(spec.names, layer=f"{ROOT}layers.{{i}}.", norm=ROOT + "norm")
        rules = decoder_rules(replace(spec, names=names))
        mine = [rule for rule in rules if rule.source.startswith(ROOT)]
        mine += [Rule(ROOT + source, module) for source, module in OWN.items()]
        # Names of the model's tensors that the head uses too.
        others = [replace(rule, module=None) for rule in self.target.weights(self.target_cfg)]
        # Some checkpoints contain a second copy of the embedding and of the output head, which is ignored.
        return [*mine, Rule(ROOT + "embed_tokens", None), Rule(ROOT + "lm_head", None), *others]


def _one_layer(cfg: Any) -> Any:
    """Return a copy of the model's config with one layer, as the head has."""
    own = copy.copy(cfg)
    own.num_hidden_layers = 1
    return own
