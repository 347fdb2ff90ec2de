"""Wrong model architectures: ``Llama`` or ``Qwen2`` with one fault each."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.core.interfaces.decoder import AFTER
from minivllm.core.interfaces.model import ModelArch, Rule
from minivllm.device.layers import fields
from minivllm.device.layers.decoder import Decoder
from minivllm.errors import ModelError
from minivllm.plugins.model.llama import Llama
from minivllm.plugins.model.qwen2 import Qwen2
from minivllm.plugins.model.spec import WINDOWS
from minivllm.registration.spec import ANY, Spec

SEAM = "model"
CLAIMS = "test_every_claimed_architecture_and_model_type_is_served"
CONFIGS = "test_each_config_gives_the_logits_of_transformers_or_is_refused"
TENSORS = "test_each_checkpoint_tensor_does_what_it_does_in_transformers"
CUT = "test_logits_do_not_depend_on_how_a_sequence_is_cut_nor_on_its_neighbours"
FIELDS = "test_every_field_of_the_config_is_read_or_ignored_for_a_reason"
CHANGED = "test_a_changed_number_changes_what_it_changes_in_transformers"
REFUSED = "test_a_tensor_that_is_missing_misshapen_or_unknown_is_refused_by_name"
GREEDY = "test_32_greedy_tokens_equal_transformers"
FAULTS = {
    "IgnoresRopeScaling": (CONFIGS,),
    "FixedEps": (CONFIGS, CHANGED),
    "NeverTied": (CONFIGS,),
    "AlwaysTied": (CLAIMS, CONFIGS, GREEDY),
    "HeadDimFromHidden": (CONFIGS,),
    "ForgetsBias": (CONFIGS, FIELDS),
    "SwapsGateAndUp": (CLAIMS, CONFIGS, TENSORS),
    "SwapsKAndV": (CLAIMS, CONFIGS, TENSORS),
    "NormLeftAtOnes": (CLAIMS, CONFIGS, TENSORS),
    "LoadsTwice": (CLAIMS, CONFIGS),
    "IgnoresWindow": (CONFIGS, CHANGED),
    "WindowInEveryLayer": (CONFIGS,),
    "NormAfter": (CLAIMS, CONFIGS, TENSORS),
    "AssumesCausal": (CONFIGS,),
    "ClaimsTooMuch": (CLAIMS,),
    "CountsFromTheStep": (CUT, CONFIGS, GREEDY),
    "WholeHeads": ("test_processes_that_share_a_model_compute_it_together",),
    "SwallowsTensors": (REFUSED,),
    "IgnoresInSilence": (FIELDS,),
    "IgnoresWhatCounts": (CHANGED, CONFIGS),
    "ForgetsALayer": ("test_attention_describes_the_layers_that_are_built",),
    "FillsByItself": ("test_dummy_weights_depend_on_the_seed_alone",),
    "StreamInEightBits": ("test_half_precision_is_at_most_twice_as_far_as_transformers",),
    "ShortTable": ("test_a_long_sequence_is_right_to_its_end",),
    "PicksAnother": ("test_hidden_states_that_are_asked_for_are_those_among_all",),
    "RemembersTheFirst": ("test_two_instances_share_no_state",),
}
RIGHT = ("PlainLlama",)


ARCHITECTURE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "cohere": "CohereForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
IGNORES = {
    "llama": ("pretraining_tp",),
    "qwen2": WINDOWS,
    "gemma3_text": ("attn_logit_softcapping",),
    "glm4": ("ignore_keys_at_rope_validation",),
    "phi3": ("original_max_position_embeddings",),
}


def spec(name: str, family: str = "llama", ignores: tuple[str, ...] | None = None, *more: str) -> Spec:
    families = {family, *more}
    ignores = IGNORES.get(family, ()) if ignores is None else ignores
    limits = {"architecture": {ARCHITECTURE[f] for f in families}, "model_type": families, "device": ANY, "dtype": ANY}
    return Spec(f"{__name__}:{name}", (2, 0), "a planted fault", limits=limits, traits={"ignores": ignores})


def layers(made, **values):
    """A table with some fields of all layers changed."""
    return replace(made, layers=tuple(replace(layer, **values) for layer in made.layers))


def changed(cfg, **values):
    """A copy with other values, after the right ones were read."""
    cfg = copy.deepcopy(cfg)
    for name, value in values.items():
        getattr(cfg, name, None)
        setattr(cfg, name, value)
    return cfg


class IgnoresRopeScaling(Llama):
    spec = spec("IgnoresRopeScaling")

    def build(self, cfg, parts):
        theta = cfg.rope_parameters["rope_theta"]
        return super().build(changed(cfg, rope_parameters={"rope_type": "default", "rope_theta": theta}), parts)


class FixedEps(Llama):
    spec = spec("FixedEps")

    def build(self, cfg, parts):
        return super().build(changed(cfg, rms_norm_eps=1e-6), parts)


class NeverTied(Llama):
    spec = spec("NeverTied")

    def build(self, cfg, parts):
        return super().build(changed(cfg, tie_word_embeddings=False), parts)

    def weights(self, cfg):
        return super().weights(changed(cfg, tie_word_embeddings=False))


class AlwaysTied(Llama):
    spec = spec("AlwaysTied")

    def build(self, cfg, parts):
        return super().build(changed(cfg, tie_word_embeddings=True), parts)

    def weights(self, cfg):
        return super().weights(changed(cfg, tie_word_embeddings=True))


class HeadDimFromHidden(Llama):
    spec = spec("HeadDimFromHidden")

    def describe(self, cfg):
        return super().describe(changed(cfg, head_dim=cfg.hidden_size // cfg.num_attention_heads))


class ForgetsBias(Llama):
    spec = spec("ForgetsBias")

    def biases(self, cfg):
        return False, False, cfg.mlp_bias


class Swaps(Llama):
    swapped = ("", "")

    def weights(self, cfg):
        a, b = self.swapped
        other = {a: b, b: a}
        return [replace(rule, part=other.get(rule.part, rule.part)) for rule in super().weights(cfg)]


class SwapsGateAndUp(Swaps):
    spec, swapped = spec("SwapsGateAndUp"), ("gate", "up")


class SwapsKAndV(Swaps):
    spec, swapped = spec("SwapsKAndV"), ("k", "v")


class NormLeftAtOnes(Llama):
    """The last norm has a weight of its own making."""

    spec = spec("NormLeftAtOnes")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        del parts.modules["norm"]
        model.norm.weight = torch.ones_like(model.norm.weight)
        return model

    def weights(self, cfg):
        return [replace(rule, module=None) if rule.module == "norm" else rule for rule in super().weights(cfg)]


class LoadsTwice(Llama):
    spec = spec("LoadsTwice")

    def weights(self, cfg):
        return [*super().weights(cfg), Rule("model.layers.{i}.self_attn.query", "layers.{i}.attn.qkv", part="q")]


class IgnoresWindow(Qwen2):
    spec = spec("IgnoresWindow", "qwen2")

    def windows(self, cfg):
        super().windows(cfg)
        return [None] * cfg.num_hidden_layers


class WindowInEveryLayer(Qwen2):
    spec = spec("WindowInEveryLayer", "qwen2")

    def windows(self, cfg):
        windows = super().windows(cfg)
        return [cfg.sliding_window if any(windows) else None] * len(windows)


class NormAfter(Llama):
    """Normalizes the output of a sublayer instead of its input."""

    spec = spec("NormAfter")

    def describe(self, cfg):
        return layers(super().describe(cfg), norms=AFTER)


class AssumesCausal(Llama):
    """Does not look at ``is_causal``."""

    spec = spec("AssumesCausal")

    def check(self, cfg):
        super().check(changed(cfg, is_causal=True))


class ClaimsTooMuch(Llama):
    """Qwen2 is Llama with biases, which this one does not have."""

    spec = spec("ClaimsTooMuch", "llama", None, "qwen2")

    def biases(self, cfg):
        return [getattr(cfg, name, False) for name in ("attention_bias", "attention_bias", "mlp_bias")]


class CountsFromTheStep(Llama):
    """Takes the position of a token in the step for that in its sequence."""

    spec = spec("CountsFromTheStep")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        model.__class__ = _StepDecoder
        return model


class _StepDecoder(Decoder):
    def __call__(self, step):
        here = torch.arange(len(step.ids), device=step.ids.device)
        step.meta.position = here - step.meta.cu_q[step.meta.row].long()
        return super().__call__(step)


class WholeHeads(Llama):
    """Splits q, k and v as if this process had all heads."""

    spec = spec("WholeHeads")

    def build(self, cfg, parts):
        model, layer = super().build(cfg, parts), self.attention(cfg)[0]
        for block in model.blocks:
            block.sizes = [n * layer.dim_qk for n in (layer.heads, layer.kv_heads, layer.kv_heads)]
        return model


class SwallowsTensors(Llama):
    """A rule that covers all that the others leave."""

    spec = spec("SwallowsTensors")

    def weights(self, cfg):
        return [*super().weights(cfg), Rule("model.layers.{i}", None)]


class IgnoresInSilence(Llama):
    spec = spec("IgnoresInSilence", "llama", ())


class IgnoresWhatCounts(Llama):
    """Declares a field as ignored that changes the result."""

    spec = spec("IgnoresWhatCounts", "llama", ("pretraining_tp", "mlp_bias"))

    def biases(self, cfg):
        return cfg.attention_bias, cfg.attention_bias, False


class ForgetsALayer(Llama):
    spec = spec("ForgetsALayer")

    def attention(self, cfg):
        return super().attention(cfg)[:-1]

    def build(self, cfg, parts):
        return parts.decoder(self.describe(cfg))


class FillsByItself(Llama):
    """Scales an embedding by a number drawn anew for each instance."""

    spec = spec("FillsByItself")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        model.norm.eps += float(torch.rand(()))
        return model


class StreamInEightBits(Llama):
    """The residual stream of a model in half precision goes through float8."""

    spec = spec("StreamInEightBits")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        if parts.dtype != torch.float32:
            embed = model.embed
            model.embed = lambda ids: embed(ids).to(torch.float8_e4m3fn).to(parts.dtype)
        return model


class ShortTable(Llama):
    """Has a table of 512 positions, whose last entry is used for all later positions."""

    spec = spec("ShortTable")

    def build(self, cfg, parts):
        whole = parts.rotary
        parts.rotary = lambda *args: tuple(torch.cat([t[:512], t[511:512].expand_as(t[512:])]) for t in whole(*args))
        return super().build(cfg, parts)


class RemembersTheFirst(Llama):
    """The first call of one instance changes the results of other instances."""

    spec = spec("RemembersTheFirst")
    requested: list = []

    def build(self, cfg, parts):
        self.requested.append(cfg)
        return super().build(changed(cfg, rms_norm_eps=cfg.rms_norm_eps * len(self.requested)), parts)


class PicksAnother(Llama):
    """Returns the hidden states of the tokens before the requested ones."""

    spec = spec("PicksAnother")

    def build(self, cfg, parts):
        model = super().build(cfg, parts)
        model.__class__ = _PicksAnother
        return model


class _PicksAnother(Decoder):
    takes_logits_indices = True

    def __call__(self, step):
        requested = step.logits_indices
        return super().__call__(
            replace(step, logits_indices=None if requested is None else (requested - 1).clamp(min=0))
        )


class PlainLlama(ModelArch):
    """Right.  Llama with a separate matrix for each projection, without shared classes and old configs."""

    spec = spec("PlainLlama")

    def attention(self, cfg):
        if cfg.hidden_act not in ("silu", "swish"):
            raise ModelError(f"hidden_act={cfg.hidden_act}: expected 'silu'")
        if Llama().switch(cfg) is not None:  # the method also refuses unsupported values
            raise ModelError("rope_parameters: expected a rope_type that is the same for all lengths")
        kv = cfg.num_key_value_heads
        return [AttnSpec(cfg.num_attention_heads, kv, cfg.head_dim, cfg.head_dim)] * cfg.num_hidden_layers

    def build(self, cfg, parts):
        return _Plain(cfg, parts, self.attention(cfg))

    def weights(self, cfg):
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm",
                 "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
        rules = [Rule(f"model.layers.{{i}}.{n}", f"model.layers.{{i}}.{n}") for n in names]
        rules += [Rule(n, n) for n in ("model.embed_tokens", "model.norm")]
        return [*rules, Rule("lm_head", None if cfg.tie_word_embeddings else "lm_head")]


class _Plain:
    def __init__(self, cfg, parts, specs):
        d, h, n, hidden = cfg.head_dim, cfg.num_attention_heads, cfg.num_key_value_heads, cfg.hidden_size
        bias, inner = cfg.attention_bias, cfg.intermediate_size
        self.embed = parts.embedding("model.embed_tokens", cfg.vocab_size, hidden)
        self.layers = []
        for i, one in enumerate(specs):
            name = f"model.layers.{i}."

            def linear(what, a, b, bias, split, name=name):
                return parts.linear(name + what, a, [("", b)], bias=bias, split=split)

            self.layers.append(
                (
                    parts.norm(name + "input_layernorm", hidden, cfg.rms_norm_eps),
                    [
                        linear(f"self_attn.{x}_proj", hidden, k * d, bias, "column")
                        for x, k in (("q", h), ("k", n), ("v", n))
                    ],
                    parts.attention(i, one),
                    QKPre(*parts.rotary(fields.rope(cfg))),
                    linear("self_attn.o_proj", h * d, hidden, bias, "row"),
                    parts.norm(name + "post_attention_layernorm", hidden, cfg.rms_norm_eps),
                    [linear(f"mlp.{x}_proj", hidden, inner, cfg.mlp_bias, "column") for x in ("gate", "up")],
                    linear("mlp.down_proj", inner, hidden, cfg.mlp_bias, "row"),
                )
            )
        self.norm = parts.norm("model.norm", hidden, cfg.rms_norm_eps)
        self.logits = parts.lm_head("lm_head", hidden, cfg.vocab_size, self.embed if cfg.tie_word_embeddings else None)

    def __call__(self, step):
        x = self.embed(step.ids)
        for norm1, qkv, attn, pre, o, norm2, (gate, up), down in self.layers:
            y = norm1(x)[0]
            x = x + o(attn(*(p(y) for p in qkv), step, pre))
            y = norm2(x)[0]
            x = x + down(F.silu(gate(y)) * up(y))
        return self.norm(x)[0]
