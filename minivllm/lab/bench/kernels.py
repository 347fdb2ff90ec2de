"""The operations of a wired engine one by one: its own modules, weights and KV cache, the back ends that were chosen.

    decode load    rows of one token each, all with the same context          blocks of the real cache, a table each
    prefill load   one row that brings so many tokens of a prompt

An operation is made of one call for each layer that has it, which run one after another: on a GPU the weights of a
layer have left the cache by the time that they are wanted again, as in a step.  What they move and compute is counted
from shapes (``size``, ``flops`` of a call): each operand once.  Nothing else may use the engine meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.attention import AttnSpec, GraphKey
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import StepPlan
from minivllm.core.interfaces.sampling import Draw
from minivllm.device.layers.decoder import Decoder
from minivllm.device.layers.fused import Normed
from minivllm.device.worker import step
from minivllm.errors import ConfigError

from . import textbook

Call = Callable[[], Any]
ONE_BLOCK = 1  # the first that rows may have: block 0 is nobody's


@dataclass
class Operation:
    """``calls``: of each layer that has it; ``torch``: the same by torch's own operations, if it has some, made by
    ``reference``."""

    name: str
    rows: int
    tokens: int
    context: int
    calls: list[Call]
    size: float  # bytes of a call
    flops: float
    reference: Callable[[], list[Call]] = list  # makes ``torch``, whose operands may be large
    captured: bool = True  # what is measured on a GPU can be captured; False: it replays captures itself
    of_step: bool = True  # a step consists of it, once for each call
    torch: list[Call] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.name}, {self.rows} rows, {self.tokens} tokens, context {self.context}"


def runner_of(llm: Any) -> Any:
    """The runner of an engine.  ConfigError where it computes elsewhere, or its model is no table of layers."""
    executor = llm.resolved.parts["executor"].name
    runner = getattr(llm.engine.executor, "runner", None)
    if executor != "minivllm/local" or runner is None:
        raise ConfigError(
            f"bench kernels looks into this process, and executor={executor} computes elsewhere: want executor=local"
        )
    if not isinstance(runner.model, Decoder):
        name = llm.resolved.parts["model"].name
        raise ConfigError(f"bench kernels knows the operations of described models, and {name} builds its own")
    return runner


def held_bytes(module: Any) -> int:
    """Of the tensors of a linear layer, or of what it shares them with."""
    tensors = list(module.tensors.values()) or list(module.tied.tensors.values())
    return sum(t.numel() * t.element_size() for t in tensors)


class KernelBench:
    """The operations of one engine under given loads."""

    def __init__(self, llm: Any) -> None:
        self.runner = runner = runner_of(llm)
        self.worker, self.model, self.backend = runner.worker, runner.model, runner.backend
        self.state, self.parts = runner.state, runner.worker.parts
        self.wiring = runner.wiring
        self.dtype, self.device = self.parts.dtype, self.wiring.device
        self.torch = textbook.TorchOperations(self.device, self.dtype)
        self.item = self.dtype.itemsize

    # ---- loads ---------------------------------------------------------------------------------------------------

    def check(self, rows: Sequence[int], context: Sequence[int], prompts: Sequence[int]) -> None:
        """ConfigError for loads that the engine has no room for."""
        w = self.wiring
        blocks, longest = min(self.worker.num_blocks) - ONE_BLOCK, max([*context, *prompts])
        if max(rows) > w.max_num_seqs:
            raise ConfigError(f"--batch-size {max(rows)} is more than max_num_seqs={w.max_num_seqs}; lower it")
        if longest > w.max_model_len:
            raise ConfigError(f"{longest} tokens of context are more than max_model_len={w.max_model_len}; want fewer")
        if max(prompts, default=0) > w.max_num_batched_tokens:
            what = f"--input-len {max(prompts)} is more than max_num_batched_tokens={w.max_num_batched_tokens}"
            raise ConfigError(f"{what}, the tokens of a step; lower it")
        need = max(rows) * -(-max(context) // w.block)
        if need > blocks:
            what = f"{max(rows)} rows of {max(context)} tokens need {need} blocks, and the KV cache has {blocks}"
            raise ConfigError(f"{what}; raise num_kvcache_blocks, or lower --batch-size or --context-len")

    def plan(self, rows: int, tokens: int, context: int) -> StepPlan:
        """A step of ``rows`` that bring ``tokens`` each and have ``context`` then, in blocks of their own."""
        pages = -(-context // self.wiring.block)
        slots = np.arange(rows, dtype=np.int32)
        table = ONE_BLOCK + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
        at = self.state.to(slots.astype(np.int64))
        self.state.table[:, at, :pages] = self.state.to(table)[None]
        self.state.tokens[at, :context] = torch.randint(
            self.worker.vocab_size, (rows, context), dtype=torch.int32, device=self.state.device
        )
        self.state.stopped[at] = False
        self.state.known[at] = context
        self.state.end[at] = self.wiring.max_model_len
        full = lambda n: np.full(rows, n, np.int32)  # noqa: E731
        return StepPlan(0, slots, full(tokens), full(context - tokens), slots)

    def clear(self) -> None:
        """Rows end: their slots are nobody's again."""
        self.state.stopped[:] = True
        self.state.table[:] = 0
        self.torch.drop()

    def operations(self, rows: int, tokens: int, context: int) -> list[Operation]:
        """Those of a step of ``rows`` with ``tokens`` each, the step itself last."""
        plan = self.plan(rows, tokens, context)
        read = self.runner.read(plan)
        key = GraphKey()
        if tokens == 1 and self.runner.graphs is not None:  # as captured steps have it: only the device knows lengths
            from minivllm.device.worker import captured, graphs

            span = graphs.SHORT if context <= graphs.SHORT else self.wiring.max_model_len
            key = GraphKey("decode", rows, rows, span)
            read.meta.host_kv_len = captured.bounds(key, len(read.meta.table)).kv_len
        self.backend.plan(read.meta, key)
        load = LoadOperations(self, read, rows, tokens, context)
        found = merged([*load.embedding(), *load.layers(), *load.head(), *load.extras()])
        return [*found, self._step(plan, found, rows, tokens, context)]

    def _step(self, plan: StepPlan, found: Sequence[Operation], rows: int, tokens: int, context: int) -> Operation:
        """FORWARD as the engine runs it, without head and draw; moves and computes what its operations do."""
        runner, inside = self.runner, [one for one in found if one.of_step]
        size = sum(one.size * len(one.calls) for one in inside)
        flops = sum(one.flops * len(one.calls) for one in inside)
        captured = True
        if runner.native is not None and runner.native.takes(plan):
            call: Call = partial(runner.native.forward, plan)
        elif (key := self._captured_as(plan)) is not None:
            call, captured = partial(runner.graphs.forward, key, plan), False
        else:
            read = runner.read(plan)
            call = partial(step.forward, self.model, self.backend, read, GraphKey())
        return Operation("step: all layers", rows, tokens, context, [call], size, flops, list, captured, False)

    def _captured_as(self, plan: StepPlan) -> GraphKey | None:
        """The capture of a step that has come as often as it takes to be captured, or None."""
        if self.runner.graphs is None:
            return None
        from minivllm.device.worker.graphs import CAPTURE_FLOPS, SIGHTS

        self.runner.graphs.token_flops = CAPTURE_FLOPS  # no step runs in a larger capture
        keys = [self.runner.graphs.key(plan) for _ in range(SIGHTS)]
        return keys[-1]


def merged(found: Sequence[Operation]) -> list[Operation]:
    """Layers of equal shape are calls of one operation."""
    out: dict[tuple[str, float, float], Operation] = {}
    for one in found:
        same = out.setdefault((one.name, one.size, one.flops), one)
        if same is not one:
            same.calls += one.calls
    for one in out.values():
        one.torch = one.reference()
    return list(out.values())


class LoadOperations:
    """What a step of one load consists of."""

    def __init__(self, bench: KernelBench, read: Any, rows: int, tokens: int, context: int) -> None:
        self.bench, self.read, self.model, self.torch = bench, read, bench.model, bench.torch
        self.rows, self.tokens, self.context = rows, tokens, context
        self.total, self.item, self.dtype = rows * tokens, bench.item, bench.dtype
        self.layer_count = len(bench.model.blocks)
        self._operands: dict[tuple[int, ...], Tensor] = {}
        hidden = bench.model.spec.hidden
        self.x = self.torch.random(self.total, hidden, scale=0.1)
        self.residual = self.torch.random(self.total, hidden, scale=0.1)

    def _op(
        self, name: str, calls: list[Call], size: float, flops: float, own: Callable[[], list[Call]], **more: Any
    ) -> Operation:
        return Operation(name, self.rows, self.tokens, self.context, calls, size, flops, own, **more)

    def _operand(self, *shape: int, scale: float = 0.1) -> Tensor:
        """The same numbers for all layers: what they are changes no time."""
        if shape not in self._operands:
            self._operands[shape] = self.torch.random(*shape, scale=scale)
        return self._operands[shape]

    def _moved(self, *widths: int) -> int:
        """Bytes of activations of these widths, for all tokens."""
        return self.total * sum(widths) * self.item

    def embedding(self) -> list[Operation]:
        width, ids = self.model.spec.hidden, self.read.ids
        embed = self.model.embed
        plain = embed.weight if embed.scheme is None else self._operand(embed.range.rows, width)
        own: Callable[[], list[Call]] = lambda: [partial(F.embedding, ids, plain)]  # noqa: E731
        return [self._op("embedding", [partial(embed, ids)], self._moved(width, width), 0.0, own)]

    def layers(self) -> list[Operation]:
        out = []
        for i, block in enumerate(self.model.blocks):
            out += [self._product("qkv", block.qkv.linear, partial(block.qkv, Normed(self.x)))]
            out += self._attention(block)
            out += [self._out(block), *self._mlp(block, self.model.spec.layers[i].mlp)]
        return out

    def _product(
        self,
        name: str,
        linear: Any,
        call: Call,
        x: Tensor | None = None,
        outputs: int = 0,
        then: Callable[[Tensor], Any] | None = None,
        more: int = 0,
    ) -> Operation:
        """``outputs``: columns of what comes out, if not those of the product; ``more``: other columns that move."""
        info, x = linear.info, self.x if x is None else x
        size = held_bytes(linear) + self._moved(info.in_features, outputs or info.out_features, more)
        own = partial(self.torch.product, x, info.out_features, self.layer_count, then)
        return self._op(name, [call], size, 2.0 * self.total * info.in_features * info.out_features, own)

    def _joined(self, name: str, join: Any, linear: Any, x: Tensor) -> Operation:
        """A product, what is added to the stream, and the norms round that."""
        norms = [getattr(join, "after", None), join.before if hasattr(join, "before") else join.norm]
        name += " + norm" if any(norm is not None for norm in norms) else ""
        then = textbook.joined(self.residual, norms, self.dtype)
        width = 2 * linear.info.out_features
        return self._product(name, linear, partial(join, x, self.residual), x, 0, then, width)

    def _out(self, block: Any) -> Operation:
        linear = block.out if block.parallel else block.o.linear
        x = self._operand(self.total, linear.info.in_features)
        if block.parallel:
            return self._product("attention out", linear, partial(linear, x), x)
        return self._joined("attention out", block.o, linear, x)

    def _mlp(self, block: Any, mlp: Any) -> list[Operation]:
        h = Normed(self.x)
        if block.experts is not None:
            return [self._experts(block, h, mlp)]
        join = block.both if block.parallel else block.down
        down = join.linear
        y = self._operand(self.total, down.info.in_features)
        up = block.up.linear if hasattr(block.up, "linear") else self.bench.parts.modules[_up_name(block)]
        name = "gate and up + gate" if mlp.gated else "up + activation"
        then = textbook.gated(mlp.activation, mlp.gated)
        first = self._product(name, up, partial(block.up, h), None, mlp.inner, then)
        if block.parallel:
            return [first, self._product("down", down, partial(down, y), y)]
        return [first, self._joined("down", join, down, y)]

    def _experts(self, block: Any, h: Normed, spec: Any) -> Operation:
        """Of a random router so many are read that at least one of ``total`` tokens goes to."""
        mixture, n = block.experts, spec.count
        whole = held_bytes(mixture.gate_up) + held_bytes(mixture.down)
        each = (mixture.gate_up.info.out_features + mixture.down.info.out_features) // n
        pair = 2.0 * (
            mixture.gate_up.info.in_features * mixture.gate_up.info.out_features // n
            + mixture.down.info.in_features * mixture.down.info.out_features // n
        )
        used = n * (1 - (1 - spec.chosen / n) ** self.total)
        size = whole / n * used + held_bytes(mixture.router) + self._moved(spec.chosen * each)
        flops = pair * spec.chosen * self.total
        call: Call = partial(mixture, h) if block.parallel else partial(block.down, h, self.residual)
        return self._op("experts", [call], size, flops, list)

    def _attention(self, block: Any) -> list[Operation]:
        layer, pre, meta, made = block.attn.layer, block.pre, self.read.meta, self.torch
        spec: AttnSpec = layer.spec
        wide = [spec.heads * spec.dim_qk, spec.kv_heads * spec.dim_qk, spec.kv_heads * spec.dim_v]
        parts = self._operand(self.total, sum(wide)).split(wide, dim=-1)
        dims = ((spec.heads, spec.dim_qk), (spec.kv_heads, spec.dim_qk), (spec.kv_heads, spec.dim_v))
        q, k, v = (part.view(self.total, *shape) for part, shape in zip(parts, dims, strict=True))
        kept = sum(t.element_size() * t[0].numel() for t in layer.cache.values()) / self.bench.wiring.block  # a token
        places = meta.slot_map[layer.group]
        own = lambda: [textbook.rotated(q, k, v, meta.position, places, pre, max(4096, 2 * self.total))]  # noqa: E731
        turned = self._moved(*wide, wide[0]) + kept * self.total
        window = "" if spec.window is None else f", window {spec.window}"
        put = partial(self.bench.backend.write, layer, q, k, v, meta, pre)
        write = self._op("rotary and write", [put], turned, 0.0, own)
        asked = self._operand(self.total, spec.heads, spec.dim_qk)
        out = asked.new_empty(self.total, spec.heads, spec.dim_v)
        pairs, seen = self._visible(spec)
        size = kept * seen + self._moved(spec.heads * (spec.dim_qk + spec.dim_v))
        flops = 2.0 * spec.heads * (spec.dim_qk + spec.dim_v) * pairs
        load = self.rows, self.tokens, self.context
        other = partial(textbook.attention, made, spec, *load, self.layer_count)
        name = ("attention, decode" if self.tokens == 1 else "attention, prefill") + window
        call = partial(self.bench.backend.forward, layer, asked, meta, out)
        return [write, self._op(name, [call], size, flops, other)]

    def _visible(self, spec: AttnSpec) -> tuple[float, float]:
        """(pairs of query and key, keys that are read) of all rows."""
        last = np.arange(self.context - self.tokens, self.context) + 1
        most = self.context if spec.window is None else spec.window
        read = min(self.context, most + self.tokens - 1)
        return self.rows * float(np.minimum(last, most).sum()), self.rows * float(read)

    def head(self) -> list[Operation]:
        """Of the rows that draw; a row of a prompt draws once."""
        head, hidden, vocab = self.model.head, self.x[: self.rows], self.bench.worker.vocab_size
        size = held_bytes(head) + self.rows * (hidden.shape[1] + vocab) * self.item
        own = partial(self.torch.product, hidden, vocab, 1)
        call = partial(self.model.logits, hidden)
        found = [self._op("head", [call], size, 2.0 * self.rows * hidden.shape[1] * vocab, own, of_step=False)]
        return found + [self._draw(temperature) for temperature in (0.0, 1.0)]

    def _draw(self, temperature: float) -> Operation:
        """The sampler that was chosen, over random logits."""
        runner, state, n = self.bench.runner, self.bench.state, self.rows
        sampler, columns = runner.sampler, state.processors[-1]
        row = sampler.bind_prompt(SamplingParams(temperature=temperature, seed=0), np.zeros(1, np.int32))
        slots = np.arange(n)
        columns.join(slots, state.to(slots), {} if row is None else dict.fromkeys(range(n), row))
        dtype = self.dtype if sampler.any_dtype else torch.float32
        logits = torch.randn(n, self.bench.worker.vocab_size, device=state.device).to(dtype)
        at = state.to(np.stack([slots, np.full(n, self.context)]))
        rows = step.rows_of(state, at[0], at[1], self.context)
        rows.variant = 0 if row is None else row.variant
        drawn = Draw(torch.zeros(n, dtype=torch.int64, device=state.device))
        own = partial(lambda make: [make(logits)], textbook.drawn if temperature else textbook.greedy)
        call = partial(sampler.draw, logits, rows, columns.columns, drawn)
        name = f"draw, temperature {temperature:g}"
        return self._op(name, [call], logits.numel() * logits.element_size(), 0.0, own, of_step=False)

    def extras(self) -> list[Operation]:
        """Norm and gate by themselves, as a step of many tokens has them beside its products."""
        found, width = [], self.model.spec.hidden
        norm = self.model.norm
        own = textbook.normed(norm, self.dtype)
        call: Call = partial(norm, self.x, self.residual)
        size, alone = self._moved(*[width] * 4), lambda: [lambda: own(self.x + self.residual)]
        found.append(self._op("norm + add", [call], size, 0.0, alone, of_step=False))
        mlp = self.model.spec.layers[0].mlp
        if getattr(mlp, "gated", False):
            both, then = self.torch.random(self.total, 2 * mlp.inner), textbook.gated(mlp.activation, True)
            gate = partial(self.bench.parts.gate_mul, both, activation=mlp.activation)
            size = self._moved(3 * mlp.inner)
            found.append(self._op("gate", [gate], size, 0.0, lambda: [lambda: then(both)], of_step=False))
        return found


def _up_name(block: Any) -> str:
    return f"{block.name}mlp.up"
