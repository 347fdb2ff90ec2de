"""Right attention back ends that are written differently from the built-in ones.

``RowByRow`` claims everything.  The wrong back ends in the neighbouring modules are derived from it.
"""

from __future__ import annotations

import torch

from minivllm.core.interfaces.attention import AttentionBackend
from minivllm.core.interfaces.kvformat import KVLayout, TensorSpec
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.registration.spec import ANY, MultipleOf, Spec

SEAM = "attention"
FAULTS = {}
RIGHT = ("RowByRow", "Tiled", "HeadsFirst", "RotatesInPlace", "AnyFormat", "FewSizes")
LIMITS = {
    "device": ANY, "sm": ANY, "dtype": {"float32", "bfloat16", "float16"}, "kv_format": {"fp32", "bf16", "fp16"},
    "dim_qk": ANY, "dim_v": ANY, "queries_per_kv": ANY, "block": MultipleOf(1),
}  # fmt: skip
ALL = frozenset({"alibi", "window", "sinks", "softcap", "v_in_k", "lse", "repeatable", "batch_invariant"})


def spec(name, features=ALL, module=__name__, **more):
    return Spec(f"{module}:{name}", (1, 4), "for a test of the kit", limits={**LIMITS, **more}, features=features)


class RowByRow(AttentionBackend):
    """Right.  It computes one row and one KV head after another, with an explicit softmax in float32."""

    spec = spec("RowByRow")

    def forward(self, layer, q, meta, out, lse=None):
        start = 0
        for row, n in enumerate(meta.host_q_len.tolist()):
            length = self.length(layer, meta, row)
            if self.ctx.batch_invariant:  # each query separately, with the keys that it sees
                for i in range(n):
                    at = slice(start + i, start + i + 1)
                    self.row(layer, q, meta, out, lse, row, at, length - n + i + 1)
            else:
                self.row(layer, q, meta, out, lse, row, slice(start, start + n), length)
            start += n

    def row(self, layer, q, meta, out, lse, row, at, length):
        spec = layer.spec
        group = spec.heads // spec.kv_heads
        k, v = self.keys(layer, meta, row, length)
        # keys before the window of all queries may be in the null block, whose content may be NaN
        if spec.window is not None:
            v[: max(length - (at.stop - at.start) + 1 - spec.window, 0)] = 0
        for head in range(spec.heads):
            kv = self.kv_head(head, group, spec)
            s = self.scored(q[at, head].float(), k[:, kv], spec)
            if spec.alibi is not None:
                s = s + layer.slopes[head] * self.ahead(at.stop - at.start, length)
            s = s.masked_fill(self.hidden(spec, at.stop - at.start, length), -torch.inf)
            p, norm = self.softmax(s, layer.sinks[head] if spec.sinks else None)
            out[at, head] = self.mixed(p, v[:, kv], q.dtype).to(out.dtype)
            if lse is not None:
                lse[at, head] = norm

    def length(self, layer, meta, row):
        return int(meta.kv_len[layer.group, row])

    def slots(self, layer, meta, row, positions):
        blocks = meta.table[layer.group, meta.slots[row], positions // meta.block].long()
        return blocks * meta.block + positions % meta.block

    def keys(self, layer, meta, row, length):
        slots = self.slots(layer, meta, row, torch.arange(length, device=meta.slots.device))
        cache = {name: x.view(-1, 1, *x.shape[2:]) for name, x in layer.cache.items()}
        k, v = self.ctx.kv_format.load(cache, slots, torch.float32)
        return k, self.values(v, layer.spec)

    def values(self, v, spec):
        return v[..., : spec.dim_v]

    def kv_head(self, head, group, spec):
        return head // group

    def scored(self, q, k, spec):
        s = q @ k.T * spec.softmax_scale
        return s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)

    def ahead(self, n, length):
        return torch.arange(length) - torch.arange(length - n, length)[:, None]

    def hidden(self, spec, n, length):
        key, query = torch.arange(length), torch.arange(length - n, length)[:, None]
        return (key > query) | (key <= query - (spec.window or length))

    def softmax(self, s, sink):
        peak = s.amax(-1, keepdim=True)
        peak = peak if sink is None else torch.maximum(peak, sink)
        e = (s - peak).exp()
        total = e.sum(-1, keepdim=True) + (0 if sink is None else (sink - peak).exp())
        return e / total, (peak + total.log())[:, 0]

    def mixed(self, p, v, dtype):
        return p @ v


class Tiled(AttentionBackend):
    """Right.  It works as fast kernels do.

    All heads of a KV head are computed at once, block after block, with a running softmax in base 2 and probabilities
    in the model's dtype.  The context is split into parts of 64 keys, which are joined at the end.
    """

    spec = spec("Tiled", frozenset({"window", "sinks", "softcap", "lse", "repeatable"}))

    def forward(self, layer, q, meta, out, lse=None):
        spec, rows = layer.spec, zip(meta.cu_q.tolist(), meta.cu_q.tolist()[1:], strict=False)
        for row, (a, b) in enumerate(rows):
            length, n = int(meta.kv_len[layer.group, row]), b - a
            x = q[a:b].view(n, spec.kv_heads, -1, spec.dim_qk).permute(1, 2, 0, 3)  # [kv_heads, group, n, dim]
            query = torch.arange(length - n, length)[:, None]
            first = 0 if spec.window is None else max(length - n + 1 - spec.window, 0)
            parts = [
                self.part(layer, x, meta, row, query, c, min(c + 64, length))
                for c in range(first - first % 64, length, 64)
            ]
            peak = torch.stack([m for m, _, _ in parts]).amax(0)
            if spec.sinks:
                peak = torch.maximum(peak, layer.sinks.view(spec.kv_heads, -1, 1) * 1.4426950408889634)
            weights = [(m - peak).exp2() for m, _, _ in parts]
            total = sum(w * t for w, (_, t, _) in zip(weights, parts, strict=True))
            if spec.sinks:
                total = total + (layer.sinks.view(spec.kv_heads, -1, 1) * 1.4426950408889634 - peak).exp2()
            o = sum(w[..., None] * acc for w, (_, _, acc) in zip(weights, parts, strict=True)) / total[..., None]
            out[a:b] = o.permute(2, 0, 1, 3).reshape(n, spec.heads, spec.dim_v).to(out.dtype)
            if lse is not None:
                lse[a:b] = ((peak + total.log2()) * 0.6931471805599453).permute(2, 0, 1).reshape(n, spec.heads)

    def part(self, layer, x, meta, row, query, first, end):
        """(running maximum, sum, weighted values) of keys [first, end), over tiles of one block."""
        spec, block = layer.spec, meta.block
        m = torch.full(x.shape[:3], -1e30)
        total, acc = torch.zeros(x.shape[:3]), torch.zeros(*x.shape[:3], spec.dim_v)
        while first < end:
            stop = min(end, first - first % block + block)
            number = meta.table[layer.group, meta.slots[row], first // block : first // block + 1].long()
            k, v = self.ctx.kv_format.load(layer.cache, number, x.dtype)
            inside = slice(first % block, first % block + stop - first)
            k, v = k[inside].permute(1, 2, 0)[:, None], v[inside].transpose(0, 1)[:, None].float()
            s = x.float() @ k.float() * spec.softmax_scale
            if spec.softcap is not None:
                s = spec.softcap * torch.tanh(s / spec.softcap)
            key = torch.arange(first, stop)
            seen = (key <= query) & (key > query - (spec.window or 1 << 30))
            s = torch.where(seen, s * 1.4426950408889634, -1e30)
            new = torch.maximum(m, s.amax(-1))
            p = torch.where(seen, (s - new[..., None]).exp2(), 0.0)
            total = total * (m - new).exp2() + p.sum(-1)
            acc = acc * (m - new).exp2()[..., None] + p.to(x.dtype).float() @ v.masked_fill(~seen.any(0)[:, None], 0)
            m, first = new, stop
        return m, total, acc


class HeadsFirst(RowByRow):
    """Right.

    It has its own layout [kv_heads, block, dim].  Tests that need the plain layout, except by the author's ``load``,
    are skipped.
    """

    spec = spec("HeadsFirst", ALL - {"v_in_k"})

    def layout(self, spec, fmt, block):
        sizes = {"keys": spec.dim_qk, "values": spec.dim_v}
        return KVLayout(block, {n: TensorSpec((spec.kv_heads, block, d), fmt.dtype) for n, d in sizes.items()})

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None:
            q, k = prepare_qk(q, k, meta.position, pre)
        slots = meta.slot_map[layer.group]
        for name, x in (("keys", k), ("values", v)):
            cache = layer.cache[name]
            cache[slots // meta.block, :, slots % meta.block] = x.to(cache.dtype)
        return q

    def keys(self, layer, meta, row, length):
        slots = self.slots(layer, meta, row, torch.arange(length, device=meta.slots.device))
        pick = lambda x: x[slots // meta.block, :, slots % meta.block].float()  # noqa: E731
        return pick(layer.cache["keys"]), pick(layer.cache["values"])


class RotatesInPlace(RowByRow):
    """Right.  It changes the q and k that are passed to ``write`` in place, which is allowed."""

    spec = spec("RotatesInPlace")

    def write(self, layer, q, k, v, meta, pre):
        if pre is not None:
            new_q, new_k = prepare_qk(q, k, meta.position, pre)
            q.copy_(new_q)
            k.copy_(new_k)
        return super().write(layer, q, k, v, meta, None)


class AnyFormat(RowByRow):
    """Right.  It reads through any KV format."""

    spec = spec("AnyFormat", kv_format=ANY)


class FewSizes(Sdpa):
    """Right.  It claims few sizes, as a kernel for one model does."""

    spec = Spec(
        f"{__name__}:FewSizes", (1, 0), "one model's sizes",
        limits={**SDPA.limits, "dtype": {"bfloat16"}, "kv_format": {"bf16"}, "dim_qk": {72}, "dim_v": {72},
                "queries_per_kv": {7}, "block": {48}},
    )  # fmt: skip

    def forward(self, layer, q, meta, out, lse=None):
        if lse is not None:
            raise NotImplementedError("no lse")
        super().forward(layer, q, meta, out, lse)
