"""Attention and products of many tokens in a captured CPU step: those of float64, whatever a step begins with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_runs import checkpoint, each_isa, engine, needs_library, prompt, watched

from minivllm import SamplingParams
from minivllm.core.interfaces.attention import AttnSpec
from minivllm.device import hardware
from minivllm.device.native.program import ACTIVATIONS, FORMATS, Program, address
from minivllm.plugins.kvformat.scaled import Int8KV

pytestmark = needs_library
__all__ = ["each_isa"]

BLOCK, BLOCKS = 8, 12


def program_of(tokens: int) -> Program:
    """Create a program for one sequence whose blocks are in another order than its tokens."""
    columns = {
        "tokens": torch.zeros(1, BLOCK * BLOCKS, dtype=torch.int32),
        "longest": BLOCK * BLOCKS,
        "table": torch.randperm(BLOCKS, dtype=torch.int32)[None, None].contiguous(),
        "slots": 1,
        "blocks": BLOCKS,
        "block": BLOCK,
        "stopped": torch.zeros(1, dtype=torch.bool),
    }
    return Program(1, tokens, columns)


def cache_of(kind: str, heads: int, width: int) -> dict[str, torch.Tensor]:
    """Create memory of keys and values that is NaN where nothing was written."""
    if kind == "int8":
        layout = Int8KV().layout(AttnSpec(heads, heads, width, width), BLOCK).tensors
        return {name: torch.zeros((BLOCKS, *t.shape), dtype=getattr(torch, t.dtype)) for name, t in layout.items()}
    shape = (BLOCKS, BLOCK, heads, width)
    return {name: torch.full(shape, torch.nan, dtype=getattr(torch, kind)) for name in ("k", "v")}


@pytest.mark.parametrize("steps", [(70,), (3, 40, 33), (33, 1, 50)], ids=str)
@pytest.mark.parametrize(
    ("kind", "width", "options"),
    [
        ("float32", 20, {}),
        ("float32", 64, {"window": 9}),
        ("float32", 33, {"window": 40, "cap": 3.0}),
        ("bfloat16", 64, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])}),
        ("float16", 48, {"window": 64}),
        ("int8", 24, {"window": 20}),
        ("int8", 64, {}),
    ],
)
def test_each_token_attends_to_what_is_before_it(each_isa, steps, kind, width, options):
    torch.manual_seed(0)
    heads, kv, n = 6, 2, sum(steps)
    x = torch.randn(n, (heads + 2 * kv) * width)
    cache = cache_of(kind, kv, width)
    program, out = program_of(max(steps)), torch.empty(n, heads * width)
    in_memory, out_memory = torch.empty(max(steps), x.shape[1]), torch.empty(max(steps), out.shape[1])
    names = {"keys": "k", "values": "v", "key_scales": "k_scale", "value_scales": "v_scale"}
    sizes = {"heads": heads, "kv_heads": kv, "dim_qk": width, "dim_v": width, "softmax_scale": 0.3}
    registers = {"in_": program.register(in_memory), "out": program.register(out_memory)}
    memory = {field: cache[name] for field, name in names.items() if name in cache}
    program.add("attend", **registers, **sizes, **memory, kv_format=FORMATS[cache["k"].dtype], **options)
    done = 0
    for count in steps:
        in_memory[:count] = x[done : done + count]
        program.forward(address(np.array([1, 0, 0, count, done], np.int64)))
        out[done : done + count] = out_memory[:count]
        done += count
    program.close()
    q, k, v = (t.view(n, -1, width).transpose(0, 1).double() for t in x.split([heads * width, *[kv * width] * 2], 1))
    k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) * 0.3
    if "cap" in options:
        scores = options["cap"] * torch.tanh(scores / options["cap"])
    behind = torch.arange(n)[:, None] - torch.arange(n)
    scores = scores.masked_fill((behind < 0) | (behind >= options.get("window", n)), -torch.inf)
    if "sinks" in options:
        sinks = options["sinks"].double()[:, None, None].expand(heads, n, 1)
        scores = torch.cat((scores, sinks), 2)
    want = (scores.softmax(-1)[..., :n] @ v).transpose(0, 1).flatten(1)
    bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "int8": 6e-2}[kind]
    assert float((out - want).abs().max()) < bound


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_products_of_many_tokens_are_gated_and_added_as_those_of_few(each_isa, kind):
    """A step of 150 tokens is cut by tokens and by outputs; the bits are those of steps of 50."""
    torch.manual_seed(0)
    x, weight = torch.randn(150, 600), torch.randn(2 * 210, 600).to(getattr(torch, kind))
    found = []
    for count in (150, 50):
        program = program_of(count)
        given, added = torch.empty(count, 600), torch.empty(count, 420)
        gated = torch.empty(count, 210)
        registers = [program.register(t) for t in (given, gated, added)]
        matrix = {"format": FORMATS[weight.dtype], "n": 420, "k": 600, "data": weight, "group": 600}
        silu = ACTIVATIONS["silu"]
        program.add("product", in_=registers[0], out=registers[1], gated=1, activation=silu, **matrix)
        program.add("product", in_=registers[0], out=registers[2], adds=1, alpha=0.5, **matrix)
        results = []
        for first in range(0, 150, count):
            given.copy_(x[first : first + count])
            added.fill_(1)
            program.forward(address(np.array([1, 0, 0, count, first % 50], np.int64)))
            results.append(torch.cat((gated, added), 1))
        program.close()
        found.append(torch.cat(results))
    whole = x.double() @ weight.double().t()
    want = torch.cat((torch.nn.functional.silu(whole[:, :210]) * whole[:, 210:], 1 + 0.5 * whole), 1)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), want, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("fast", [False, True])
def test_prompts_are_captured_where_torch_has_no_fast_products_of_the_dtype(fast, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "multiplies", lambda dtype: fast)
    path, sizes = checkpoint(tmp_path, "Qwen3ForCausalLM"), {"dtype": "bfloat16", "max_num_batched_tokens": 256}
    with watched() as seen:
        llm = engine(path, num_kvcache_blocks=128, **sizes)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt(n, n)} for n in (100, 40, 9)], params, use_tqdm=False)
    assert (max(seen.tokens) == 149) == (not fast) and (seen.others > 0) == fast
    assert seen.hidden < 0.04
