"""A decoder model as data: the parts of its layers, and the names of their weights in a checkpoint.

``ModelArch.describe`` returns a ``DecoderSpec``.  The engine builds the model from it, fuses operations where it can,
and reads the weights.  An architecture that this table can express needs no code; any other one implements
``ModelArch.build``::

    ids ─ embedding (x scale, + learned positions) ─┐
    stream h ──────────────────────────────────────►┴─ layer 0 ─ ... ─ layer n-1 ─ norm ─ head (x scale, cap) ─► logits

    norms BEFORE             norms AFTER              norms AROUND                 parallel
    h += s * A(n1(h))        h += s * n1(A(h))        h += s * n2(A(n1(h)))        y = n1(h)
    h += s * M(n2(h))        h += s * n2(M(h))        h += s * n4(M(n3(h)))        h += s * (A(y) + M(z))

A is the attention, M the MLP or the experts, n1 to n4 are norms, and s is ``residual_scale``.  In a parallel layer, z
is n2(h) if the layer has ``mlp_norm``, and y otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError

from .attention import AttnSpec
from .states import Recurrent, StateTensor

if TYPE_CHECKING:
    from torch import Tensor

BEFORE, AFTER, AROUND = "before", "after", "around"
# Ways to normalize q and k: HEAD normalizes each head with weights that all heads share, WIDTH
# normalizes all heads as one vector, HEADS normalizes each head with weights of its own.
HEAD, WIDTH, HEADS = "head", "width", "heads"
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
CLAMPED = "swiglu_oai"  # an activation that only experts use (see ``Experts``)
# how a router turns logits into weights: softmax over all experts, softmax over the chosen experts, or sigmoid
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = "softmax", "chosen_softmax", "sigmoid"
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")


@dataclass(frozen=True)
class Norm:
    """RMSNorm (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) if ``centered``."""

    eps: float
    # number that is added to the stored weight; 1 if the checkpoint stores weight - 1
    offset: float = 0.0
    centered: bool = False  # subtract the mean
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (arXiv:2104.09864) of the first ``dim`` elements of a head.

    ``kind`` is the ``rope_type`` of transformers, and ``numbers`` are its parameters by name.  ``switch`` is a length
    in tokens, for the kinds "longrope" and "dynamic".  A request that can become longer than ``switch`` (prompt plus
    ``max_tokens``) uses other frequencies, from its first token on.  The choice is made when the request is admitted.
    ``switch`` None means that all requests use the same frequencies.
    """

    dim: int
    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    numbers: tuple[tuple[str, Any], ...] = ()
    switch: int | None = None
    # The checkpoint rotates the pairs (0, 1), (2, 3) ... of a head.  The loader reorders the rows of q and k
    # into halves, which the engine's kernels expect.
    interleaved: bool = False
    # (beta, length): a rotated query at position p is multiplied by 1 + beta * ln(1 + floor(p / length)), as in Llama 4
    # and Ministral 3.  None means that queries keep their length.
    query_growth: tuple[float, int] | None = None


@dataclass(frozen=True)
class MLP:
    """A feed-forward layer: ``down(activation(gate) * up)``, or ``down(activation(up))`` if not ``gated``."""

    inner: int
    activation: str = "silu"  # one of ACTIVATIONS
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """How the experts of a token and their weights are chosen, in float32.

    The experts with the highest scores are chosen.  Of equal scores, the expert with the lower number wins.
    """

    score: str = SOFTMAX  # or CHOSEN_SOFTMAX, SIGMOID
    normalize: bool = False  # True divides the weights of a token's experts by their sum
    # With ``normalize``, this number is added to the sum of the weights before the division.  None means
    # 1e-20 for SIGMOID and 0 for other scores.
    floor: float | None = None
    scale: float = 1.0  # factor for the weights of a token's experts, after they are normalized
    bias: bool = False  # True adds a learned bias to the router's logits
    # A bias per expert (``e_score_correction_bias``) is added to the score when experts are chosen.  The
    # weights do not include it.
    choice_bias: bool = False
    rounded: bool = True  # True rounds the final weights of the experts to the dtype of the logits


@dataclass(frozen=True)
class Experts:
    """A mixture of experts (arXiv:1701.06538) in place of an MLP.

    Each token goes to ``chosen`` of ``count`` gated MLPs, and the weighted outputs are added::

        sum over chosen e: weight[e] * down[e](activation(gate[e](x)) * up[e](x))  (+ shared(x))

    With ``activation`` "swiglu_oai", an expert computes ``down((up' + 1) * gate' * sigmoid(alpha * gate'))`` with gate'
    = min(gate, limit) and up' = up clamped to +-limit.  Every token also goes to the MLP ``shared``, if there is one.
    With ``shared_gate``, the output of ``shared`` is multiplied by the sigmoid of one learned number per token.
    """

    count: int
    chosen: int
    inner: int
    activation: str = "silu"  # activation of an expert: one of ACTIVATIONS, or CLAMPED
    router: Router = Router()
    bias: bool = False
    limit: float | None = None  # for CLAMPED
    alpha: float = 1.702  # for CLAMPED
    shared: MLP | None = None
    shared_gate: bool = False


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta net (arXiv:2412.06464) in place of attention: a layer whose state has a fixed size.

    Key head i serves the value heads i * r to i * r + r - 1, where r = value_heads / key_heads.  Each value head keeps
    a float32 state [key_dim, value_dim].  ``width`` is the width of the causal convolution over q, k and v.  ``eps``
    belongs to the gated norm of the outputs.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float

    @property
    def channels(self) -> int:
        """Return the width of q, k and v together, which is the number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def inner(self) -> int:
        """Return the width of the outputs of all value heads."""
        return self.value_heads * self.value_dim

    def state(self, processes: int = 1) -> Recurrent:
        """Return the shapes and dtypes of the state of one sequence in one process.

        ``processes`` is the number of tensor-parallel processes; each has an equal share.
        """
        heads = self.value_heads // processes
        tensors = (
            StateTensor("state", (heads, self.key_dim, self.value_dim), "float32"),
            StateTensor("ring", (self.channels // processes,), ring=True),
            StateTensor("gates", (2 * heads,), ring=True),
        )
        return Recurrent(tensors, self.width - 1)


@dataclass(frozen=True)
class ShortConv:
    """Gated short convolution (LFM2, arXiv:2511.23404) in place of attention.

    A projection of the input has the parts b, c and x, each ``inner`` wide.  The output is ``c * conv(b * x)``, where
    ``conv`` is a causal convolution of each channel over ``width`` tokens.  ``bias`` means that the projection and the
    convolution have a bias.
    """

    inner: int
    width: int
    bias: bool = False

    def state(self, processes: int = 1) -> Recurrent:
        """Return the shapes and dtypes of the state of one sequence in one process.

        ``processes`` is the number of tensor-parallel processes; each has an equal share.
        """
        ring = StateTensor("ring", (self.inner // processes,), ring=True)
        return Recurrent((ring,), self.width - 1)


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention followed by an MLP, or both applied to the same input if ``parallel``.

    ``attention`` is softmax attention, or a layer with a recurrent state.  Such a layer reads ``out_bias`` and none of
    the other fields of attention below.
    """

    attention: AttnSpec | GatedDelta | ShortConv
    mlp: MLP | Experts
    rope: Rope | None  # None means no rotary embedding
    norms: str = BEFORE  # or AFTER, AROUND
    parallel: bool = False  # requires norms BEFORE
    # how q and k are normalized: HEAD, WIDTH or HEADS; None means not at all
    qk_norm: str | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    # factor by which the outputs of attention and MLP are multiplied before they are added to the
    # residual stream
    residual_scale: float = 1.0
    # True: in a parallel layer, the MLP reads the output of a second norm, and not that of the norm
    # before attention
    mlp_norm: bool = False
    # q, k and v are clamped to the range from -qkv_clip to qkv_clip; None means not
    qkv_clip: float | None = None
    # True: the query projection has a gate for each head, by whose sigmoid the output of attention
    # is multiplied.
    gated: bool = False

    @property
    def recurrent(self) -> GatedDelta | ShortConv | None:
        """Return the spec of a layer with a recurrent state, None for a layer with attention."""
        return None if isinstance(self.attention, AttnSpec) else self.attention


@dataclass(frozen=True)
class ExpertNames:
    """The module names of one form in which checkpoints store the experts of a layer.

    ``{e}`` in a module name is the number of an expert.  A name without ``{e}`` is a tensor that holds all experts,
    [count, out, in].  The bias [count, out] of such a tensor has the same name with the suffix "_bias".

    ``choice_bias`` is the complete name of the tensor of ``Router.choice_bias``.  The router then has no other
    parameters than this tensor and its weight.  "" means the router's name with the suffix ".e_score_correction_bias".

    ``params`` are parameter names of a quantized format.  The weight is then stored as several tensors [count, out,
    ...], named with "_" and these words as suffixes.
    """

    form: str
    router: str = "mlp.gate"
    gate_up: tuple[str, ...] = ("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj")
    down: str = "mlp.experts.{e}.down_proj"
    transposed: bool = False  # True: the tensors that hold all experts store matrices as [in, out]
    interleaved: bool = False  # True: rows of the gate and rows of the up matrix alternate
    params: tuple[str, ...] = ()
    choice_bias: str = ""


# The two forms of stored experts: of checkpoints on the Hugging Face hub, and of transformers 5 in
# memory.
EXPERT_NAMES = (
    ExpertNames("one tensor each"),
    ExpertNames("stacked", "mlp.gate", ("mlp.experts.gate_up_proj",), "mlp.experts.down_proj"),
)


@dataclass(frozen=True)
class DeltaNames:
    """The names of a gated delta net's modules; ``root`` has the parameters ``A_log`` and ``dt_bias``.

    ``mixed`` lists each matrix with its parts, of which there are q, k, v, z (the gate of the outputs), b and a.  With
    ``grouped`` the rows of a matrix are one group for each key head, which holds its share of every part.
    """

    root: str = "linear_attn"
    mixed: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("linear_attn.in_proj_qkv", ("q", "k", "v")),
        ("linear_attn.in_proj_z", ("z",)),
        ("linear_attn.in_proj_b", ("b",)),
        ("linear_attn.in_proj_a", ("a",)),
    )
    grouped: bool = False
    conv: str = "linear_attn.conv1d"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True)
class ConvNames:
    """The checkpoint's names of a short convolution's modules.

    ``mixed`` is the input projection, whose output rows are b, c and x (see ``ShortConv``), one after another."""

    mixed: str = "conv.in_proj"
    conv: str = "conv.conv"
    out: str = "conv.out_proj"


@dataclass(frozen=True)
class WeightNames:
    """The module names of a checkpoint.  Names of a layer's modules are relative to ``layer``, in which ``{i}`` is the
    layer number.

    If ``qkv`` or ``gate_up`` has one name, that tensor holds q, k and v (or gate and up) one after another.
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    embed_norm: str = "model.embed_norm"
    head: str = "lm_head"
    layer: str = "model.layers.{i}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # number of groups of rows in a joint qkv tensor; each group has a part of q, then of k, then of
    # v
    qkv_groups: int = 1
    out: str = "self_attn.o_proj"
    qk_norm: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    sinks: str = "self_attn"  # module with the parameter ``sinks``
    delta: DeltaNames = DeltaNames()
    conv: ConvNames = ConvNames()
    gate_up: tuple[str, ...] = (
        "mlp.gate_proj",
        "mlp.up_proj",
    )  # (gate, up) projections; an MLP without a gate uses only the last one
    down: str = "mlp.down_proj"
    # forms in which the experts may be stored; a checkpoint has one of them
    experts: tuple[ExpertNames, ...] = EXPERT_NAMES
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    # Names of the norms of a layer in the order in which they are applied, those of attention first.
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    transposed: bool = False  # True: matrices of the layers are stored as [in, out]


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder model.  Sizes are those of the whole model, not of a tensor-parallel process's share."""

    vocab: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: Norm  # kind of all norms of the layers, and of the final norm
    tied: bool = False  # True: the output head uses the weight of the embedding
    # factor by which embeddings are multiplied; it is rounded to the model's dtype first
    embed_scale: float = 1.0
    # Rows of the table of learned positions (0 means no table), and the index of the row of
    # position 0.
    positions: int = 0
    first_position: int = 0
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap), after the scale
    names: WeightNames = field(default_factory=WeightNames)
    embed_norm: bool = False  # True applies ``norm`` to the embeddings
    # Replaces the choice of a router: (layer number, logits [T, E], weights f32 [T, k], ids i32 [T, k])
    # -> (weights, ids).  It runs on the device and may be captured in a CUDA graph, so it must not read
    # tensor values on the host.
    router_hook: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def switch(self) -> int | None:
        """Return the length in tokens above which a request uses other rotary frequencies (see ``Rope``), or None.

        ModelError if layers have different lengths.
        """
        ropes = [layer.rope for layer in self.layers if layer.rope is not None]
        lengths = {rope.switch for rope in ropes if rope.switch is not None}
        if len(lengths) > 1:
            raise ModelError(
                f"the rotary embedding of layers changes at {sorted(lengths)} tokens: expected one length"
            )
        return min(lengths, default=None)
