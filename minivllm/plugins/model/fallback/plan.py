"""The plan of a model, which lists the modules that the engine replaces and the weights that the model keeps."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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

MARK = torch.bfloat16  # dtype on the meta device that marks tensors with the model's dtype, which is not known yet
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
    """The replacements in a model.  Keys are the names of modules in transformers' model."""

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
        """Return the rules of the checkpoint; ``tied`` means that config.json ties the head's weight."""
        found = [Rule(name, name) for name in (*self.norms, *self.embeddings)]
        together = {name: whole for whole, names in self.merged.items() for name in names}
        for name, matrix in self.matrices.items():
            whole = together.get(name)
            part = name.rpartition(".")[2] if whole else ""
            found.append(Rule(name, whole or name, part, transposed=matrix.transposed))
        found.append(Rule(self.head, None if self.tied and tied else self.head))
        found += [Rule(name, rest_name(name)) for name in self.rest]
        found += [Rule(call.module, f"layers.{i}.attn") for i, call in enumerate(self.calls) if call.sinks]
        return list(dict.fromkeys(_short(rule) for rule in found))


def rest_name(name: str) -> str:
    """Return the name of the weights that a module keeps.  The module itself may still be replaced."""
    return f"{name}.own"


def _short(rule: Rule) -> Rule:
    """Return a rule for the modules of all layers."""
    if rule.module is None or not rule.module.startswith(rule.source.rpartition(".")[0]):
        return rule
    names = (re.sub(r"\.\d+(?=\.|$)", ".{i}", name, count=1) for name in (rule.source, rule.module))
    return Rule(*names, rule.part, rule.pairs, rule.transposed)


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
    known: dict[Any, Norm | None] = {}
    exact = _exact(model)
    for name, module in model.named_modules():
        if name == plan.head or any(p.search(f"{name}.{n}") for p in exact for n, _ in module.named_parameters()):
            continue
        if isinstance(module, nn.Embedding):
            plan.embeddings[name] = module.weight.shape[0], module.weight.shape[1]
        elif (matrix := _matrix(module)) is not None:
            plan.matrices[name] = matrix
        elif (norm := _norm(module, known)) is not None:
            plan.norms[name] = module.weight.shape[0], norm
        elif (activation := experts_of(module)) is not None:
            plan.experts[name] = activation
    _choose_head_norms(plan, found.often)
    _choose_merged(plan, model, found.inputs, found.often)
    _choose_rest(plan, model, exact)
    return plan


def _exact(model: Any) -> list[re.Pattern]:
    """Return patterns of the names of weights that are always float32."""
    words = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return [re.compile(re.escape(word).replace(r"\*", ".*")) for word in words]


def _matrix(module: nn.Module) -> Matrix | None:
    if type(module) is nn.Linear:
        return Matrix(module.in_features, module.out_features, module.bias is not None, False)
    if type(module) is Conv1D:
        return Matrix(module.weight.shape[0], module.weight.shape[1], True, True)
    return None


def _choose_head(plan: Plan, model: Any, hidden: int) -> None:
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), "")
    if type(head) is not nn.Linear or head.in_features != hidden or not name:
        raise ModelError(
            f"transformers' {type(model).__name__}: its head is not one matrix after the hidden states; expected a "
            "causal language model with one"
        )
    plan.head = name
    same = (n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is head.weight)
    plan.tied = next(same, "")


def _choose_head_norms(plan: Plan, often: set[str]) -> None:
    for call in plan.calls:
        q, k = call.before or ("", "")
        if q not in plan.norms or k not in plan.norms or q == k or often & {q, k}:
            continue
        (q_dim, q_kind), (k_dim, k_kind) = plan.norms[q], plan.norms[k]
        if q_dim == k_dim == call.spec.dim_qk and q_kind == k_kind and not q_kind.centered:
            plan.head_norms[call.module] = q, k


def _choose_merged(plan: Plan, model: nn.Module, inputs: dict[str, Any], often: set[str]) -> None:
    for name, module in model.named_modules():
        for names in TOGETHER:
            full = [f"{name}.{child}" for child in names]
            matrices = [plan.matrices.get(child) for child in full]
            given = [inputs.get(child) for child in full]
            if None in matrices or given[0] is None or any(x is not given[0] for x in given) or often & set(full):
                continue
            if len({(m.bias, m.transposed) for m in matrices if m is not None}) == 1:
                plan.merged[f"{name}.{'+'.join(names)}"] = tuple(full)
        for names in GATED:
            if f"{name}.{'+'.join(names[:2])}" in plan.merged and f"{name}.{names[2]}" in plan.matrices:
                activation = gate_of(module, names)
                if activation is not None:
                    plan.gated[name] = activation


@torch.no_grad()
def gate_of(module: nn.Module, names: Sequence[str]) -> str | None:
    """Return the activation of an MLP that computes ``down(activation(gate(x)) * up(x))``, found by a test with
    small matrices.
    """
    if {name for name, _ in module.named_children()} - {"act_fn", "act", "activation_fn", *names}:
        return None
    if list(module.parameters(recurse=False)) or list(module.buffers()):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(12, 8, generator=generator) for _ in names)
    x, probe = torch.randn(1, 3, 8, generator=generator), copy.copy(module)
    probe._modules = dict(module._modules)
    for name, weight in zip(names, (gate, up, down.T), strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        probe._modules[name] = linear
    try:
        found = probe(x)
    except Exception:
        return None  # the inputs of the products differ from those of a gated MLP
    for activation in ACTIVATIONS:
        wanted = (APPLY[activation](x @ gate.T) * (x @ up.T)) @ down
        if isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-4):
            return activation
    return None


@torch.no_grad()
def experts_of(module: Any) -> str | None:
    """Return the activation of a layer's experts, found by a test of their gate with random numbers.

    None means that the experts do not compute ``down(activation(gate) * up)`` of matrices in the layout of
    ``device.kernels.experts``.
    """
    params = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
    up, down = params.get("gate_up_proj", ()), params.get("down_proj", ())
    if not hasattr(module, "_apply_gate") or len(up) != 3 or len(down) != 3:
        return None
    biases = {"gate_up_proj_bias": up[:2], "down_proj_bias": down[:2]}
    strange = any(
        biases.get(name) != shape for name, shape in params.items() if name not in ("gate_up_proj", "down_proj")
    )
    if strange or getattr(module, "has_post_expert_norm", False) or up != (down[0], 2 * down[2], down[1]):
        return None
    if getattr(module, "is_transposed", True) or not getattr(module, "is_concatenated", False):
        return None
    x = 2 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    try:
        found = module._apply_gate(x)
    except Exception:
        return None  # the module has further parameters
    gate, value = x.chunk(2, dim=-1)
    for activation in ACTIVATIONS:
        wanted = APPLY[activation](gate) * value
        if isinstance(found, Tensor) and found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-6):
            return activation
    return None


def _norm(module: nn.Module, known: dict[Any, Norm | None]) -> Norm | None:
    """Return the norm that a module without children computes, None if it is no norm."""
    params = dict(module.named_parameters(recurse=False))
    vectors = params.keys() <= {"weight", "bias"} and "weight" in params and all(p.dim() == 1 for p in params.values())
    if not vectors or list(module.children()) or list(module.buffers(recurse=False)):
        return None
    numbers = tuple((k, v) for k, v in sorted(vars(module).items()) if type(v) in (int, float, bool))
    key = type(module), tuple(params), numbers, module.weight.shape
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
        param.copy_(torch.randn(param.shape, generator=generator))
    dim, bias = probe.weight.shape[0], getattr(probe, "bias", None)
    samples = [torch.randn(1, 3, dim, generator=generator) * size + shift for size, shift in ((2.0, 0.5), (1e-3, 0.0))]
    try:
        found = [probe(x) for x in samples]
    except Exception:
        return None
    if not all(isinstance(y, Tensor) and y.shape == x.shape for x, y in zip(samples, found, strict=True)):
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
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0 < v < 0.1} | {1e-6, 1e-5}
    for eps in sorted(numbers, key=lambda v: v not in vars(module).values()):
        yield Norm(eps, 0.0, True, bias)
        if not bias:
            yield Norm(eps)
            yield Norm(eps, 1.0)


def _choose_rest(plan: Plan, model: Any, exact: Sequence[re.Pattern]) -> None:
    """Add the parameters and stored buffers of modules that are not replaced to the plan."""
    taken = {*plan.matrices, *plan.norms, *plan.embeddings}
    sinks = {f"{call.module}.{call.sinks}" for call in plan.calls if call.sinks}
    seen: dict[int, str] = {}
    for full, tensor in model.state_dict(keep_vars=True).items():
        name, _, param = full.rpartition(".")
        if name in taken or full in sinks or (name == plan.head and param == "weight"):
            continue
        if not name:
            raise ModelError(
                f"transformers' {type(model).__name__}: {param} belongs to no module; use a model without it"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"transformers' {type(model).__name__}: {full} holds {tensor.dtype}; expected floating point"
            )
        if id(tensor) in seen:
            raise ModelError(
                f"transformers' {type(model).__name__}: {full} is {seen[id(tensor)]}; only the head may share a weight"
            )
        seen[id(tensor)] = full
        dtype = None if tensor.dtype == MARK else str(tensor.dtype).removeprefix("torch.")
        dtype = "float32" if any(pattern.search(full) for pattern in exact) else dtype
        plan.rest.setdefault(name, {})[param] = tuple(tensor.shape), dtype
