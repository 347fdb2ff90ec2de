"""The plan of a model, which lists the modules that the engine replaces and the weights that the model keeps."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from minivllm.core.interfaces.decoder import ACTIVATIONS, Norm
from minivllm.core.interfaces.model import Rule
from minivllm.device.layers.activation import APPLY
from minivllm.device.layers.norm import rms_norm
from minivllm.errors import ModelError

from .blank import blank_model, check_config, class_of, own_attention
from .trace import Call, trace_model

# dtype of the model on the meta device, where the dtype of the run is not known yet; tensors with it get the dtype of
# the run
MARK = torch.bfloat16
# names of matrices that are joined to one product if all read the same tensor
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("gate_proj", "up_proj"), ("w1", "w3"),
)  # fmt: skip
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True)
class Matrix:
    inp: int
    out: int
    bias: bool
    transposed: bool


@dataclass
class Plan:
    """The modules of transformers' model that the engine replaces, by their names in the model."""

    calls: list[Call]
    matrices: dict[str, Matrix] = field(default_factory=dict)
    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name of the product -> names of its matrices
    gated: dict[str, str] = field(default_factory=dict)  # name of an MLP -> its activation
    # name of the experts -> their activation; the module keeps the weights
    experts: dict[str, str] = field(default_factory=dict)
    norms: dict[str, tuple[int, Norm]] = field(default_factory=dict)
    # attention module -> names of the norms of each head of q and k, which the engine's attention applies before it
    # rotates
    head_norms: dict[str, tuple[str, str]] = field(default_factory=dict)
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)  # rows, dim
    head: str = ""
    tied: str = ""  # name of the embedding whose weight the head shares
    # module -> parameter -> (shape, dtype or None for the model's dtype)
    rest: dict[str, dict[str, tuple[tuple[int, ...], str | None]]] = field(default_factory=dict)
    layers: int = 0

    def rules(self, tied: bool) -> list[Rule]:
        """Return the rules that map tensors of the checkpoint to modules.

        ``tied`` means that the head shares the weight of the embedding, as config.json says.
        """
        found = [Rule(name, name) for name in (*self.norms, *self.embeddings)]
        product_of = {name: whole for whole, names in self.merged.items() for name in names}
        for name, matrix in self.matrices.items():
            product, piece = name, ""
            if name in product_of:
                product = product_of[name]
                piece = name.rpartition(".")[2]
            rule = Rule(name, product, piece, transposed=matrix.transposed)
            found.append(rule)
        shares_weight = bool(self.tied) and tied
        found.append(Rule(self.head, None if shares_weight else self.head))
        found += [Rule(name, rest_name(name)) for name in self.rest]
        for i, call in enumerate(self.calls):
            if call.sinks:
                found.append(Rule(call.module, f"layers.{i}.attn"))
        general = [_short(rule) for rule in found]
        return list(dict.fromkeys(general))


def rest_name(name: str) -> str:
    """Return the name under which weights are loaded that a module keeps.  The module itself may still be replaced."""
    return f"{name}.own"


def _short(rule: Rule) -> Rule:
    """Return a rule for the modules of all layers: ``{i}`` replaces the index of the layer in both of its names."""
    if rule.module is None:
        return rule
    parent = rule.source.rpartition(".")[0]
    if not rule.module.startswith(parent):
        return rule
    return replace(rule, source=_every_layer(rule.source), module=_every_layer(rule.module))


def _every_layer(name: str) -> str:
    """Return the name of a module with ``{i}`` for the first number in it."""
    return re.sub(r"\.\d+(?=\.|$)", ".{i}", name, count=1)


def make_plan(cfg: Any) -> Plan:
    """Return the plan for a model.  Raise ModelError with a single line for a model that cannot run."""
    cls = class_of(cfg)
    check_config(cfg)
    try:
        model = blank_model(cls, cfg, MARK)
        found = trace_model(model, cfg)
    except ModelError as exc:
        if reason := own_attention(cls):
            raise ModelError(reason) from exc
        raise
    plan = Plan(found.calls, layers=len(found.calls))
    _choose_head(plan, model, found.hidden)
    exact = _exact(model)
    _choose_modules(plan, model, exact)
    _choose_head_norms(plan, found.often)
    _choose_merged(plan, model, found.inputs, found.often)
    _choose_gated(plan, model)
    _choose_rest(plan, model, exact)
    return plan


def _choose_modules(plan: Plan, model: nn.Module, exact: Sequence[re.Pattern]) -> None:
    """Add the embeddings, matrices, norms and experts that the engine replaces to the plan."""
    norms: dict[Any, Norm | None] = {}
    for name, module in model.named_modules():
        params = [f"{name}.{param}" for param, _ in module.named_parameters()]
        if name == plan.head or any(pattern.search(param) for pattern in exact for param in params):
            continue
        if isinstance(module, nn.Embedding):
            rows, dim = module.weight.shape
            plan.embeddings[name] = rows, dim
        elif (matrix := _matrix(module)) is not None:
            plan.matrices[name] = matrix
        elif (norm := _norm(module, norms)) is not None:
            plan.norms[name] = module.weight.shape[0], norm
        elif (activation := experts_of(module)) is not None:
            plan.experts[name] = activation


def _exact(model: Any) -> list[re.Pattern]:
    """Return patterns of the names of weights that stay in float32 whatever the dtype of the run is."""
    words = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return [re.compile(re.escape(word).replace(r"\*", ".*")) for word in words]


def _matrix(module: nn.Module) -> Matrix | None:
    if type(module) is nn.Linear:
        has_bias = module.bias is not None
        return Matrix(module.in_features, module.out_features, has_bias, transposed=False)
    if type(module) is Conv1D:
        inp, out = module.weight.shape
        return Matrix(inp, out, bias=True, transposed=True)
    return None


def _choose_head(plan: Plan, model: Any, hidden: int) -> None:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            plan.head = name
            break
    if not plan.head or type(head) is not nn.Linear or head.in_features != hidden:
        raise ModelError(
            f"transformers' {type(model).__name__}: its head is not one matrix after the hidden states; expected a "
            "causal language model with one"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is head.weight:
            plan.tied = name
            break


def _choose_head_norms(plan: Plan, often: set[str]) -> None:
    for call in plan.calls:
        if call.before is None:
            continue
        q, k = call.before
        if q == k or often & {q, k} or not {q, k} <= plan.norms.keys():
            continue
        dim, kind = plan.norms[q]
        if plan.norms[k] == (dim, kind) and dim == call.spec.dim_qk and not kind.centered:
            plan.head_norms[call.module] = q, k


def _choose_merged(plan: Plan, model: nn.Module, inputs: dict[str, Any], often: set[str]) -> None:
    for name, _ in model.named_modules():
        for children in TOGETHER:
            names = [f"{name}.{child}" for child in children]
            if not plan.matrices.keys() >= set(names) or often & set(names):
                continue
            first, *others = [inputs.get(one) for one in names]
            if first is None or any(other is not first for other in others):
                continue
            matrices = [plan.matrices[one] for one in names]
            layouts = {(matrix.bias, matrix.transposed) for matrix in matrices}
            if len(layouts) == 1:
                plan.merged[_product_name(name, children)] = tuple(names)


def _choose_gated(plan: Plan, model: nn.Module) -> None:
    for name, module in model.named_modules():
        for names in GATED:
            gate, up, down = names
            if _product_name(name, (gate, up)) not in plan.merged or f"{name}.{down}" not in plan.matrices:
                continue
            activation = gate_of(module, names)
            if activation is not None:
                plan.gated[name] = activation


def _product_name(parent: str, children: Sequence[str]) -> str:
    """Return the name of the product of several matrices of a module."""
    return f"{parent}.{'+'.join(children)}"


@torch.no_grad()
def gate_of(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the activation of an MLP that computes ``down(activation(gate(x)) * up(x))``, found by a test with
    small matrices.

    None means that the module computes another function.  ``names`` are the names of gate, up and down in the module.
    """
    children = {name for name, _ in module.named_children()}
    if children - {"act_fn", "act", "activation_fn", *names}:
        return None
    if list(module.parameters(recurse=False)) or list(module.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(12, 8, generator=generator) for _ in names)
    x = torch.randn(1, 3, 8, generator=generator)
    probe = copy.copy(module)
    probe._modules = dict(module._modules)
    for name, weight in zip(names, (gate, up, down.T), strict=True):
        out, inp = weight.shape
        linear = nn.Linear(inp, out, bias=False)
        linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        probe._modules[name] = linear
    try:
        found = probe(x)
    except Exception:
        return None  # the inputs of the products differ from those of a gated MLP
    gates, values = x @ gate.T, x @ up.T
    for activation in ACTIVATIONS:
        inner = APPLY[activation](gates) * values
        if _agree(found, inner @ down, atol=1e-4):
            return activation
    return None


def _agree(found: Any, wanted: Tensor, atol: float) -> bool:
    """Return whether a result is a tensor that equals ``wanted`` within a tolerance."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, atol=atol)


@torch.no_grad()
def experts_of(module: Any) -> str | None:
    """Return the activation of a layer's experts, found by a test of their gate with random numbers.

    None means that the experts do not compute ``down(activation(gate) * up)``, or that their matrices do not have the
    layout that ``device.kernels.experts`` needs.
    """
    if not hasattr(module, "_apply_gate") or not _has_expert_layout(module):
        return None
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(64, 16, generator=generator)
    try:
        found = module._apply_gate(x)
    except Exception:
        return None  # the module has further parameters
    gate, value = x.chunk(2, dim=-1)
    for activation in ACTIVATIONS:
        wanted = APPLY[activation](gate) * value
        if _agree(found, wanted, atol=1e-6):
            return activation
    return None


def _has_expert_layout(module: Any) -> bool:
    """Return whether experts have gate_up_proj [experts, 2 * inner, hidden] and down_proj [experts, hidden, inner].

    Biases of both are allowed, other parameters are not.  The rows of gate come before those of up, no matrix is
    transposed, and no norm follows.
    """
    params = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
    gate_up = params.pop("gate_up_proj", ())
    down = params.pop("down_proj", ())
    if len(gate_up) != 3 or len(down) != 3:
        return False
    count, hidden, inner = down
    if gate_up != (count, 2 * inner, hidden):
        return False
    biases = {"gate_up_proj_bias": gate_up[:2], "down_proj_bias": down[:2]}
    if not params.items() <= biases.items() or getattr(module, "has_post_expert_norm", False):
        return False
    concatenated = getattr(module, "is_concatenated", False)
    return concatenated and not getattr(module, "is_transposed", True)


def _norm(module: nn.Module, known: dict[Any, Norm | None]) -> Norm | None:
    """Return the norm that a module computes, None if it computes another function or has submodules.

    ``known`` keeps the results of modules that were tested before.
    """
    params = dict(module.named_parameters(recurse=False))
    if "weight" not in params or not params.keys() <= {"weight", "bias"}:
        return None
    if any(param.dim() != 1 for param in params.values()):
        return None
    if list(module.children()) or list(module.buffers(recurse=False)):
        return None
    numbers = [(name, value) for name, value in sorted(vars(module).items()) if type(value) in (int, float, bool)]
    key = type(module), tuple(params), tuple(numbers), module.weight.shape
    if key not in known:
        known[key] = norm_of(module)
    return known[key]


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm | None:
    """Return the RMSNorm or LayerNorm that a module computes, or None if it computes another function.

    The module has no submodules, and its parameters are vectors.  The test uses random numbers of usual size, and small
    numbers whose results depend on epsilon.
    """
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for param in probe.parameters():
        values = torch.randn(param.shape, generator=generator)
        param.copy_(values)
    dim = probe.weight.shape[0]
    bias = getattr(probe, "bias", None)
    usual = torch.randn(1, 3, dim, generator=generator) * 2.0 + 0.5
    small = torch.randn(1, 3, dim, generator=generator) * 1e-3
    samples = usual, small
    try:
        found = [probe(x) for x in samples]
    except Exception:
        return None
    if any(not isinstance(y, Tensor) or y.shape != usual.shape for y in found):
        return None
    for kind in _candidates(module, bias is not None):
        weight = probe.weight + kind.offset
        for x, y in zip(samples, found, strict=True):
            if kind.centered:
                wanted = F.layer_norm(x, (dim,), weight, bias, kind.eps)
            else:
                wanted = rms_norm(x, weight, kind.eps)
            if not torch.allclose(y, wanted, rtol=1e-3, atol=1e-4):
                break
        else:
            return kind
    return None


def _candidates(module: nn.Module, bias: bool) -> Iterator[Norm]:
    """Yield norms that a module may compute, first those whose epsilon is an attribute of the module.

    With ``bias`` only LayerNorm with a bias is possible.
    """
    small = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    usual = {1e-6, 1e-5} - small
    for eps in (*small, *usual):
        yield Norm(eps, offset=0.0, centered=True, bias=bias)
        if not bias:
            yield Norm(eps)
            yield Norm(eps, offset=1.0)


def _choose_rest(plan: Plan, model: Any, exact: Sequence[re.Pattern]) -> None:
    """Add the remaining weights to the plan: parameters and stored buffers of modules that are not replaced."""
    taken = {*plan.matrices, *plan.norms, *plan.embeddings}
    in_attention = {f"{call.module}.{call.sinks}" for call in plan.calls if call.sinks}
    in_attention.add(f"{plan.head}.weight")
    label = f"transformers' {type(model).__name__}"
    seen: dict[int, str] = {}
    for full, tensor in model.state_dict(keep_vars=True).items():
        name, _, param = full.rpartition(".")
        if name in taken or full in in_attention:
            continue
        if not name:
            raise ModelError(f"{label}: {param} belongs to no module; use a model without it")
        if not tensor.is_floating_point():
            raise ModelError(f"{label}: {full} holds {tensor.dtype}; expected floating point")
        if id(tensor) in seen:
            first = seen[id(tensor)]
            raise ModelError(f"{label}: {full} is {first}; only the head may share a weight")
        seen[id(tensor)] = full
        dtype = None if tensor.dtype == MARK else str(tensor.dtype).removeprefix("torch.")
        if any(pattern.search(full) for pattern in exact):
            dtype = "float32"
        of_module = plan.rest.setdefault(name, {})
        of_module[param] = tuple(tensor.shape), dtype
