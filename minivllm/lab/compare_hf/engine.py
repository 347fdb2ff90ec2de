"""Run the engine on prompts: greedy tokens, and the values of every tap point (named place in the model)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.attnspec import AttnSpec
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.taps import EXPERTS
from minivllm.device.layers.rotary import order_of_halves, prepare_qk
from minivllm.errors import MinivllmError, ModelError

from .errors import EngineRun
from .points import DERIVED, LOGITS, K, Q, layer_point

# largest size in bytes of tap values per run; the prompt runs again for each further group of points
MOST_BYTES = 1 << 26
NO_DECODER = "the engine's model is not one that a DecoderSpec describes, or not in this process"


def run(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[EngineRun], dict[str, str]]:
    """Run every prompt (token ids) alone and greedily, and generate ``max_tokens`` tokens.

    Return a run per prompt, and a dict that maps an operation without values to the reason.  Reading a tap point of a
    layer makes the engine run the layer's operations separately, so a run of its own gives the logits of fused
    kernels.  Raise ModelError if the model has no tap points, and MinivllmError if the engine fails on a prompt.
    """
    # The ids of the chosen experts are not compared: similar ids do not mean similar experts, and the output of the MLP
    # shows a wrong choice.
    widths = dict(llm.tap_points())
    for point in list(widths):
        if point.endswith(EXPERTS):
            del widths[point]
    if not widths:
        raise ModelError(
            "this model names no tap points, or its executor serves none, so no operation can be compared: expected a "
            "model that describes its layers (ModelArch.describe), and executor=local or process"
        )
    decoder = _find_decoder(llm)
    runs = [_read_points(llm, ids, max_tokens, widths) for ids in prompts]
    if decoder is None:
        return runs, dict.fromkeys(DERIVED, NO_DECODER)
    dtype = getattr(torch, llm.engine.wiring.dtype)
    for ids, one_run in zip(prompts, runs, strict=True):
        inputs = _attention_inputs(decoder, one_run, len(ids) + max_tokens, dtype)
        one_run.values.update(inputs)
    return runs, {}


def _read_points(llm: Any, ids: Sequence[int], max_tokens: int, widths: Mapping[str, int]) -> EngineRun:
    """Run one prompt, once for each group of tap points (named tensors of the model), and once more with fused kernels.

    Raise MinivllmError if two runs give different tokens.
    """
    from minivllm import Tap

    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)

    def generate(points: Sequence[str]) -> Any:
        taps = [Tap(point, read=True) for point in points]
        prompt = {"prompt_token_ids": list(ids)}
        (out,) = llm.generate(prompt, params, use_tqdm=False, taps=taps)
        if out.error:
            raise MinivllmError(f"the engine failed on a prompt: {out.error}")
        return out

    values: dict[str, Tensor] = {}
    tokens: list[int] = []
    limit = min(MOST_BYTES, llm.engine.wiring.max_tap_bytes)
    for points in _groups(widths, 4 * (len(ids) + max_tokens), limit):
        out = generate(points)
        if tokens and out.tokens != tokens:
            raise MinivllmError(f"greedy runs of one prompt give different tokens: {tokens}, then {out.tokens}")
        tokens = list(out.tokens)
        for point, rows in out.taps.items():
            values[point] = torch.from_numpy(rows)
    fused = generate([LOGITS])
    # Count the first tokens in which the fused run and the run with taps agree; later logits have different inputs.
    equal = 0
    while equal < len(tokens) - 1 and fused.tokens[equal] == tokens[equal]:
        equal += 1
    logits = fused.taps[LOGITS][: equal + 1]
    computed = [*ids, *tokens[:-1]]
    return EngineRun(computed, tokens, values, torch.from_numpy(logits))


def _groups(widths: Mapping[str, int], bytes_per_column: int, limit: int) -> Iterator[list[str]]:
    """Yield groups of tap points (named tensors of the model) whose values take at most ``limit`` bytes.

    A point with more bytes is a group of its own.

    ``bytes_per_column`` is the size of the values of a point of width 1.
    """
    group: list[str] = []
    size = 0
    for point, width in widths.items():
        nbytes = width * bytes_per_column
        if group and size + nbytes > limit:
            yield group
            group = []
            size = 0
        group.append(point)
        size += nbytes
    yield group


def _find_decoder(llm: Any) -> Any:
    """Return the engine's model, or None if it is not a ``Decoder`` or runs in another process."""
    from minivllm.device.layers.decoder import Decoder

    runner = getattr(llm.engine.executor, "runner", None)
    model = getattr(runner, "model", None)
    return model if isinstance(model, Decoder) else None


def _attention_inputs(decoder: Any, run: EngineRun, longest: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute q and k of each layer after their norms, and after the rotary embedding (the points ``DERIVED``).

    These points cannot be tapped.  The computation uses the model's weights and tables, and the operations for back
    ends without a fused kernel.  Columns are in the checkpoint's order, as in tap values.  ``longest`` is the length of
    the whole request.
    """
    values: dict[str, Tensor] = {}
    switch = decoder.spec.switch
    device = decoder.norm.weight.device
    for number, (block, layer) in enumerate(zip(decoder.blocks, decoder.spec.layers, strict=True)):
        if not isinstance(layer.attention, AttnSpec):
            continue  # a layer with a recurrent state has no q and k
        dim = layer.attention.dim_qk
        rope = layer.rope
        order = torch.arange(dim)
        if rope is not None and rope.interleaved:
            order = order_of_halves(dim, rope.dim)
        inputs = []
        for name in (Q, K):
            heads = _heads(run.values[layer_point(number, name)], dim)
            inputs.append(heads[..., order].to(device, dtype))
        if block.wide:
            for i, norm in enumerate(block.wide):
                normed, *_ = norm(inputs[i].flatten(1))
                inputs[i] = _heads(normed, dim)
        q, k = inputs
        position = torch.arange(len(run.ids), device=device)
        if switch is not None and longest > switch:
            # the table of the long rotary embedding follows the rows of the short one
            position = position + len(block.pre.cos) // 2
        without_rope = replace(block.pre, cos=None, sin=None)
        derived = [*prepare_qk(q, k, position, without_rope), *prepare_qk(q, k, position, block.pre)]
        checkpoint_order = order.argsort()
        for name, x in zip(DERIVED, derived, strict=True):
            columns = x[..., checkpoint_order].flatten(1)
            values[layer_point(number, name)] = columns.float().cpu()
    return values


def _heads(x: Tensor, dim: int) -> Tensor:
    """Return [tokens, heads * dim] as [tokens, heads, dim]."""
    return x.unflatten(-1, (-1, dim))
