"""The model seam (plug-in interface): the layers of an architecture, and the names of its weights.

An architecture describes its layers or builds them itself, and maps names in checkpoints to weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .attnspec import AttnSpec
from .decoder import AROUND, HEADS, MLP, DecoderSpec, Experts, GatedDelta, LayerSpec, ShortConv

if TYPE_CHECKING:
    from torch import Tensor

    from .attention import AttnMeta, QKPre
    from .decoder import ConvNames, DeltaNames, ExpertNames, Norm, Rope, WeightNames
    from .states import Recurrent, StepStates

# Changes by version: 2.0: describe; Parts.rotary(rope); StepTensors.logits_indices and
# Model.takes_logits_indices; 2.1: StepTensors.taps and Model.tap_points 2.2: decoder.Experts,
# Parts.experts; Rule: {e}, param, form, interleaved; ModelArch.conversion, ModelArch.notes,
# Parts.tensors 2.4: decoder.GatedDelta, LayerSpec.gated, Parts.delta_net, StepTensors.states 2.5:
# decoder.ShortConv, Router.floor, ExpertNames.choice_bias, Parts.short_conv 2.6: StepTensors.watch,
# StepTensors.hidden and Model.state_points 2.7: StepTaps.given and Model.given_points; 2.8:
# decoder.Rope.query_growth
API = (2, 8)


@dataclass(frozen=True)
class Rule:
    """Maps the tensors of a checkpoint to a module, a parameter and a part of the model.

    ``{i}`` stands for a number that is the same in ``source`` and ``module``::

        Rule("model.layers.{i}.self_attn.q_proj", "layers.{i}.attn.qkv", part="q")

    matches ``model.layers.3.self_attn.q_proj.weight`` (and ``.bias``, ``.scales`` ...).  The text after the source name
    is the parameter.  A checkpoint name that matches no rule is an error, and so is a parameter that no tensor fills.
    ``module=None`` means that the tensor is known and not needed.

    A tensor may hold several parts one after another: ``part=("q", "k", "v")``.  ``pairs=(dim, turned)`` describes
    heads of ``dim`` rows whose first ``turned`` rows are rotated as the pairs (0, 1), (2, 3) ...; the loader reorders
    them into halves for the engine's rotary embedding.  ``transposed`` means that matrices are stored as [in, out]
    instead of [out, in].

    ``{e}`` stands for the number of an expert, in the source and in the part: ``part="{e}.up"``.  If only the part has
    ``{e}``, the source is a tensor of all experts, [experts, rows, in], or [experts, rows] for a bias.  ``interleaved``
    means that the rows of its parts alternate.  ``groups`` is a number of row groups; each group holds an equal share
    of every part, one part after another.  If ``param`` is set, ``source`` is the complete name of a tensor, and the
    tensor is this parameter.

    ``form`` names an alternative storage form.  If rules have different forms, the loader uses the first form of which
    the checkpoint has a tensor, and ignores the rules of the other forms.
    """

    source: str
    module: str | None
    part: str | tuple[str, ...] = ""
    pairs: tuple[int, int] | None = None
    transposed: bool = False
    interleaved: bool = False
    param: str = ""
    form: str = ""
    groups: int = 1


class StepTaps(Protocol):
    """Lets rows of a step read values at tap points (named tensors of the model, ``Model.tap_points``) and add vectors
    to them."""

    points: frozenset[str]  # tap points that at least one row of the step reads or adds to

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """Process the value x [T, width] of a tap point, and return the value with which the model must continue.

        x is not changed.  If no row uses the point, the result is x itself.
        """
        ...

    def given(self, point: str) -> Tensor | None:
        """Return the experts i32 [T, k] that the step gives to a router in ``Model.given_points``, or None.

        The model uses them in place of the experts that its router chooses, except where a token has -1.  It computes
        their weights from the router's logits as for experts of its own choice.
        """
        ...


class StepWatch(Protocol):
    """Lets a drafter receive hidden states of a step's tokens (``Model.state_points``)."""

    points: frozenset[str]

    def __call__(self, point: str, x: Tensor) -> None:
        """Store the value x [T, width] of a point of ``points``, which has a row for each token of the step."""
        ...


@dataclass
class StepTensors:
    """The arguments of a model for a step of T tokens."""

    ids: Tensor  # i64 [T] token ids
    # i64 [T] position of each token in its sequence.  ``AttnMeta.position`` is the row in the rotary tables.
    position: Tensor
    meta: AttnMeta
    # i64 [N] Indices of the tokens whose hidden states the engine needs; None means all tokens.
    logits_indices: Tensor | None = None
    # Called by the model at each tap point; None if no row has taps.  It is never set together with
    # ``logits_indices``, because taps see every token.
    taps: StepTaps | None = None
    # The recurrent states of the rows; None if no layer has a recurrent state.
    states: StepStates | None = None
    # Called by the model at its state points; None if no drafter reads hidden states.  It is never
    # set together with ``logits_indices`` if "norm" is read.
    watch: StepWatch | None = None
    # hidden states [T, width] of the served model, for the layers of a drafter (``drafter.Head``)
    hidden: Tensor | None = None
    # Stores the queries of attention for a compressor, by ``keep(layer, q)``; None if no row of the
    # step needs it.
    queries: Any = None
    # Adds up the attention to each key for a compressor, by ``norms(layer, q)`` and ``add(layer, q,
    # meta, norms)``; None if no row of the step needs it.
    sums: Any = None
    # whether ``hidden`` are states that the drafter's own layers returned for the draft before
    drafted: bool = False


class LinearModule(Protocol):
    """A linear layer: x [T, in] -> [T, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Attention(Protocol):
    """The attention of one layer. q, k and v have T rows; each row holds all heads of a token, flat or as [heads, dim].
    The result is [T, heads * dim_v]."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors, pre: QKPre | None = None
    ) -> Tensor: ...


class Parts(Protocol):
    """The building blocks of layers that the engine passes to ``ModelArch.build``.  They implement quantization, tensor
    parallelism and attention, so a model contains none of these.  ``heads(n)`` is the number of heads of this process,
    if n heads are split over the tensor-parallel processes."""

    def heads(self, n: int) -> int: ...
    def linear(
        self,
        name: str,
        inp: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool = False,
        split: str | None = None,
    ) -> LinearModule: ...
    # Creates weights that belong to no other module: name -> (shape, dtype); dtype None means the
    # dtype of the model.
    def tensors(
        self, name: str, shapes: Mapping[str, tuple[Sequence[int], str | None]]
    ) -> Mapping[str, Tensor]: ...
    def embedding(self, name: str, rows: int, dim: int) -> Any: ...
    def lm_head(self, name: str, inp: int, vocab: int, tied: Any = None) -> Any: ...
    # Creates a norm. ``kind`` may be a number, the epsilon of an RMSNorm.
    def norm(self, name: str, dim: int, kind: Norm | float) -> Any: ...
    # Create pairs of layers that run as one kernel for small batches.  They exchange a
    # layers.fused.Normed object.  ``linear`` is a module that the same object made.
    def normed_linear(self, linear: Any) -> Callable[[Any], Tensor]: ...
    def gated_linear(self, linear: Any, activation: str = "silu") -> Callable[[Any], Any]: ...
    def linear_norm(
        self,
        linear: Any,
        norm: Any,
        whole: bool = False,
        after: Any = None,
        scale: float = 1.0,
    ) -> Callable[[Any, Tensor], tuple[Any, Tensor]]: ...
    # Creates the router, the experts and the shared MLP of a layer, as one module: x [T, hidden] ->
    # [T, hidden].  ``hook`` is the ``DecoderSpec.router_hook`` without its first argument.
    def experts(
        self, name: str, hidden: int, spec: Experts, hook: Any = None
    ) -> Callable[[Any], Tensor]: ...
    def attention(self, index: int, spec: AttnSpec) -> Attention: ...
    # Creates the projections, convolution and delta rule of a gated delta net, without the output
    # projection.
    def delta_net(
        self, name: str, hidden: int, spec: GatedDelta
    ) -> Callable[[Any, StepTensors], Tensor]: ...
    # Creates the projection and convolution of a short-convolution layer, without the output
    # projection.
    def short_conv(
        self, name: str, hidden: int, spec: ShortConv
    ) -> Callable[[Any, StepTensors], Tensor]: ...
    # Returns cos and sin for ``QKPre``; ``twice`` appends a second table for requests longer than
    # ``rope.switch``.
    def rotary(self, rope: Rope, twice: bool = False) -> tuple[Tensor, Tensor]: ...
    def activation(self, name: str) -> Callable[[Tensor], Tensor]: ...
    def decoder(self, spec: DecoderSpec) -> Model: ...


class Model(Protocol):
    """A model, called once per step.  ``__call__`` returns hidden states [T, H] after the final norm.  ``logits`` maps
    hidden states [N, H] to logits [N, V].

    A class that defines ``takes_logits_indices = True`` next to its ``__call__`` may skip work: if
    ``step.logits_indices`` is not None, it returns the hidden states of these N tokens only, [N, H] in that order.
    After the last attention it need not compute other tokens.  It still writes the keys and values of all T tokens in
    every layer.  The indices are on the device and must not be read by the host, because the step may be captured in a
    CUDA graph.  They may contain a token twice and are in no particular order.  Without the attribute, ``__call__``
    returns the hidden states of all tokens.

    A class that defines ``tap_points`` next to its ``__call__`` (a mapping of point names to widths) lets requests read
    and change values inside the model.  If ``step.taps`` is not None, the model passes the tensor [T, width] of each
    point through it exactly once per call.  The point "logits" is the output of ``logits``; the model does not declare
    it.  Without the attribute, a model has no points, and requests with taps are refused.

    A class that defines ``given_points`` next to its ``__call__`` (a list of tap points that hold numbers of experts)
    lets requests give the experts of their tokens.  If ``step.taps`` is not None, the model calls its ``given``
    with each of these points in ``step.taps.points``.

    A class that defines ``state_points`` next to its ``__call__`` (a mapping of point names to widths) serves drafters
    that read hidden states.  If ``step.watch`` is not None, the model calls it exactly once with each of its points,
    from where it continues as without it.  The call may be captured in a CUDA graph.
    """

    def __call__(self, step: StepTensors) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def takes_logits_indices(model: Model) -> bool:
    """Return whether the model's ``__call__`` implements ``StepTensors.logits_indices``.

    The attribute ``takes_logits_indices`` counts only in the class that defines ``__call__``: a subclass that overrides
    ``__call__`` must define it again.
    """
    return bool(vars(_caller(model)).get("takes_logits_indices", False))


def tap_points(model: Model) -> dict[str, int]:
    """Return the widths of the model's tap points by name.  A tap point is a tensor that ``__call__`` passes through
    ``StepTensors.taps``.

    Return {} if the class that defines ``__call__`` does not define ``tap_points`` itself, as in
    ``takes_logits_indices``.  If it does, the value is that of the model's attribute, which a subclass or an instance
    may override.
    """
    return dict(getattr(model, "tap_points", {})) if "tap_points" in vars(_caller(model)) else {}


def given_points(model: Model) -> tuple[str, ...]:
    """Return the names of the tap points at which ``__call__`` accepts given experts (``StepTaps.given``): the routers,
    in the order of the layers.

    Return () if the class that defines ``__call__`` does not define ``given_points`` itself (see ``tap_points``).
    """
    named = "given_points" in vars(_caller(model))
    return tuple(getattr(model, "given_points", ())) if named else ()


def state_points(model: Model) -> dict[str, int]:
    """Return the widths, by name, of the tensors that the model's ``__call__`` passes to ``StepTensors.watch``.

    Return {} if the class that defines ``__call__`` does not define ``state_points`` itself (see ``tap_points``).
    """
    return (
        dict(getattr(model, "state_points", {})) if "state_points" in vars(_caller(model)) else {}
    )


def _caller(model: Model) -> type:
    """Return the class that defines the model's ``__call__``."""
    return next((c for c in type(model).__mro__ if "__call__" in vars(c)), type(model))


class Conversion(Protocol):
    """Converts the tensors of a checkpoint into the tensors that the loading rules expect, for checkpoints whose
    tensors differ from them."""

    def name(self, source: str) -> str | None:
        """Return the name that the loading rules have for a tensor of the checkpoint.

        None means that the tensor is not needed, or that it is combined with others into a tensor of another name."""
        ...

    def tensors(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the loading rules expect, in any order, from all (name, tensor) pairs of the
        checkpoint."""
        ...


class ModelArch:
    """A model architecture: a description or a builder of its layers, and the names of its weights.  ``cfg`` is the
    transformers config object of the text model.

    If a ``DecoderSpec`` can describe its models, override ``describe`` only.  Otherwise override ``attention``,
    ``build`` and ``weights``.  Raise ModelError, naming the field, for a config value that changes the arithmetic and
    is not implemented."""

    def describe(self, cfg: Any) -> DecoderSpec:
        """Return the description of the model, from which the engine builds it."""
        raise NotImplementedError(
            f"{type(self).__name__} describes no model: implement describe(), or attention(), build() and weights()"
        )

    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        """Return one spec for each layer with attention, for the whole model (not a process's share)."""
        found = (layer.attention for layer in self.describe(cfg).layers)
        return [spec for spec in found if isinstance(spec, AttnSpec)]

    def states(self, cfg: Any) -> Sequence[Recurrent]:
        """Return the state of each layer with a recurrent state, with the sizes of the whole model."""
        if type(self).describe is ModelArch.describe:
            return []
        found = (layer.recurrent for layer in self.describe(cfg).layers)
        return [spec.state() for spec in found if spec is not None]

    def build(self, cfg: Any, parts: Parts) -> Model:
        """Return the model with the config ``cfg``, built from the engine's layers ``parts``.

        The default builds the model that ``describe`` describes."""
        return parts.decoder(self.describe(cfg))

    def weights(self, cfg: Any) -> Sequence[Rule]:
        """Return the loading rules, which map the checkpoint's tensors to the model's parameters."""
        return decoder_rules(self.describe(cfg))

    def conversion(self, cfg: Any) -> Conversion | None:
        """Return a converter of the checkpoint's tensors, or None if the loading rules match them as they are."""
        return None

    def notes(self, cfg: Any) -> Mapping[str, str]:
        """Return messages for the user about how the model is built, each under a word for its subject."""
        return {}

    def switch(self, cfg: Any) -> int | None:
        """Return the length in tokens above which a request uses other rotary frequencies (``decoder.Rope``), or
        None."""
        described = type(self).describe is not ModelArch.describe
        return self.describe(cfg).switch if described else None


def decoder_rules(spec: DecoderSpec) -> list[Rule]:
    """Return the loading rules for the weights of a decoder, with the names in ``spec.names``."""
    names = spec.names
    rules = [Rule(names.embed, "embed"), Rule(names.norm, "norm")]
    rules.append(Rule(names.head, None if spec.tied else "lm_head"))
    if spec.embed_norm:
        rules.append(Rule(names.embed_norm, "embed_norm"))
    if spec.positions:
        rules.append(Rule(names.positions, "positions"))
    layers_of_kind: dict[tuple, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        layers_of_kind.setdefault(_weights_of(layer), []).append(i)
    for kind, members in layers_of_kind.items():
        # Rules for all layers together if the layers are alike, otherwise rules for each layer by
        # its number.
        numbers = ["{i}"] if len(layers_of_kind) == 1 else [str(i) for i in members]
        for n in numbers:
            rules += _layer_rules(names.layer.replace("{i}", n), f"layers.{n}.", spec, *kind)
    return rules


def _weights_of(layer: LayerSpec) -> tuple:
    """Return the properties of a layer that determine its loading rules: the last arguments of ``_layer_rules``."""
    rope, mlp, attention = layer.rope, layer.mlp, layer.attention
    turned = rope.dim if rope is not None and rope.interleaved else 0
    mlp_kind: Any = mlp.gated if isinstance(mlp, MLP) else mlp
    norms = 2
    if layer.norms == AROUND:
        norms = 4
    elif layer.parallel and not layer.mlp_norm:
        norms = 1
    if not isinstance(attention, AttnSpec):
        return norms, None, mlp_kind, attention, False, 0
    heads = attention.dim_qk, attention.heads if layer.gated else 0
    return norms, layer.qk_norm, mlp_kind, heads, attention.sinks, turned


def _layer_rules(
    hf: str,
    our: str,
    spec: DecoderSpec,
    norms: int,
    qk_norm: str | None,
    mlp: bool | Experts,
    heads: tuple[int, int] | GatedDelta | ShortConv,
    sinks: bool,
    turned: int,
) -> list[Rule]:
    """Return the rules of one layer, or of all layers if the prefixes contain ``{i}``.

    ``hf`` and ``our`` are name prefixes in the checkpoint and in the model.  ``norms`` is the number of norms.  ``mlp``
    is the expert spec, or whether the MLP is gated.  ``heads`` is the size of a head, and the number of query heads if
    they have gates, or the spec of a recurrent layer.  ``turned`` rows of a head are rotated as pairs.
    """
    names, pairs = spec.names, None
    if isinstance(heads, GatedDelta):
        rules = _delta_rules(hf, our + "attn.", names.delta, heads)
    elif isinstance(heads, ShortConv):
        rules = _conv_rules(hf, our + "attn.", names.conv)
    else:
        pairs = (heads[0], turned) if turned else None
        rules = _attention_rules(hf, our + "attn.", names, pairs, heads[1])
    if isinstance(mlp, Experts):
        rules += _expert_rules(hf, our + "mlp.", names, mlp)
    else:
        rules += _mlp_rules(hf, our + "mlp.", names.gate_up, names.down, mlp)
    if qk_norm is not None:
        part = "{e}" if qk_norm == HEADS else ""
        which = zip("qk", names.qk_norm, strict=True)
        rules += [Rule(hf + name, f"{our}attn.{x}_norm", part, pairs) for x, name in which]
    if sinks:
        rules.append(Rule(hf + names.sinks, our + "attn"))
    for n, name in enumerate(names.norms[:norms], 1):
        rules.append(Rule(hf + name, f"{our}norm{n}"))
    return [replace(rule, transposed=True) for rule in rules] if names.transposed else rules


def _attention_rules(
    hf: str, our: str, names: WeightNames, pairs: tuple[int, int] | None, gates: int
) -> list[Rule]:
    """Return the loading rules of the projections of attention; ``gates`` is the number of query heads with a gate, or
    0."""
    rules, qkv = [Rule(hf + names.out, our + "o")], our + "qkv"
    if gates:
        query, *others = names.qkv
        rules.append(Rule(hf + query, qkv, ("q", "gate"), groups=gates))
        rules += [Rule(hf + name, qkv, part) for part, name in zip("kv", others, strict=True)]
    elif len(names.qkv) == 1:
        rules.append(Rule(hf + names.qkv[0], qkv, ("q", "k", "v"), pairs, groups=names.qkv_groups))
    else:
        for part, name in zip("qkv", names.qkv, strict=True):
            rules.append(Rule(hf + name, qkv, part, pairs if part != "v" else None))
    return rules


def _conv_rules(hf: str, our: str, names: ConvNames) -> list[Rule]:
    """Return the loading rules of a short convolution."""
    return [
        Rule(hf + names.mixed, our + "in", ("b", "c", "x")),
        Rule(hf + names.conv, our + "conv"),
        Rule(hf + names.out, our + "o"),
    ]


def _delta_rules(hf: str, our: str, names: DeltaNames, spec: GatedDelta) -> list[Rule]:
    """Return the loading rules of a gated delta net."""
    rules = [
        Rule(hf + names.root, our + "delta"),
        Rule(hf + names.conv, our + "delta", "conv"),
        Rule(hf + names.norm, our + "delta", "norm"),
        Rule(hf + names.out, our + "o"),
    ]
    groups = spec.key_heads if names.grouped else 1
    for source, parts in names.mixed:
        module = our + ("gates" if set(parts) <= {"a", "b"} else "in")
        part = parts if len(parts) > 1 else parts[0]
        rules.append(Rule(hf + source, module, part, groups=groups if len(parts) > 1 else 1))
    return rules


def _mlp_rules(hf: str, our: str, gate_up: tuple[str, ...], down: str, gated: bool) -> list[Rule]:
    """Return the rules that load the weights of an MLP.

    ``hf`` and ``our`` are name prefixes in the checkpoint and in the model.  ``gate_up`` and
    ``down`` are names in the checkpoint; one name in ``gate_up`` means that gate and up are one
    tensor.
    """
    rules = [Rule(hf + down, our + "down")]
    if not gated:
        return [*rules, Rule(hf + gate_up[-1], our + "up")]
    if len(gate_up) == 1:
        return [*rules, Rule(hf + gate_up[0], our + "gate_up", ("gate", "up"))]
    parts = zip(("gate", "up"), gate_up, strict=True)
    return rules + [Rule(hf + name, our + "gate_up", part) for part, name in parts]


def _expert_rules(hf: str, our: str, names: WeightNames, spec: Experts) -> list[Rule]:
    """Return the loading rules of a mixture of experts, for every form in which checkpoints store it."""
    rules: list[Rule] = []
    for form in names.experts:
        router = {"": form.router}
        if form.choice_bias and spec.router.choice_bias:
            router = {
                "weight": form.router + ".weight",
                "e_score_correction_bias": form.choice_bias,
            }
        for param, source in router.items():
            rules.append(Rule(hf + source, our + "router", param=param, form=form.form))
        gate_up = ("{e}.gate", "{e}.up")
        if len(form.gate_up) == 1:
            rules += _stacked(hf + form.gate_up[0], our + "experts.gate_up", gate_up, form)
        else:
            for part, name in zip(gate_up, form.gate_up, strict=True):
                rules.append(Rule(hf + name, our + "experts.gate_up", part, form=form.form))
        if "{e}" in form.down:
            rules.append(Rule(hf + form.down, our + "experts.down", "{e}", form=form.form))
        else:
            rules += _stacked(hf + form.down, our + "experts.down", ("{e}",), form)
    if spec.shared is not None:
        shared, down = names.shared_gate_up, names.shared_down
        rules += _mlp_rules(hf, our + "shared.", shared, down, spec.shared.gated)
    if spec.shared_gate:
        rules.append(Rule(hf + names.shared_gate, our + "shared_gate"))
    return rules


def _stacked(source: str, module: str, parts: tuple[str, ...], form: ExpertNames) -> list[Rule]:
    """Return the loading rules of a tensor that holds all experts, and of its bias."""
    weight = Rule(
        source,
        module,
        parts,
        transposed=form.transposed,
        interleaved=form.interleaved and len(parts) > 1,
        param="weight",
        form=form.form,
    )
    plain = replace(weight, transposed=False)
    quantized = [replace(plain, source=f"{source}_{param}", param=param) for param in form.params]
    bias = replace(plain, source=source + "_bias", param="bias")
    return [*(quantized or [weight]), bias]
