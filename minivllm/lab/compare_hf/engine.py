"""The engine's side: greedy tokens, and the values of every tap point while they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.taps import EXPERTS
from minivllm.device.layers.rotary import order_of_halves, prepare_qk
from minivllm.errors import MinivllmError, ModelError

from .errors import EngineRun
from .points import DERIVED, LOGITS, K, Q, layer_point

AT_ONCE = 1 << 26  # bytes of values that a run of a prompt reads; it is run once for each such part of the points
NO_DECODER = "the engine's model is not one that a DecoderSpec describes, or not in this process"


def run(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[EngineRun], dict[str, str]]:
    """Every prompt alone, greedily, with ``max_tokens`` tokens to come; and operation -> why there is no value of it.
    A layer of which a point is read runs by its parts; the logits of its fused kernels come of another run.
    ModelError if the model has no tap points, MinivllmError if the engine fails on a prompt."""
    # which experts are chosen is seen in what they give: a number of one is not near to another
    widths = {point: width for point, width in llm.tap_points().items() if not point.endswith(EXPERTS)}
    if not widths:
        raise ModelError(
            "this model names no tap points, or its executor serves none, so no operation can be compared: want one "
            "that describes its layers (ModelArch.describe), and executor=local or process"
        )
    decoder = _decoder(llm)
    runs = []
    for ids in prompts:
        found = _read(llm, ids, max_tokens, widths)
        if decoder is not None:
            dtype = getattr(torch, llm.engine.wiring.dtype)
            found.values.update(_attention_inputs(decoder, found, len(ids) + max_tokens, dtype))
        runs.append(found)
    return runs, {} if decoder is not None else dict.fromkeys(DERIVED, NO_DECODER)


def _read(llm: Any, ids: Sequence[int], max_tokens: int, widths: Mapping[str, int]) -> EngineRun:
    from minivllm import Tap

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

    def generate(points: Sequence[str]) -> Any:
        taps = [Tap(point, read=True) for point in points]
        (out,) = llm.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False, taps=taps)
        if out.error:
            raise MinivllmError(f"the engine failed on a prompt: {out.error}")
        return out

    values: dict[str, Tensor] = {}
    tokens: list[int] = []
    limit = min(AT_ONCE, llm.engine.wiring.max_tap_bytes)
    for points in _parts(widths, 4 * (len(ids) + max_tokens), limit):
        out = generate(points)
        if tokens and out.tokens != tokens:
            raise MinivllmError(f"greedy runs of one prompt give other tokens each time: {tokens}, then {out.tokens}")
        tokens = list(out.tokens)
        values |= {point: torch.from_numpy(rows) for point, rows in out.taps.items()}
    fused = generate([LOGITS])
    same = next((i for i, (a, b) in enumerate(zip(tokens, fused.tokens, strict=True)) if a != b), len(tokens) - 1)
    return EngineRun([*ids, *tokens[:-1]], tokens, values, torch.from_numpy(fused.taps[LOGITS][: same + 1]))


def _parts(widths: Mapping[str, int], bytes_each: int, most: int) -> Iterator[list[str]]:
    """The points, in parts whose values come to ``most`` bytes, or are one point's.  ``bytes_each``: of a point that is
    one wide."""
    part: list[str] = []
    size = 0
    for point, width in widths.items():
        if part and size + width * bytes_each > most:
            yield part
            part, size = [], 0
        part.append(point)
        size += width * bytes_each
    yield part


def _decoder(llm: Any) -> Any:
    """The model as it was built, if it is the engine's own and in this process."""
    from minivllm.device.layers.decoder import Decoder

    model = getattr(getattr(llm.engine.executor, "runner", None), "model", None)
    return model if isinstance(model, Decoder) else None


def _attention_inputs(decoder: Any, run: EngineRun, longest: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """q and k behind the norms and the rotary embedding of each layer, worked out with the model's own weights and
    tables by the engine's operations for back ends without a kernel; in the order of the checkpoint, as taps have them.
    """
    found: dict[str, Tensor] = {}
    switch, device = decoder.spec.switch, decoder.norm.weight.device
    for number, (block, layer) in enumerate(zip(decoder.blocks, decoder.spec.layers, strict=True)):
        dim, rope = layer.attention.dim_qk, layer.rope
        pairs = rope is not None and rope.interleaved
        order = order_of_halves(dim, rope.dim) if pairs else torch.arange(dim)
        q, k = (_heads(run.values[layer_point(number, name)], dim)[..., order].to(device, dtype) for name in (Q, K))
        if block.wide:
            q, k = (_heads(norm(x.flatten(1))[0], dim) for norm, x in zip(block.wide, (q, k), strict=True))
        position = torch.arange(len(run.ids), device=device)
        if switch is not None and longest > switch:  # the rows of another embedding are behind all positions
            position = position + len(block.pre.cos) // 2
        normed = prepare_qk(q, k, position, replace(block.pre, cos=None, sin=None))
        rotated = prepare_qk(q, k, position, block.pre)
        for name, x in zip(DERIVED, (*normed, *rotated), strict=True):
            found[layer_point(number, name)] = x[..., order.argsort()].flatten(1).float().cpu()
    return found


def _heads(x: Tensor, dim: int) -> Tensor:
    return x.unflatten(-1, (-1, dim))
