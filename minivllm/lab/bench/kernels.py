"""Call the operations of an engine one by one, with its own modules, weights, KV cache and back ends.

    decode load    rows of one token each, all with the same context, in blocks of the engine's cache
    prefill load   one row with some tokens of a prompt

An operation has a call for each layer.  The calls run one after another, so a GPU has evicted the weights of a layer
from its cache before they are used again, as in a step.  The bytes and arithmetic operations of a call are counted from
shapes, each operand once.  Nothing else may use the engine meanwhile.
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
Reference = Callable[[], list[Call]]
FIRST_BLOCK = 1  # the first block that rows can use; block 0 is the null block


@dataclass
class Operation:
    """An operation under a load of ``rows`` rows with ``tokens`` tokens each."""

    name: str
    rows: int
    tokens: int
    context: int
    calls: list[Call]  # one call for each layer with the operation
    size: float  # bytes that a call reads and writes
    flops: float  # of a call
    # returns the calls for ``torch``, which are created on demand, because their operands may be large
    reference: Callable[[], list[Call]] = list
    captured: bool = True  # whether a GPU graph can capture the calls; False for calls that replay graphs themselves
    # False for an operation that does not run in every step, and is therefore left out of the sum of a step
    of_step: bool = True
    torch: list[Call] = field(default_factory=list)  # the same calls in plain torch; empty if torch cannot compute them

    @property
    def key(self) -> str:
        """Return a name that is unique among the operations of all loads."""
        return f"{self.name}, {self.rows} rows, {self.tokens} tokens, context {self.context}"


def runner_of(llm: Any) -> Any:
    """Return the runner of an engine.  Raise ConfigError if it is in another process, or its model is not described."""
    executor = llm.resolved.parts["executor"].name
    runner = getattr(llm.engine.executor, "runner", None)
    if executor != "minivllm/local" or runner is None:
        raise ConfigError(
            f"bench kernels needs the model in this process, but executor={executor} has none here; use executor=local"
        )
    if not isinstance(runner.model, Decoder):
        name = llm.resolved.parts["model"].name
        raise ConfigError(f"bench kernels needs a model that a DecoderSpec describes, and {name} builds its own layers")
    return runner


def held_bytes(module: Any) -> int:
    """Return the bytes of a linear layer's tensors, or of the layer to which it is tied."""
    tensors = list(module.tensors.values()) or list(module.tied.tensors.values())
    return sum(t.numel() * t.element_size() for t in tensors)


class KernelBench:
    """Builds the operations of an engine (products, attention, norms, draws) under given loads, to time each of
    them.
    """

    def __init__(self, llm: Any) -> None:
        self.runner = runner_of(llm)
        self.worker = self.runner.worker
        self.model = self.runner.model
        self.backend = self.runner.backend
        self.state = self.runner.state
        self.wiring = self.runner.wiring
        self.parts = self.worker.parts
        self.dtype = self.parts.dtype
        self.device = self.wiring.device
        self.torch = textbook.TorchOperations(self.device, self.dtype)

    # ---- loads ---------------------------------------------------------------------------------------------------

    def check(self, rows: Sequence[int], context: Sequence[int], prompts: Sequence[int]) -> None:
        """Raise ConfigError if the engine cannot hold a load: decode loads of ``rows`` by ``context``, or a prompt."""
        w = self.wiring
        blocks = min(self.worker.num_blocks) - FIRST_BLOCK
        longest = max([*context, *prompts])
        if max(rows) > w.max_num_seqs:
            raise ConfigError(f"--batch-size {max(rows)} is more than max_num_seqs={w.max_num_seqs}; lower it")
        if longest > w.max_model_len:
            raise ConfigError(f"{longest} tokens of context are more than max_model_len={w.max_model_len}; lower it")
        if max(prompts, default=0) > w.max_num_batched_tokens:
            limit = f"max_num_batched_tokens={w.max_num_batched_tokens}, the tokens of a step"
            raise ConfigError(f"--input-len {max(prompts)} is more than {limit}; lower it")
        blocks_per_row = -(-max(context) // w.block)
        need = max(rows) * blocks_per_row
        if need > blocks:
            load = f"{max(rows)} rows of {max(context)} tokens"
            raise ConfigError(
                f"{load} need {need} blocks, and the KV cache has {blocks}; raise num_kvcache_blocks, or lower "
                "--batch-size or --context-len"
            )

    def plan(self, rows: int, tokens: int, context: int) -> StepPlan:
        """Set up the engine's state for ``rows`` rows, each with its own blocks, and return the plan of a step.

        The step computes ``tokens`` tokens of each row, which then has ``context`` tokens.
        """
        pages = -(-context // self.wiring.block)
        slots = np.arange(rows, dtype=np.int32)
        blocks = FIRST_BLOCK + np.arange(rows * pages, dtype=np.int32)
        state = self.state
        at = state.to(slots.astype(np.int64))
        state.table[:, at, :pages] = state.to(blocks.reshape(1, rows, pages))
        shape = (rows, context)
        state.tokens[at, :context] = torch.randint(
            self.worker.vocab_size, shape, dtype=torch.int32, device=state.device
        )
        state.stopped[at] = False
        state.known[at] = context
        state.end[at] = self.wiring.max_model_len
        q_len = np.full(rows, tokens, np.int32)
        computed = np.full(rows, context - tokens, np.int32)
        return StepPlan(0, slots, q_len, computed, slots)

    def clear(self) -> None:
        """End all rows and release the weights of the torch operations."""
        self.state.stopped[:] = True
        self.state.table[:] = 0
        self.torch.drop()

    def operations(self, rows: int, tokens: int, context: int) -> list[Operation]:
        """Return the operations of a step of ``rows`` rows with ``tokens`` tokens each, and last the whole step."""
        plan = self.plan(rows, tokens, context)
        read = self.runner.read(plan)
        key = GraphKey()
        if tokens == 1 and self.runner.graphs is not None:
            # attention is planned as for a captured step, whose lengths are unknown on the host
            from minivllm.device.worker import captured, graphs

            span = graphs.SHORT if context <= graphs.SHORT else self.wiring.max_model_len
            key = GraphKey("decode", rows, rows, span)
            read.meta.host_kv_len = captured.bounds(key, len(read.meta.table)).kv_len
        self.backend.plan(read.meta, key)
        load = LoadOperations(self, read, rows, tokens, context)
        found = merged([*load.embedding(), *load.layers(), *load.head(), *load.extras()])
        return [*found, self._step(plan, found, rows, tokens, context)]

    def _step(self, plan: StepPlan, found: Sequence[Operation], rows: int, tokens: int, context: int) -> Operation:
        """Return the forward pass of a step as the engine runs it, without the head and the draw.

        Its bytes and arithmetic operations are the sums over its operations ``found``.
        """
        runner = self.runner
        inside = [one for one in found if one.of_step]
        size = sum(one.size * len(one.calls) for one in inside)
        flops = sum(one.flops * len(one.calls) for one in inside)
        key = None
        if runner.native is not None and runner.native.takes(plan):
            call: Call = partial(runner.native.forward, plan)
        else:
            key = self._graph_key(plan)
            if key is not None:
                call = partial(runner.graphs.forward, key, plan)
            else:
                call = partial(step.forward, self.model, self.backend, runner.read(plan), GraphKey())
        name = "step: all layers"
        return Operation(name, rows, tokens, context, [call], size, flops, captured=key is None, of_step=False)

    def _graph_key(self, plan: StepPlan) -> GraphKey | None:
        """Return the key of a step's captured graph, None if the engine does not capture the step.

        The engine captures a step when its shape has become frequent, so the key is requested several times.
        """
        if self.runner.graphs is None:
            return None
        from minivllm.device.worker.graphs import DECODE_SIGHTS, SIGHTS

        for _ in range(max(SIGHTS, DECODE_SIGHTS)):
            key = self.runner.graphs.key(plan)
        return None if key is None else self.runner.graphs.shape(plan)


def merged(found: Sequence[Operation]) -> list[Operation]:
    """Return the operations with calls of equal name and shape merged, and with their torch calls."""
    by_shape: dict[tuple[str, float, float], Operation] = {}
    for one in found:
        shape = (one.name, one.size, one.flops)
        same = by_shape.setdefault(shape, one)
        if same is not one:
            same.calls += one.calls
    for one in by_shape.values():
        one.torch = one.reference()
    return list(by_shape.values())


class LoadOperations:
    """The operations of a step under one load; ``read`` are the step's inputs on the device."""

    def __init__(self, bench: KernelBench, read: Any, rows: int, tokens: int, context: int) -> None:
        self.bench = bench
        self.read = read
        self.model = bench.model
        self.torch = bench.torch
        self.rows = rows
        self.tokens = tokens
        self.context = context
        self.total = rows * tokens
        self.item = bench.dtype.itemsize
        self.dtype = bench.dtype
        self.layer_count = len(bench.model.blocks)
        self._operands: dict[tuple[int, ...], Tensor] = {}
        hidden = bench.model.spec.hidden
        self.x = self.torch.random(self.total, hidden, scale=0.1)
        self.residual = self.torch.random(self.total, hidden, scale=0.1)

    def _op(self, name: str, call: Call, size: float, flops: float, reference: Reference, **more: Any) -> Operation:
        """Return an operation of this load with one call."""
        return Operation(name, self.rows, self.tokens, self.context, [call], size, flops, reference, **more)

    def _operand(self, *shape: int, scale: float = 0.1) -> Tensor:
        """Return a tensor of random numbers with a standard deviation of ``scale``.  All calls with a shape return the
        same tensor, because the values do not affect the time."""
        if shape not in self._operands:
            self._operands[shape] = self.torch.random(*shape, scale=scale)
        return self._operands[shape]

    def _moved(self, *widths: int) -> int:
        """Return the bytes of activations of these widths for all tokens."""
        return self.total * sum(widths) * self.item

    def embedding(self) -> list[Operation]:
        """Return one operation to measure: the lookup of the tokens' embeddings."""
        width = self.model.spec.hidden
        ids = self.read.ids
        embed = self.model.embed
        if embed.scheme is None:
            plain = embed.weight
        else:
            plain = self._operand(embed.range.rows, width)
        size = self._moved(width, width)
        torch_call: Call = partial(F.embedding, ids, plain)
        return [self._op("embedding", partial(embed, ids), size, 0.0, lambda: [torch_call])]

    def layers(self) -> list[Operation]:
        """Return the operations of all layers: matrix products, attention and experts."""
        out = []
        for i, block in enumerate(self.model.blocks):
            qkv = partial(block.qkv, Normed(self.x))
            mlp = self.model.spec.layers[i].mlp
            out.append(self._product("qkv", block.qkv.linear, qkv))
            out += self._attention(block)
            out.append(self._out(block))
            out += self._mlp(block, mlp)
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
        """Return the operation of a matrix product, which may include the activation or norms that follow.

        ``outputs`` is the number of columns of the result, if not that of the product.  ``more`` is the number of other
        columns that the call moves.  ``then`` is applied to torch's product.
        """
        info = linear.info
        if x is None:
            x = self.x
        moved = self._moved(info.in_features, outputs or info.out_features, more)
        size = held_bytes(linear) + moved
        flops = 2.0 * self.total * info.in_features * info.out_features
        reference = partial(self.torch.product, x, info.out_features, self.layer_count, then)
        return self._op(name, call, size, flops, reference)

    def _joined(self, name: str, join: Any, linear: Any, x: Tensor) -> Operation:
        """Return one operation: a matrix product, its addition to the residual stream, and norms of output and sum."""
        before = join.before if hasattr(join, "before") else join.norm
        norms = [getattr(join, "after", None), before]
        if any(norm is not None for norm in norms):
            name += " + norm"
        then = textbook.joined(self.residual, norms, self.dtype)
        width = 2 * linear.info.out_features
        call = partial(join, x, self.residual)
        return self._product(name, linear, call, x, 0, then, width)

    def _out(self, block: Any) -> Operation:
        """Return the operation of attention's output projection.

        Unless attention and the MLP are parallel, it includes the addition to the residual stream and the norm.
        """
        linear = block.out if block.parallel else block.o.linear
        x = self._operand(self.total, linear.info.in_features)
        if block.parallel:
            return self._product("attention out", linear, partial(linear, x), x)
        return self._joined("attention out", block.o, linear, x)

    def _mlp(self, block: Any, mlp: Any) -> list[Operation]:
        """Return the two operations of an MLP (up with activation, and down), or the single one of experts."""
        h = Normed(self.x)
        if block.experts is not None:
            return [self._experts(block, h, mlp)]
        join = block.both if block.parallel else block.down
        down = join.linear
        y = self._operand(self.total, down.info.in_features)
        up = getattr(block.up, "linear", None)
        if up is None:
            up = self.bench.parts.modules[f"{block.name}mlp.up"]
        name = "gate and up + gate" if mlp.gated else "up + activation"
        then = textbook.gated(mlp.activation, mlp.gated)
        first = self._product(name, up, partial(block.up, h), None, mlp.inner, then)
        if block.parallel:
            second = self._product("down", down, partial(down, y), y)
        else:
            second = self._joined("down", join, down, y)
        return [first, second]

    def _experts(self, block: Any, h: Normed, spec: Any) -> Operation:
        """Return the operation that computes the experts of a layer.

        The bytes are those of the experts that at least one token uses, on average, if the router chooses at random.
        """
        mixture = block.experts
        count = spec.count
        up = mixture.gate_up.info
        down = mixture.down.info
        weight_bytes = held_bytes(mixture.gate_up) + held_bytes(mixture.down)
        columns = (up.out_features + down.out_features) // count
        weights = sum(one.in_features * one.out_features // count for one in (up, down))
        unused_share = (1 - spec.chosen / count) ** self.total
        used = count * (1 - unused_share)
        size = weight_bytes / count * used + held_bytes(mixture.router)
        size += self._moved(spec.chosen * columns)
        flops = 2.0 * weights * spec.chosen * self.total
        call: Call = partial(block.down, h, self.residual)
        if block.parallel:
            call = partial(mixture, h)
        return self._op("experts", call, size, flops, list)

    def _attention(self, block: Any) -> list[Operation]:
        """Return two operations: the rotation of q and k with the write of k and v to the cache, and attention."""
        layer = block.attn.layer
        meta = self.read.meta
        spec: AttnSpec = layer.spec
        block_bytes = sum(t.element_size() * t[0].numel() for t in layer.cache.values())
        token_bytes = block_bytes / self.bench.wiring.block
        queries = self._operand(self.total, spec.heads, spec.dim_qk)
        out = queries.new_empty(self.total, spec.heads, spec.dim_v)
        pairs, keys = self._visible(spec)
        head_dims = spec.heads * (spec.dim_qk + spec.dim_v)
        size = token_bytes * keys + self._moved(head_dims)
        load = (self.rows, self.tokens, self.context)
        reference = partial(textbook.attention, self.torch, spec, *load, self.layer_count)
        name = "attention, decode" if self.tokens == 1 else "attention, prefill"
        if spec.window is not None:
            name += f", window {spec.window}"
        call = partial(self.bench.backend.forward, layer, queries, meta, out)
        attention = self._op(name, call, size, 2.0 * head_dims * pairs, reference)
        return [self._write(layer, block.pre, token_bytes), attention]

    def _write(self, layer: Any, pre: Any, token_bytes: float) -> Operation:
        """Return the operation that rotates q and k and writes k and v, ``token_bytes`` per token, to the cache."""
        spec: AttnSpec = layer.spec
        meta = self.read.meta
        shapes = ((spec.heads, spec.dim_qk), (spec.kv_heads, spec.dim_qk), (spec.kv_heads, spec.dim_v))
        widths = [heads * dim for heads, dim in shapes]
        joined = self._operand(self.total, sum(widths))
        parts = zip(joined.split(widths, dim=-1), shapes, strict=True)
        q, k, v = (part.view(self.total, *shape) for part, shape in parts)
        slots = meta.slot_map[layer.group]
        room = max(4096, 2 * self.total)
        activations = self._moved(*widths, widths[0])
        size = activations + token_bytes * self.total
        call = partial(self.bench.backend.write, layer, q, k, v, meta, pre)
        reference = lambda: [textbook.rotated(q, k, v, meta.position, slots, pre, room)]  # noqa: E731
        return self._op("rotary and write", call, size, 0.0, reference)

    def _visible(self, spec: AttnSpec) -> tuple[float, float]:
        """Return the numbers of (query, key) pairs, and of keys that are read, of all rows."""
        visible = np.arange(self.context - self.tokens, self.context) + 1
        window = self.context if spec.window is None else spec.window
        read = min(self.context, window + self.tokens - 1)
        pairs = float(np.minimum(visible, window).sum())
        return self.rows * pairs, self.rows * float(read)

    def head(self) -> list[Operation]:
        """Return three operations: the logits of each row's last token, a greedy draw, and a draw at temperature 1."""
        vocab = self.bench.worker.vocab_size
        hidden = self.x[: self.rows]
        width = hidden.shape[1]
        moved = self.rows * (width + vocab) * self.item
        size = held_bytes(self.model.head) + moved
        flops = 2.0 * self.rows * width * vocab
        reference = partial(self.torch.product, hidden, vocab, 1)
        call = partial(self.model.logits, hidden)
        head = self._op("head", call, size, flops, reference, of_step=False)
        return [head, self._draw(0.0), self._draw(1.0)]

    def _draw(self, temperature: float) -> Operation:
        """Return the operation of a draw by the engine's sampler, one token per row, from random logits."""
        runner = self.bench.runner
        state = self.bench.state
        n = self.rows
        sampler = runner.sampler
        columns = state.processors[-1]
        params = SamplingParams(temperature=temperature, seed=0)
        row = sampler.bind_prompt(params, np.zeros(1, np.int32))
        slots = np.arange(n)
        bound = {} if row is None else dict.fromkeys(range(n), row)
        columns.join(slots, state.to(slots), bound)
        dtype = self.dtype if sampler.any_dtype else torch.float32
        logits = torch.randn(n, self.bench.worker.vocab_size, device=state.device)
        logits = logits.to(dtype)
        positions = np.full(n, self.context)
        at = state.to(np.stack([slots, positions]))
        rows = step.rows_of(state, at[0], at[1], self.context)
        rows.variant = 0 if row is None else row.variant
        drawn = Draw(torch.zeros_like(at[0]))
        torch_draw = textbook.drawn if temperature else textbook.greedy
        call = partial(sampler.draw, logits, rows, columns.columns, drawn)
        name = f"draw, temperature {temperature:g}"
        return self._op(name, call, logits.nbytes, 0.0, lambda: [torch_draw(logits)], of_step=False)

    def extras(self) -> list[Operation]:
        """Return the operations of a norm (with the addition before it) and, for a gated MLP, of the gate.

        Steps of many tokens run them separately from the matrix products.
        """
        norm = self.model.norm
        torch_norm = textbook.normed(norm, self.dtype)
        call: Call = partial(norm, self.x, self.residual)
        size = self._moved(4 * self.model.spec.hidden)
        reference = lambda: [lambda: torch_norm(self.x + self.residual)]  # noqa: E731
        found = [self._op("norm + add", call, size, 0.0, reference, of_step=False)]
        mlp = self.model.spec.layers[0].mlp
        if getattr(mlp, "gated", False):
            both = self.torch.random(self.total, 2 * mlp.inner)
            torch_gate = textbook.gated(mlp.activation, True)
            gate = partial(self.bench.parts.gate_mul, both, activation=mlp.activation)
            size = self._moved(3 * mlp.inner)
            reference = lambda: [partial(torch_gate, both)]  # noqa: E731
            found.append(self._op("gate", gate, size, 0.0, reference, of_step=False))
        return found
