"""The plug-in ``transformers``, for causal language models of transformers whose attention the engine can compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, QKPre
from minivllm.core.interfaces.model import Conversion, Model, ModelArch, Parts, Rule, StepTensors
from minivllm.device.layers.experts import kernels_serve
from minivllm.errors import ModelError

from .attend import SLOT, Attends, Current
from .blank import blank_model, class_of, config_of
from .layers import (
    FallbackHead,
    Gated,
    GivenBody,
    Norming,
    Passing,
    Projection,
    Routed,
    Shared,
    SharedPiece,
    fill_buffers,
    own,
    place,
)
from .plan import MARK, Plan, make_plan, rest_name
from .report import report
from .rope import leave, tables, with_apply


class TransformersArch(ModelArch):
    """The architecture plug-in for models of transformers; the plan of a configuration is computed once and kept."""

    _plan: Plan

    def __init__(self) -> None:
        self._content: Any = None
        self._conversion: Conversion | None = None

    def plan(self, cfg: Any) -> Plan:
        hf = config_of(cfg)
        content = hf.to_dict()
        content.pop("tie_word_embeddings", None)
        if self._content != content:
            self._plan = make_plan(hf)
            self._conversion = None
            self._content = content
        return self._plan

    def attention(self, cfg: Any) -> Sequence[AttnSpec]:
        return [call.spec for call in self.plan(cfg).calls]

    def weights(self, cfg: Any) -> Sequence[Rule]:
        return self.plan(cfg).rules(bool(cfg.tie_word_embeddings))

    def conversion(self, cfg: Any) -> Conversion:
        from .checkpoint import HFConversion

        self.plan(cfg)
        if self._conversion is None:
            hf = config_of(cfg)
            model = blank_model(class_of(hf), hf, MARK)
            self._conversion = HFConversion(model)
        return self._conversion

    def notes(self, cfg: Any) -> Mapping[str, str]:
        return report(self.plan(cfg))

    def build(self, cfg: Any, parts: Parts) -> Model:
        return Fallback(self.plan(cfg), config_of(cfg), parts)


class Fallback:
    """A model that computes ids [T] -> hidden [T, H] -> logits [N, V] by transformers' own forward."""

    def __init__(self, plan: Plan, cfg: Any, parts: Any) -> None:
        if parts.heads(2 * plan.layers) != 2 * plan.layers:
            raise ModelError("a model of transformers is not split over processes: set tensor_parallel_size=1")
        self.parts = parts
        self.current = Current()
        self.model = model = blank_model(class_of(cfg), cfg, parts.dtype)
        self.body = body = model.base_model
        self._embeddings(plan)
        self._rest(plan)
        self._products(plan)
        self._experts(plan)
        self._norms(plan)
        self._head(plan)
        if parts.device != "meta":
            self._buffers()
        self._attention(plan)
        self.last = GivenBody(body)
        place(model, model.base_model_prefix, self.last)

    def _embeddings(self, plan: Plan) -> None:
        self.tables = {}
        for name, (rows, dim) in plan.embeddings.items():
            table = self.parts.embedding(name, rows, dim)
            self.tables[name] = table
            own(self.model.get_submodule(name), "weight", table.weight)

    def _rest(self, plan: Plan) -> None:
        for name, shapes in plan.rest.items():
            module = self.model.get_submodule(name)
            for param, tensor in self.parts.tensors(rest_name(name), shapes).items():
                own(module, param, tensor)

    def _products(self, plan: Plan) -> None:
        """Replace the model's linear layers, and its MLPs with a gate, by layers of the engine."""
        linears = {}
        merged = set(chain.from_iterable(plan.merged.values()))
        for name, matrix in plan.matrices.items():
            if name in merged:
                continue
            outputs = [("", matrix.out)]
            linear = self.parts.linear(name, matrix.inp, outputs, bias=matrix.bias)
            linears[name] = linear
            place(self.model, name, Projection(linear, matrix.inp, matrix.out))
        linears |= self._merged_products(plan)
        for name, activation in plan.gated.items():
            inside = [linear for linear in linears if linear.rpartition(".")[0] == name]
            up = next(linear for linear in inside if linear in plan.merged)
            down = next(linear for linear in inside if linear != up)
            gated = self.parts.gated_linear(linears[up], activation)
            place(self.model, name, Gated(gated, linears[down]))

    def _merged_products(self, plan: Plan) -> dict[str, Any]:
        """Replace the matrices of each group that multiply the same input by one linear layer of the engine.

        Return these linear layers by the name of the group.
        """
        linears = {}
        for whole, names in plan.merged.items():
            matrices = [plan.matrices[name] for name in names]
            sizes = [matrix.out for matrix in matrices]
            children = [name.rpartition(".")[2] for name in names]
            outputs = list(zip(children, sizes, strict=True))
            first = matrices[0]
            linear = self.parts.linear(whole, first.inp, outputs, bias=first.bias)
            linears[whole] = linear
            shared = Shared(linear, first.inp, sizes)
            for i, name in enumerate(names):
                place(self.model, name, SharedPiece(shared, i))
        return linears

    def _experts(self, plan: Plan) -> None:
        for name, activation in plan.experts.items():
            module = self.model.get_submodule(name)
            if kernels_serve(self.parts, *module.down_proj.shape[1:]):
                module.forward = Routed(module, activation, self.parts.invariant)

    def _norms(self, plan: Plan) -> None:
        in_attention = set(chain.from_iterable(plan.head_norms.values()))
        self.norms = {}
        for name, (dim, kind) in plan.norms.items():
            norm = self.parts.norm(name, dim, kind)
            self.norms[name] = norm
            module = Passing() if name in in_attention else Norming(norm, dim)
            place(self.model, name, module)

    def _head(self, plan: Plan) -> None:
        old = self.model.get_submodule(plan.head)
        inp, out = old.in_features, old.out_features
        tied = self.tables.get(plan.tied)
        head = self.parts.lm_head(plan.head, inp, out, tied)
        place(self.model, plan.head, FallbackHead(head, old.bias, inp, out))

    def _buffers(self) -> None:
        empty = fill_buffers(self.model, self.parts.device)
        for name, module in self.model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    empty.append(f"{name}.{attribute}")
        if empty:
            label = f"transformers' {type(self.model).__name__}"
            raise ModelError(
                f"{label}: {empty[0]} is computed only in the model's constructor; "
                "use a model whose _init_weights computes it"
            )

    def _attention(self, plan: Plan) -> None:
        made: dict[Any, tuple[Tensor | None, Tensor | None]] = {None: (None, None)}
        for i, call in enumerate(plan.calls):
            module = self.model.get_submodule(call.module)
            rotation = call.rotation
            if rotation not in made:
                made[rotation] = self._tables(rotation)
            if rotation is not None:
                module.forward = with_apply(module, leave)
            cos, sin = made[rotation]
            pre = QKPre(cos, sin)
            if call.module in plan.head_norms:
                q, k = plan.head_norms[call.module]
                eps = plan.norms[q][1].eps
                pre = QKPre(cos, sin, self.norms[q].weight, self.norms[k].weight, eps)
            layer = self.parts.attention(i, call.spec)
            setattr(module, SLOT, Attends(layer, self.current, pre))

    def _tables(self, turn: Any) -> tuple[Tensor, Tensor]:
        length = self.parts.backend.ctx.max_len + 1
        if self.parts.device == "meta":
            size = torch.empty(length, turn.dim, device="meta")
            return size, size
        return tables(self.model, turn, length, self.parts.device)

    def __call__(self, step: StepTensors) -> Tensor:
        self.current.step = step
        ids, position = step.ids[None], step.position[None]
        out = self.body(input_ids=ids, position_ids=position, use_cache=False, return_dict=True)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        batch = hidden[None]  # [1, N, H], because some models read the shape of the body's output
        self.last.hidden = batch
        out = self.model(inputs_embeds=batch, use_cache=False, return_dict=True)
        return out.logits[0]
