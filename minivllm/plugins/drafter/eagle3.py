"""Drafts of an EAGLE-3 head (Li et al., arXiv:2503.01840) in its published files.

The files are config.json and safetensors with ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``.  The
head reads the hidden states before three layers of the model, and the embedding of the next token.  Its output layer
has a part of the vocabulary, which ``d2t`` maps to token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minivllm.core.interfaces.decoder import DecoderSpec, WeightNames
from minivllm.core.interfaces.drafter import Head, HeadFiles
from minivllm.core.interfaces.model import Model, ModelArch, Parts, Rule, decoder_rules
from minivllm.errors import ModelError, shown
from minivllm.plugins.model.llama import Llama

from .mtp import MTP

IDS = "eagle_aux_hidden_state_layer_ids"
# Settings of config.json that must be true, because other values are not implemented.
NEEDED = ("use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer")
LAYERS = ("midlayer.", "layers.0.")  # prefixes that the tensors of the head's only layer may have
SOURCES = {"hidden_norm": "hidden_norm", "input_layernorm": "layers.0.norm1"}


class Eagle3(MTP):
    """A drafter that uses the layers of a separate EAGLE-3 head.  It draws each draft with the random numbers that the
    row will use for the same position."""

    @classmethod
    def head(cls, options: Any, files: HeadFiles, target: ModelArch, cfg: Any) -> Head:
        if not options.model:
            raise ModelError("its option 'model' is not set; expected the directory or Hugging Face id of a head")
        arch = EagleArch(cfg, files.names or ())
        arch.check(files.cfg)
        layers = _layers_read(files.cfg, cfg)
        return Head(arch, files.cfg, tuple(f"layers.{i}.input" for i in layers))


class EagleArch(ModelArch):
    """An EAGLE-3 head for a model with the config object ``target``.  ``names`` are the names of the head's tensors."""

    def __init__(self, target: Any, names: Sequence[str]) -> None:
        self.target = target
        self.prefix = LAYERS[0]
        for name in names:
            if name.startswith(LAYERS[1]):
                self.prefix = LAYERS[1]
        self.embeds = "embed_tokens.weight" in names
        self.maps = [name for name in ("d2t", "t2d") if name in names]

    def check(self, cfg: Any) -> None:
        """Raise ModelError if the head does not belong to the model, or has a form that is not implemented."""
        if cfg.model_type != "llama" or cfg.num_hidden_layers != 1:
            found = f"model_type={shown(cfg.model_type)} with {cfg.num_hidden_layers} layers"
            raise ModelError(f"the head has {found}; expected 'llama' with one layer, as EAGLE-3 has it")
        if cfg.vocab_size != self.target.vocab_size:
            expected = f"expected {self.target.vocab_size}, as the model has: the head belongs to another model"
            raise ModelError(f"the head has vocab_size={cfg.vocab_size}; {expected}")
        if not self.embeds and cfg.hidden_size != self.target.hidden_size:
            expected = f"expected {self.target.hidden_size}, as the model has, or an embedding of its own"
            raise ModelError(f"the head has hidden_size={cfg.hidden_size}; {expected}")
        if getattr(cfg, "norm_before_residual", False):
            raise ModelError("the head has norm_before_residual=true, which is not implemented; use another head")
        nested = _nested(cfg)
        for name in NEEDED:
            if nested.get(name, getattr(cfg, name, None)) is False:
                raise ModelError(f"the head has {name}=false, which is not implemented; use another head")
        drafted = self._drafted(cfg)
        if type(drafted) is not int or not 1 <= drafted <= cfg.vocab_size:
            raise ModelError(f"draft_vocab_size={shown(drafted)}: expected 1 to {cfg.vocab_size}")
        if drafted < cfg.vocab_size and "d2t" not in self.maps:
            raise ModelError(f"draft_vocab_size={drafted} is a part of the vocabulary: expected a tensor d2t")

    def _drafted(self, cfg: Any) -> Any:
        """Return the number of tokens in the vocabulary of the head's output layer."""
        found = getattr(cfg, "draft_vocab_size", None)
        return cfg.vocab_size if found is None else found

    def describe(self, cfg: Any) -> DecoderSpec:
        return Llama().describe(cfg)

    def build(self, cfg: Any, parts: Parts) -> Model:
        from minivllm.device.layers.heads import EagleHead

        layers = _layers_read(cfg, self.target)
        states = len(layers) * self.target.hidden_size
        drafted = self._drafted(cfg)
        spec = self.describe(cfg)
        return EagleHead(spec, parts, states, drafted, self.maps, self.embeds)  # type: ignore[arg-type]

    def weights(self, cfg: Any) -> Sequence[Rule]:
        spec = self.describe(cfg)
        rules = []
        for rule in decoder_rules(spec):
            source = rule.source.removeprefix(WeightNames.layer)
            if source not in (rule.source, "input_layernorm"):
                rules.append(replace(rule, source=self.prefix + source))
        for source, module in SOURCES.items():
            rules.append(Rule(self.prefix + source, module))
        rules += [Rule(name, name) for name in ("fc", "norm", "lm_head")]
        rules += [Rule(name, "map", param=name) for name in self.maps]
        return [*rules, Rule("embed_tokens", "embed" if self.embeds else None)]


def _layers_read(cfg: Any, target: Any) -> tuple[int, ...]:
    """Return the layers of the model whose input hidden states a head reads.  ModelError for impossible layers.

    A list at the top of config.json has these numbers, as in vLLM.  A list in ``eagle_config`` has the numbers of the
    layers whose outputs are read, as in SpecForge and SGLang.  Without a list, or with empty ones, the layers are those
    of EAGLE-3.
    """
    count = target.num_hidden_layers
    inner = _layer_list(_nested(cfg).get(IDS), "eagle_config." + IDS, 0, count - 2)
    outer = _layer_list(getattr(cfg, IDS, None), IDS, 1, count - 1)
    inputs = [index + 1 for index in inner]
    if inner and outer and inputs != outer:
        found = f"{IDS}={outer} names other layers than eagle_config.{IDS}={inner}"
        raise ModelError(f"{found}, which are outputs: expected {inputs}, or one of the two lists")
    usual = [2, count // 2, count - 3]
    return tuple(inputs or outer or _layer_list(usual, "the layers of EAGLE-3", 1, count - 1))


def _layer_list(found: Any, name: str, least: int, most: int) -> list[int]:
    """Return a list of different layer numbers from ``least`` to ``most``, which is empty for None."""
    if found is None:
        return []
    numbers = isinstance(found, list) and all(type(index) is int and least <= index <= most for index in found)
    if not numbers or len(set(found)) < len(found):
        raise ModelError(f"{name}={shown(found)}: expected a list of different layers from {least} to {most}")
    return found


def _nested(cfg: Any) -> dict[str, Any]:
    """Return the object ``eagle_config`` of config.json, {} if it is missing.  ModelError if it is no object."""
    found = getattr(cfg, "eagle_config", None)
    if not isinstance(found, dict | None):
        raise ModelError(f"eagle_config={shown(found)}: expected an object")
    return found or {}
