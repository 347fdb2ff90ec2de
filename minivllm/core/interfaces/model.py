"""The model seam: an architecture describes its layers, or builds them itself, and says where its weights go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from .decoder import AROUND, HEADS, MLP, DecoderSpec, Experts, LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from .attention import AttnMeta, AttnSpec, QKPre
    from .decoder import ExpertNames, Norm, Rope, WeightNames

# 2.0: describe; Parts.rotary(rope); StepTensors.logits_indices and Model.takes_logits_indices (1.1: wanted, picks);
# 2.1: StepTensors.taps and Model.tap_points
# 2.2: decoder.Experts, Parts.experts; Rule: {e}, param, form, interleaved;
# ModelArch.conversion, ModelArch.notes, Parts.tensors
API = (2, 3)


@dataclass(frozen=True)
class Rule:
    """Checkpoint name -> module, parameter and part.  ``{i}`` stands for one number, the same on both sides::

        Rule("model.layers.{i}.self_attn.q_proj", "layers.{i}.attn.qkv", part="q")

    matches ``model.layers.3.self_attn.q_proj.weight`` (and ``.bias``, ``.scales`` ...): what follows the source name is
    the parameter.  A name that no rule matches is an error, so is a parameter that nothing filled.  ``module=None``
    says that the tensor is known and not needed.

    A tensor may hold several parts one after another: ``part=("q", "k", "v")``.  ``pairs=(dim, turned)``: of each head
    of ``dim`` rows the first ``turned`` lie as pairs (0, 1), (2, 3) ... and come to lie as halves, as the rotary
    embedding here wants them.  ``transposed``: matrices lie as [in, out], and not as [out, in].

    ``{e}`` stands for the number of an expert, in the source and in the part: ``part="{e}.up"``.  A source without it
    whose parts have it is a tensor of all experts, [experts, rows, in] or for a bias [experts, rows].  ``interleaved``:
    the rows of its parts take turns.  ``groups``: the rows are so many groups, each of which holds an equal share of
    every part, one part after another.  ``param``: the source is the whole name of a tensor, which is this parameter.

    ``form``: of the rules that name one, those of a single form hold: of the first of which the checkpoint has a
    tensor.
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
    """What the rows of a step read from points of the model, and add there (``Model.tap_points``)."""

    points: frozenset[str]  # those that some row of the step has to do with

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """x [T, width] is the value of a point; what comes back goes on in its place, and x is not written to.  Of a
        point that nobody has to do with it is x itself."""
        ...


@dataclass
class StepTensors:
    """What a model is called with: T tokens."""

    ids: Tensor  # i64 [T]
    # i64 [T] of each token in its sequence; AttnMeta.position is where the rotary embedding's tables have it
    position: Tensor
    meta: AttnMeta
    # i64 [N] numbers of the tokens whose hidden states are asked for; None: all
    logits_indices: Tensor | None = None
    # None: no row has taps.  Never beside ``logits_indices``: a point has a vector of every token
    taps: StepTaps | None = None


class LinearModule(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class Attention(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, step: StepTensors, pre: QKPre | None = None
    ) -> Tensor: ...


class Parts(Protocol):
    """The engine's building blocks, handed to ``build``: quantization, tensor parallelism and the attention back end
    are inside them, a model does not see them.  ``heads(n)`` is this process's share of n heads."""

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
    # weights that the architecture computes with itself: name -> shape, and dtype (None: the model's)
    def tensors(
        self, name: str, shapes: Mapping[str, tuple[Sequence[int], str | None]]
    ) -> Mapping[str, Tensor]: ...
    def embedding(self, name: str, rows: int, dim: int) -> Any: ...
    def lm_head(self, name: str, inp: int, vocab: int, tied: Any = None) -> Any: ...
    # a number is the epsilon of RMSNorm
    def norm(self, name: str, dim: int, kind: Norm | float) -> Any: ...
    # Pairs of layers that are one kernel where the rows are few; what passes between them is layers.fused.Normed.
    def normed_linear(self, linear: LinearModule) -> Callable[[Any], Tensor]: ...
    def gated_linear(
        self, linear: LinearModule, activation: str = "silu"
    ) -> Callable[[Any], Tensor]: ...
    def linear_norm(
        self,
        linear: LinearModule,
        norm: Any,
        whole: bool = False,
        after: Any = None,
        scale: float = 1.0,
    ) -> Callable[[Tensor, Tensor], tuple[Any, Tensor]]: ...
    # router, experts and shared MLP of a layer, by one name: x [T, hidden] -> [T, hidden]; ``hook``
    # is ``DecoderSpec.router_hook`` of the layer
    def experts(self, name: str, hidden: int, spec: Experts, hook: Any = None) -> LinearModule: ...
    def attention(self, index: int, spec: AttnSpec) -> Attention: ...
    # cos and sin for ``QKPre``; ``twice``: also for requests longer than ``rope.switch``, behind the others
    def rotary(self, rope: Rope, twice: bool = False) -> tuple[Tensor, Tensor]: ...
    def activation(self, name: str) -> Callable[[Tensor], Tensor]: ...
    def decoder(self, spec: DecoderSpec) -> Model: ...


class Model(Protocol):
    """``__call__`` gives hidden states [T, H] (final norm applied); ``logits`` maps [N, H] to [N, V].

    A class with ``takes_logits_indices = True`` beside its ``__call__`` gives those of
    ``step.logits_indices`` alone, [N, H] in that order, where it is not None: what follows the last attention is
    computed for no other token.  Keys and values of all T are written in every layer all the same.  They are on the
    device and not to be read by the host (the step may be captured); a token may be there twice, and in any place.
    Without the attribute a model gives all.

    A class with ``tap_points`` beside its ``__call__``, a mapping of names to widths, passes the tensor [T, width] of
    each through ``step.taps`` where that is not None, once in each call, so that requests may read it and add to it.
    The point "logits", which needs no word of the model, is what ``logits`` gives.  Without the attribute a model has
    no points, and requests with taps are refused.
    """

    def __call__(self, step: StepTensors) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


def takes_logits_indices(model: Model) -> bool:
    """Whether the class that has the model's ``__call__`` says so: one that overrides it says it again, or does not."""
    return bool(vars(_caller(model)).get("takes_logits_indices", False))


def tap_points(model: Model) -> dict[str, int]:
    """The points that a model's ``__call__`` passes through ``StepTensors.taps``, and their widths; likewise."""
    return dict(getattr(model, "tap_points", {})) if "tap_points" in vars(_caller(model)) else {}


def _caller(model: Model) -> type:
    """The class that has the model's ``__call__``."""
    return next((c for c in type(model).__mro__ if "__call__" in vars(c)), type(model))


class Conversion(Protocol):
    """What comes between a checkpoint and the rules, where its tensors are not those that the rules speak of."""

    def name(self, source: str) -> str | None:
        """The rules' name of a checkpoint's tensor; None: it is not needed, or one of several that are made into
        another."""
        ...

    def tensors(self, found: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All tensors of a checkpoint by its names -> those that the rules speak of, in any order."""
        ...


class ModelArch:
    """One architecture.  ``cfg`` is transformers' config object of the text model.

    One whose models a ``DecoderSpec`` can say overrides ``describe`` and nothing else; any other one overrides
    ``attention``, ``build`` and ``weights``.  ModelError, naming the field, for a config value that changes the
    arithmetic and is not implemented.
    """

    def describe(self, cfg: Any) -> DecoderSpec:
        raise NotImplementedError(
            f"{type(self).__name__} says of no model what it is: want describe, or attention, build and weights"
        )

    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        """One spec per layer, for the whole model (not a process's share)."""
        return [layer.attention for layer in self.describe(cfg).layers]

    def build(self, cfg: Any, parts: Parts) -> Model:
        return parts.decoder(self.describe(cfg))

    def weights(self, cfg: Any) -> Sequence[Rule]:
        return decoder_rules(self.describe(cfg))

    def conversion(self, cfg: Any) -> Conversion | None:
        """None: the rules speak of the checkpoint's tensors as they are."""
        return None

    def notes(self, cfg: Any) -> Mapping[str, str]:
        """What the user may want to know of how the model is built, by a word that says of what."""
        return {}

    def switch(self, cfg: Any) -> int | None:
        """The length, in tokens, beyond which a request has another rotary embedding (``decoder.Rope``)."""
        described = type(self).describe is not ModelArch.describe
        return self.describe(cfg).switch if described else None


def decoder_rules(spec: DecoderSpec) -> list[Rule]:
    """Where the weights of a decoder come from, by ``spec.names``."""
    names = spec.names
    rules = [Rule(names.embed, "embed"), Rule(names.norm, "norm")]
    rules.append(Rule(names.head, None if spec.tied else "lm_head"))
    if spec.embed_norm:
        rules.append(Rule(names.embed_norm, "embed_norm"))
    if spec.positions:
        rules.append(Rule(names.positions, "positions"))
    alike: dict[tuple, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        alike.setdefault(_weights_of(layer), []).append(i)
    for kind, members in alike.items():
        numbers = ["{i}"] if len(alike) == 1 else [str(i) for i in members]
        for n in numbers:
            rules += _layer_rules(names.layer.replace("{i}", n), f"layers.{n}.", spec, *kind)
    return rules


def _weights_of(layer: LayerSpec) -> tuple:
    """What of a layer its rules go by."""
    rope, mlp = layer.rope, layer.mlp
    turned = rope.dim if rope is not None and rope.interleaved else 0
    kind: Any = mlp.gated if isinstance(mlp, MLP) else mlp
    a, norms = layer.attention, layer.norms
    count = 4 if norms == AROUND else 1 if layer.parallel and not layer.mlp_norm else 2
    return count, layer.qk_norm, kind, a.dim_qk, a.sinks, turned


def _layer_rules(
    hf: str,
    our: str,
    spec: DecoderSpec,
    norms: int,
    qk_norm: str | None,
    mlp: bool | Experts,
    dim: int,
    sinks: bool,
    turned: int,
) -> list[Rule]:
    names = spec.names
    pairs = (dim, turned) if turned else None
    rules = [Rule(hf + names.out, our + "attn.o")]
    if len(names.qkv) == 1:
        rules.append(
            Rule(
                hf + names.qkv[0],
                our + "attn.qkv",
                ("q", "k", "v"),
                pairs,
                groups=names.qkv_groups,
            )
        )
    else:
        for part, name in zip("qkv", names.qkv, strict=True):
            rules.append(Rule(hf + name, our + "attn.qkv", part, pairs if part != "v" else None))
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


def _mlp_rules(hf: str, our: str, gate_up: tuple[str, ...], down: str, gated: bool) -> list[Rule]:
    rules = [Rule(hf + down, our + "down")]
    if not gated:
        return [*rules, Rule(hf + gate_up[-1], our + "up")]
    if len(gate_up) == 1:
        return [*rules, Rule(hf + gate_up[0], our + "gate_up", ("gate", "up"))]
    parts = zip(("gate", "up"), gate_up, strict=True)
    return rules + [Rule(hf + name, our + "gate_up", part) for part, name in parts]


def _expert_rules(hf: str, our: str, names: WeightNames, spec: Experts) -> list[Rule]:
    """Those of every form."""
    rules: list[Rule] = []
    for form in names.experts:
        rules.append(Rule(hf + form.router, our + "router", form=form.form))
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
    """Of a tensor of all experts, and its bias."""
    turns = form.interleaved and len(parts) > 1
    weight = Rule(
        source,
        module,
        parts,
        transposed=form.transposed,
        interleaved=turns,
        param="weight",
        form=form.form,
    )
    plain = replace(weight, transposed=False)
    several = [replace(plain, source=f"{source}_{param}", param=param) for param in form.params]
    bias = replace(plain, source=source + "_bias", param="bias")
    return [*(several or [weight]), bias]
