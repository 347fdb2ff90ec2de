"""The plug-in ``transformers``, for causal language models of transformers whose attention the engine can compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The architecture plug-in, which computes the plan of a configuration once and keeps it."""

    _plan: Plan

    def __init__(self) -> None:
        self._content: Any = None
        self._conversion: Conversion | None = None

    def plan(self, cfg: Any) -> Plan:
        hf = config_of(cfg)
        content = {k: v for k, v in hf.to_dict().items() if k != "tie_word_embeddings"}
        if self._content != content:
            self._plan, self._conversion = make_plan(hf), None
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
            self._conversion = HFConversion(blank_model(class_of(hf), hf, MARK))
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
        model = blank_model(class_of(cfg), cfg, parts.dtype)
        self.current, body = Current(), model.base_model
        self.parts, self.model, self.body = parts, model, body
        self._embeddings(plan)
        self._rest(plan)
        self._products(plan)
        self._experts(plan)
        self.norms = {name: parts.norm(name, *size) for name, size in plan.norms.items()}
        passing = {name for names in plan.head_norms.values() for name in names}
        for name, norm in self.norms.items():
            place(model, name, Passing() if name in passing else Norming(norm, plan.norms[name][0]))
        self._head(plan)
        if parts.device != "meta":
            self._buffers()
        self._attention(plan)
        self.last = GivenBody(body)
        place(model, model.base_model_prefix, self.last)

    def _embeddings(self, plan: Plan) -> None:
        self.tables = {name: self.parts.embedding(name, *size) for name, size in plan.embeddings.items()}
        for name, table in self.tables.items():
            own(self.model.get_submodule(name), "weight", table.weight)

    def _rest(self, plan: Plan) -> None:
        for name, shapes in plan.rest.items():
            module = self.model.get_submodule(name)
            for param, tensor in self.parts.tensors(rest_name(name), shapes).items():
                own(module, param, tensor)

    def _products(self, plan: Plan) -> None:
        together = {name for names in plan.merged.values() for name in names}
        linears: dict[str, Any] = {}
        for name, m in plan.matrices.items():
            if name not in together:
                linears[name] = self.parts.linear(name, m.inp, [("", m.out)], bias=m.bias)
                place(self.model, name, Projection(linears[name], m.inp, m.out))
        for whole, names in plan.merged.items():
            matrices, children = [plan.matrices[n] for n in names], [n.rpartition(".")[2] for n in names]
            sizes = [(child, m.out) for child, m in zip(children, matrices, strict=True)]
            linears[whole] = self.parts.linear(whole, matrices[0].inp, sizes, bias=matrices[0].bias)
            shared = Shared(linears[whole], matrices[0].inp, [m.out for m in matrices])
            for i, name in enumerate(names):
                place(self.model, name, SharedPiece(shared, i))
        for name, activation in plan.gated.items():
            whole = next(w for w in plan.merged if w.rpartition(".")[0] == name)
            down = next(n for n in linears if n.rpartition(".")[0] == name and n != whole)
            place(self.model, name, Gated(self.parts.gated_linear(linears[whole], activation), linears[down]))

    def _experts(self, plan: Plan) -> None:
        for name, activation in plan.experts.items():
            module = self.model.get_submodule(name)
            if kernels_serve(self.parts, *module.down_proj.shape[1:]):
                module.forward = Routed(module, activation, self.parts.invariant)

    def _head(self, plan: Plan) -> None:
        old = self.model.get_submodule(plan.head)
        size, tied = (old.in_features, old.out_features), self.tables.get(plan.tied)
        head = self.parts.lm_head(plan.head, *size, tied)
        bias = old.bias
        place(self.model, plan.head, FallbackHead(head, bias, *size))

    def _buffers(self) -> None:
        empty = fill_buffers(self.model, self.parts.device)
        for name, module in self.model.named_modules():
            empty += [f"{name}.{k}" for k, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta]
        if empty:
            raise ModelError(
                f"transformers' {type(self.model).__name__}: {empty[0]} is computed only in the model's constructor; "
                "use a model whose _init_weights computes it"
            )

    def _attention(self, plan: Plan) -> None:
        made: dict[Any, tuple[Tensor | None, Tensor | None]] = {None: (None, None)}
        for i, call in enumerate(plan.calls):
            module, turn = self.model.get_submodule(call.module), call.rotation
            layer = self.parts.attention(i, call.spec)
            if turn not in made:
                made[turn] = self._tables(turn)
            if turn is not None:
                module.forward = with_apply(module, leave)
            pre = QKPre(*made[turn])
            if call.module in plan.head_norms:
                q, k = plan.head_norms[call.module]
                pre = QKPre(*made[turn], self.norms[q].weight, self.norms[k].weight, plan.norms[q][1].eps)
            setattr(module, SLOT, Attends(layer, self.current, pre))

    def _tables(self, turn: Any) -> tuple[Tensor, Tensor]:
        length = self.parts.backend.ctx.max_len + 1
        if self.parts.device == "meta":
            size = torch.empty(length, turn.dim, device="meta")
            return size, size
        return tables(self.model, turn, length, self.parts.device)

    def __call__(self, step: StepTensors) -> Tensor:
        self.current.step = step
        out = self.body(input_ids=step.ids[None], position_ids=step.position[None], use_cache=False, return_dict=True)
        return out.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        self.last.hidden = hidden = hidden[None]  # [1, N, H], because some models read the shape of the body's output
        return self.model(inputs_embeds=hidden, use_cache=False, return_dict=True).logits[0]
