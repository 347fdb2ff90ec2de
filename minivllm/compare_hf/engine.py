"""The engine's side: greedy tokens, and the values of every tap point while they are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import MinivllmError, ModelError
from minivllm.layers.rotary import prepare_qk

from .errors import EngineRun
from .points import DERIVED, K_NORM, K_ROPE, Q_NORM, Q_ROPE, K, Q, layer_point

AT_ONCE = (
    1 << 26
)  # bytes of values that one run of a prompt reads; a prompt is run once for each such part of the points
NO_DECODER = "the engine's model is not one that a DecoderSpec describes, or not in this process"


def run(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[EngineRun], dict[str, str]]:
    """Every prompt alone, greedily, with ``max_tokens`` tokens to come; and operation -> why there is no value of it.
    ModelError if the model has no tap points, MinivllmError if the engine fails on a prompt."""
    widths = llm.tap_points()
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
            found.values.update(_in_pairs(decoder, found.values))
        runs.append(found)
    return runs, {} if decoder is not None else dict.fromkeys(DERIVED, NO_DECODER)


def _read(llm: Any, ids: Sequence[int], max_tokens: int, widths: Mapping[str, int]) -> EngineRun:
    from minivllm import Tap

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    values: dict[str, Tensor] = {}
    tokens: list[int] = []
    for points in _parts(widths, (len(ids) + max_tokens) * 4):
        taps = [Tap(point, read=True) for point in points]
        (out,) = llm.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False, taps=taps)
        if out.error:
            raise MinivllmError(f"the engine failed on a prompt: {out.error}")
        if tokens and out.tokens != tokens:
            raise MinivllmError(f"greedy runs of one prompt give other tokens each time: {tokens}, then {out.tokens}")
        tokens = list(out.tokens)
        values |= {point: torch.from_numpy(rows) for point, rows in out.taps.items()}
    return EngineRun([*ids, *tokens[:-1]], tokens, values)


def _parts(widths: Mapping[str, int], bytes_each: int) -> Iterator[list[str]]:
    """The points, in parts whose values come to ``AT_ONCE`` at most, or are one point's.  ``bytes_each``: of a point
    that is one wide."""
    part: list[str] = []
    size = 0
    for point, width in widths.items():
        if part and size + width * bytes_each > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(point)
        size += width * bytes_each
    yield part


def _decoder(llm: Any) -> Any:
    """The model as it was built, if it is the engine's own and in this process."""
    from minivllm.layers.decoder import Decoder

    model = getattr(getattr(llm.engine.executor, "runner", None), "model", None)
    return model if isinstance(model, Decoder) else None


def _attention_inputs(decoder: Any, run: EngineRun, longest: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """q and k behind the norms and the rotary embedding of each layer, worked out with the model's own weights and
    tables by the engine's operations for back ends without a kernel."""
    found: dict[str, Tensor] = {}
    switch, device = decoder.spec.switch, decoder.norm.weight.device
    for number, (block, layer) in enumerate(zip(decoder.blocks, decoder.spec.layers, strict=True)):
        q, k = (run.values[layer_point(number, name)].to(device, dtype) for name in (Q, K))
        if block.wide:
            q, k = block.wide[0](q)[0], block.wide[1](k)[0]
        heads = [x.unflatten(-1, (-1, layer.attention.dim_qk)) for x in (q, k)]
        position = torch.arange(len(run.ids), device=device)
        if switch is not None and longest > switch:  # the rows of another embedding are behind all positions
            position = position + len(block.pre.cos) // 2
        normed = prepare_qk(*heads, position, replace(block.pre, cos=None, sin=None))
        rotated = prepare_qk(*heads, position, block.pre)
        names = (Q_NORM, K_NORM) if layer.qk_norm is not None else ()
        for name, x in (*zip(names, normed, strict=False), *zip((Q_ROPE, K_ROPE), rotated, strict=True)):
            found[layer_point(number, name)] = x.flatten(1).float().cpu()
    return found


def _in_pairs(decoder: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """q and k of heads whose rotary pairs lie side by side in the checkpoint, in its order (``weights.as_halves``)."""
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(decoder.spec.layers):
        if layer.rope is None or not layer.rope.interleaved:
            continue
        dim, turned = layer.attention.dim_qk, layer.rope.dim
        order = torch.arange(dim)
        order[:turned] = torch.arange(turned).unflatten(0, (2, -1)).T.flatten()
        for name in (Q, K, *DERIVED):
            if (x := values.get(layer_point(number, name))) is not None:
                found[layer_point(number, name)] = x.unflatten(-1, (-1, dim))[..., order].flatten(-2)
    return found
