"""Compare greedy tokens of every model family with several ranks and with one process.

    python benchmarks/rank_equality.py                              every family, 1, 2, 4 and 8 ranks, 200 prompts
    python benchmarks/rank_equality.py --only qwen3 gptq --ranks 1 2
    python benchmarks/rank_equality.py --executor ray --ranks 1 2
    python benchmarks/rank_equality.py --model DIR --load-format dummy --ranks 1 2 4 --set quantizer=int4 --prompts 64

The families are all built-in plug-ins of the seam ``model`` that name an architecture, each as a tiny model with random
weights in float32; then, for a llama, each quantizer that reads checkpoints.  The first size is computed by one process
(executor ``local``), the others by as many ranks.  For each cell: how many of the answers are the same, all tokens of
them.  Where one is not, transformers' logits decide: *tie*, if the two best logits at its first other token are closer
than ``TIE`` (a sum of parts is rounded otherwise than a whole one, and so is a router's choice), else *WRONG*.

Weights that are quantized while they are loaded are left out: where a matrix is cut they have other scales.

With ``--model`` one model of any size and dtype is compared.  Sums of several ranks are rounded differently, so the
answers are compared up to the first token that differs.  The table shows the answers that are equal, the largest
difference of log-probabilities before that token, and the largest difference between the two best log-probabilities of
one rank at that token.  Both are to be of the size of the dtype's rounding errors.  Exit status 1 if an answer is
wrong, an engine did not start, or with ``--model`` a difference is above ``--most``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig

from minivllm import LLM, SamplingParams
from minivllm.config import load_config
from minivllm.errors import MinivllmError
from minivllm.registration.spec import ANY
from minivllm.registry import Catalog
from minivllm.testing.quantizer_written import WRITTEN
from minivllm.testing.tiny import quiet, read_tensors, save, small_config, tiny_model, write_tensors

TIE = 1e-3  # allowed gap of logits whose standard deviation is about 1
VOCAB = 61  # not divisible by any number of ranks
# sizes that eight ranks can share; with fewer KV heads than ranks
WIDE = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 64, "intermediate_size": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": VOCAB,
}  # fmt: skip
PACKED = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512, "num_key_value_heads": 8, "vocab_size": 64}
BLOCKWISE = {"head_dim": 128, "intermediate_size": 1024}  # sizes for float8, which has a scale for 128 by 128
ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 512,
    "max_model_len": 64, "kvcache_block_size": 8,
}  # fmt: skip
SEEDS = {"gpt2": 1, "starcoder2": 2}  # seeds of weights for families in which seed 0 answers nearly every prompt alike


def families() -> dict[str, str]:
    """Return the built-in plug-ins, and the model_type of each."""
    models = Catalog.discover()["model"]
    found = {}
    for entry in models.entries:
        spec = models.spec(entry)
        if entry.dist == "minivllm" and spec.limits["model_type"] != ANY:
            (found[entry.name],) = spec.limits["model_type"]
    return found


def family_model(folder: Path, model_type: str) -> Any:
    """Write a tiny model, and return transformers' model of it."""
    empty = AutoConfig.for_model(model_type)
    config = small_config(type(empty), **{**WIDE, **own_values(model_type)})
    model = tiny_model(config, SEEDS.get(model_type, 0))
    save(model, folder)
    return model


def own_values(model_type: str) -> dict[str, Any]:
    return {"do_layer_norm_before": True, "ffn_dim": 64} if model_type == "opt" else {}


def packed_model(folder: Path, method: str) -> Any:
    """Write a llama whose linear layers are packed for the quantizer of a method.

    Return transformers' model of the plain weights, which differ from the quantized ones.
    """
    written, more = WRITTEN[method], BLOCKWISE if method == "fp8" else {}
    model = tiny_model(small_config(type(AutoConfig.for_model("llama")), **{**WIDE, **PACKED, **more}))
    save(model, folder)
    tensors = read_tensors(folder)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": t for part, t in written.tensors(tensors.pop(name)).items()}
    write_tensors(folder, tensors)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": dict(written.config)}))
    return None


def prompts(count: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab, rng.integers(1, 25)).tolist() for _ in range(count)]


def answers(folder: Path, ranks: int, requested: Sequence[list[int]], args: argparse.Namespace) -> list[list[int]]:
    many = len(requested)
    options = {**ENGINE, "model": str(folder), "max_num_seqs": many, "num_kvcache_blocks": 8 * many + 8}
    if ranks > 1:
        options |= dict(tensor_parallel_size=ranks, executor={"name": args.executor, "options": {"timeout": 300}})
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(**options) as llm:
        outs = llm.generate(requested, params, use_tqdm=False)
    assert not any(out.error for out in outs), next(out.error for out in outs if out.error)
    return [list(out.tokens) for out in outs]


def gap(model: Any, prompt: list[int], tokens: list[int], at: int) -> float:
    """Return the gap between transformers' two best logits for the token at index ``at``."""
    with torch.inference_mode():
        best = model(torch.tensor([prompt + tokens[:at]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def verdict(
    model: Any, requested: Sequence[list[int]], one: list[list[int]], many: list[list[int]]
) -> tuple[str, bool]:
    """Return a cell of the table, and whether it has no wrong answer."""
    other = [i for i in range(len(requested)) if one[i] != many[i]]
    cell = f"{len(requested) - len(other)}/{len(requested)}"
    if not other:
        return cell, True
    gaps = []
    for i in other:
        at = next(k for k, (a, b) in enumerate(zip(one[i], many[i], strict=True)) if a != b)
        gaps.append(float("inf") if model is None else gap(model, requested[i], one[i], at))
    fine = max(gaps) < TIE
    return f"{cell} {'tie' if fine else 'WRONG'} {max(gaps):.1e}", fine


def cells(name: str, folder: Path, model: Any, args: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    requested = prompts(args.prompts, vocab)
    one = answers(folder, args.ranks[0], requested, args)
    assert len({tuple(tokens) for tokens in one}) > len(requested) // 4, f"{name}: the answers are too much alike"
    yield f"{len(requested)}", True
    for ranks in args.ranks[1:]:
        try:
            yield verdict(model, requested, one, answers(folder, ranks, requested, args))
        except MinivllmError as e:
            yield f"{type(e).__name__}: {e}", False


class Answer(NamedTuple):
    """The tokens of an answer, the log-probability of each, and its distance to the second best one."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


def model_answers(ranks: int, args: argparse.Namespace) -> list[Answer]:
    """Return the greedy answers of ``--model`` shared by some ranks."""
    keywords: dict[str, Any] = dict(model=args.model, load_format=args.load_format, skip_tokenizer_init=True)
    keywords |= dict(max_model_len=2048, max_num_seqs=args.prompts)
    if ranks > 1:
        keywords |= dict(tensor_parallel_size=ranks, executor={"name": args.executor, "options": {"timeout": 300}})
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=2, detokenize=False)
    rng = np.random.default_rng(1)
    found = []
    with LLM(config=load_config(sets=args.set, keywords=keywords)) as llm:
        top = min(10_000, llm.engine.capacity.vocab_size)
        requested = [rng.integers(0, top, rng.integers(1, 400)).tolist() for _ in range(args.prompts)]
        for out in llm.generate(requested, params, use_tqdm=False):
            answer = out.outputs[0]
            best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in answer.logprobs]
            found.append(Answer(list(answer.token_ids), [b[0] for b in best], [b[0] - b[1] for b in best]))
    return found


def compare_model(args: argparse.Namespace) -> int:
    """Print a row for each number of ranks but the first, and return the exit status."""
    one, status = model_answers(args.ranks[0], args), 0
    print(
        f"{'ranks':>6} {'equal answers':>14} {'logprobs differ by':>19} {'gap at other tokens':>20} {'seconds':>8}",
        flush=True,
    )
    for ranks in args.ranks[1:]:
        begun, equal, apart, gap_there = time.monotonic(), 0, 0.0, 0.0
        for want, got in zip(one, model_answers(ranks, args), strict=True):
            same = [a == b for a, b in zip(want.tokens, got.tokens, strict=True)]
            first = same.index(False) if False in same else len(same)
            equal += first == len(same)
            differences = [abs(a - b) for a, b in zip(want.logprobs[:first], got.logprobs[:first], strict=True)]
            apart = max([apart, *differences])
            gap_there = max([gap_there, *want.gaps[first : first + 1]])
        seconds = time.monotonic() - begun
        print(f"{ranks:6} {equal:7} of {len(one):3} {apart:19.4f} {gap_there:20.4f} {seconds:8.0f}", flush=True)
        status |= max(apart, gap_there) > args.most
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--executor", default="multiprocess", choices=["multiprocess", "ray"])
    parser.add_argument("--only", nargs="+", default=[], help="names of families or methods")
    parser.add_argument("--model", help="compare this model only, on the device that auto chooses")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the engines")
    parser.add_argument("--most", type=float, default=0.2, help="largest difference of log-probabilities")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.model:
        return compare_model(args)
    made = {name: (family_model, model_type) for name, model_type in families().items()}
    made |= {method: (packed_model, method) for method in WRITTEN}
    if unknown := set(args.only) - set(made):
        parser.error(f"--only: {', '.join(sorted(unknown))}; expected some of {', '.join(made)}")
    print(f"{'family':20}" + "".join(f"{f'{n} ranks':>16}" for n in args.ranks) + "   seconds", flush=True)
    sound = True
    for name, (make, what) in made.items():
        if args.only and name not in args.only:
            continue
        begun = time.monotonic()
        print(f"{name:20}", end="", flush=True)
        with tempfile.TemporaryDirectory() as path, quiet():
            folder = Path(path) / "model"
            model = make(folder, what)
            for cell, fine in cells(name, folder, model, args):
                print(f"{cell:>16}", end="", flush=True)
                sound = sound and fine
        print(f"{time.monotonic() - begun:10.0f}", flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
