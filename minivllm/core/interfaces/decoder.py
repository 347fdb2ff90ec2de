"""A decoder as data: what its layers consist of, and what a checkpoint calls their weights.

``ModelArch.describe`` gives a ``DecoderSpec``; the engine builds it, fuses what can be fused, and reads its weights.
An architecture that fits is a table of fields; ``ModelArch.build`` is for what does not::

    ids ─ embedding (x scale, + learned positions) ─┐
    stream h ──────────────────────────────────────►┴─ layer 0 ─ ... ─ layer n-1 ─ norm ─ head (x scale, cap) ─► logits

    norms BEFORE             norms AFTER              norms AROUND                 parallel
    h += s * A(n1(h))        h += s * n1(A(h))        h += s * n2(A(n1(h)))        y = n1(h)
    h += s * M(n2(h))        h += s * n2(M(h))        h += s * n4(M(n3(h)))        h += s * (A(y) + M(z))

A is attention, M the MLP or the experts, n1 to n4 are norms, s is ``residual_scale``; z is n2(h) where a layer has
``mlp_norm``, and y elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError

from .attention import AttnSpec

if TYPE_CHECKING:
    from torch import Tensor

BEFORE, AFTER, AROUND = "before", "after", "around"
# a norm of q and k: one for all heads, one over all heads, one for each head with weights of its own
HEAD, WIDTH, HEADS = "head", "width", "heads"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
CLAMPED = "swiglu_oai"  # of experts, see ``Experts``
# how a router turns logits into weights: the softmax of all, or of the chosen ones, or a sigmoid
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = "softmax", "chosen_softmax", "sigmoid"
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) where ``centered``."""

    eps: float
    offset: float = 0.0  # added to the weight: 1 where a checkpoint holds its difference from 1
    centered: bool = False  # the mean is subtracted
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864) of the first ``dim`` elements of a head.

    ``kind`` is transformers' ``rope_type``, ``numbers`` are its parameters by name.  ``switch`` is the length, in
    tokens, up to which a request keeps the frequencies it was trained with; a longer one has others from its first
    token on ("longrope", "dynamic").  Which it is, is known when it is admitted: its prompt and ``max_tokens`` say how
    long it can become.  None: the same for all.
    """

    dim: int
    theta: float
    kind: str = "default"  # of ROPE_KINDS
    numbers: tuple[tuple[str, Any], ...] = ()
    switch: int | None = None
    # pairs are (0, 1), (2, 3) ... in the checkpoint; the rows of q and k are put in order when it is loaded
    interleaved: bool = False


@dataclass(frozen=True)
class MLP:
    """``down(activation(gate) * up)``, or without a gate ``down(activation(up))``."""

    inner: int
    activation: str = "silu"  # of ACTIVATIONS
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """Which experts a token goes to, and with what weights: the highest scores, of equal ones the
    lower number.  Computed in float32."""

    score: str = SOFTMAX  # or CHOSEN_SOFTMAX, SIGMOID
    normalize: bool = False  # the weights of a token are divided by their sum
    scale: float = 1.0  # and multiplied by this
    bias: bool = False  # added to the logits
    # a number of each expert (``e_score_correction_bias``) is added to its score for the choice alone
    choice_bias: bool = False
    rounded: bool = True  # to the dtype of the logits at the end


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (arXiv:1701.06538) in place of an MLP: a token goes to ``chosen`` of
    ``count`` gated MLPs, whose outputs are added, times their weights::

        sum over chosen e: weight[e] * down[e](activation(gate[e](x)) * up[e](x))  (+ shared(x))

    With ``activation`` "swiglu_oai" an expert is ``down((up' + 1) * gate' * sigmoid(alpha * gate'))``
    with gate' = min(gate, limit), up' = up clamped to +-limit.  ``shared`` is an MLP that every token
    goes to; with ``shared_gate`` its output is multiplied by the sigmoid of one number a token.
    """

    count: int
    chosen: int
    inner: int
    activation: str = "silu"  # of ACTIVATIONS, or CLAMPED
    router: Router = Router()
    bias: bool = False
    limit: float | None = None  # of CLAMPED
    alpha: float = 1.702  # likewise
    shared: MLP | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then an MLP, or both beside each other (``parallel``)."""

    attention: AttnSpec
    mlp: MLP | Experts
    rope: Rope | None  # None: positions are not told to attention
    norms: str = BEFORE  # or AFTER, AROUND
    parallel: bool = False  # with norms BEFORE
    qk_norm: str | None = None  # HEAD, WIDTH or HEADS
    qkv_bias: bool = False
    out_bias: bool = False
    residual_scale: float = 1.0  # what is added to the stream is multiplied by it first
    mlp_norm: bool = False  # a parallel MLP has a norm of its own, n2
    qkv_clip: float | None = None  # q, k and v are clamped to +-qkv_clip


@dataclass(frozen=True)
class ExpertNames:
    """One form in which checkpoints hold the experts of a layer.

    ``{e}`` in the name of a module is the number of an expert.  A name without it is that of a tensor
    of all experts, [count, out, in]; its bias [count, out] is the tensor of that name with "_bias".
    ``params``: a quantized weight is several tensors, whose names go on with "_" and these words,
    which are the parameters of its scheme; [count, out, ...] each.
    """

    form: str
    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")
    down: str = "mlp.experts.{e}.down_proj"
    transposed: bool = False  # matrices of the tensors of all experts lie as [in, out]
    interleaved: bool = False  # the rows of gate and up take turns
    params: tuple[str, ...] = ()


# as it is on the hub, and as transformers 5 has it in memory
EXPERT_NAMES = (
    ExpertNames("one tensor each"),
    ExpertNames("stacked", "mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
)


@dataclass(frozen=True)
class WeightNames:
    """What a checkpoint calls its modules; those of a layer stand behind ``layer``, in which ``{i}`` is its number.

    One name for q, k and v, or gate and up, stands for a tensor that holds them one after another.
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    embed_norm: str = "model.embed_norm"
    head: str = "lm_head"
    layer: str = "model.layers.{i}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # groups of rows in a tensor of all three, each of which holds its share of q, then of k and of v
    qkv_groups: int = 1
    out: str = "self_attn.o_proj"
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    sinks: str = "self_attn"  # whose parameter ``sinks`` is
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # without a gate the last one
    down: str = "mlp.down_proj"
    experts: tuple[ExpertNames, ...] = EXPERT_NAMES  # a checkpoint has one of these forms
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    # in the order n1 .. n4 above, as many as the layers have
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    transposed: bool = False  # matrices of the layers lie as [in, out]


@dataclass(frozen=True)
class DecoderSpec:
    """A whole model, not a process's share."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: Norm  # of all layers, and the last one
    tied: bool = False  # the head's weight is the embedding's
    embed_scale: float = 1.0  # rounded to the dtype of the model first
    # rows of a table of learned positions, and the row of position 0; 0 rows: there is none
    positions: int = 0
    first_position: int = 0
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap), after the scale
    names: WeightNames = field(default_factory=WeightNames)
    embed_norm: bool = False  # the stream begins with ``norm`` of the embedding
    # (number of the layer, logits [T, E], weights f32 [T, k], ids i32 [T, k]) -> (weights, ids) that
    # go on in their place; on the device, where a step may be captured: it asks no tensor for values
    router_hook: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def switch(self) -> int | None:
        """The length at which the rotary embedding of a request is another one, see ``Rope``."""
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        found = {rope.switch for rope in ropes if rope.switch is not None}
        if len(found) > 1:
            raise ModelError(
                f"the rotary embedding of layers changes at {sorted(found)} tokens: want one length"
            )
        return min(found, default=None)
