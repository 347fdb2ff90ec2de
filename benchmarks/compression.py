"""Measure KV compression with a full cache, in the prefill and at decode.

    python benchmarks/compression.py --model DIR --load-format dummy --scorers knorm snapkv streaming \\
        --prompt 16000 --tokens 2048 --cache 160000 --budgets 0 0.5 0.25

--parts selects the measurements:

full      tokens per second, running rows and memory of a row, with more requests than the KV cache of --cache tokens
          holds, for each of --budgets (0 means no compression).  Requests enter until the cache is full.  Then --window
          seconds are counted.  The first requests have shorter outputs of different lengths, so that rows end
          at different times from the beginning.  The scorer is the first of --scorers.  Rows are compressed again
          after every --full-every tokens, 0 means only after their prompt.  Without --settle the rows of the window
          are younger than they would be later, so they store fewer generated tokens.
prefill   seconds of one prompt with one token, without and with each scorer at the last of --budgets, in turns
decode    milliseconds of a step of each number of --rows: of uncompressed rows, and of rows that were compressed to as
          many tokens and are compressed again after each of --every generated tokens (0 means once), in turns

All parts run in one engine.  The benchmark replaces its compressor between measurements, because a start takes longer
than a measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from minivllm import LLM, SamplingParams
from minivllm.device.worker.query_store import QueryStore
from minivllm.plugins.compressor.attention_weights import H2O, RKV, SnapKV, Tova
from minivllm.plugins.compressor.keys import KeyDiff, KNorm, Random, Streaming
from minivllm.plugins.compressor.options import H2OOptions, RKVOptions, SnapKVOptions, StreamingOptions

SCORERS: dict[str, tuple[Any, Any]] = {
    "streaming": (Streaming, StreamingOptions()),
    "knorm": (KNorm, None),
    "keydiff": (KeyDiff, None),
    "random": (Random, None),
    "snapkv": (SnapKV, SnapKVOptions()),
    "tova": (Tova, None),
    "rkv": (RKV, RKVOptions()),
    "h2o": (H2O, H2OOptions()),
}
QUIET = 8  # steps in a row that start no request: the cache is full


def prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Return ``count`` random prompts of ``length`` tokens."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(200) for _ in range(length)]} for _ in range(count)]


def sampled(tokens: int, budget: float) -> SamplingParams:
    """Return the parameters of a request with ``tokens`` tokens."""
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, detokenize=False, kv_budget=budget)


def start(args: argparse.Namespace) -> LLM:
    """Return an engine with a scorer that reads queries if there is one, and a KV cache of --cache tokens.

    Prompts are different, so the prefix cache is off."""
    options = {"kvcache_block_size": 256, "enable_prefix_caching": False, **json.loads(args.options)}
    # the stores of attention sums and of queries are made when the engine starts, or in ``use``
    readers = [scorer for scorer in ("h2o", "snapkv", "tova", "rkv") if scorer in args.scorers]
    return LLM(
        args.model,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        compressor=(readers or args.scorers)[0],
        num_kvcache_blocks=args.cache // options["kvcache_block_size"],
        max_num_seqs=args.most,
        max_model_len=args.prompt + args.tokens,
        **options,
    )


def use(llm: LLM, scorer: str, every: int = 0) -> None:
    """Replace the compressor of an engine without requests, and set the tokens between two compressions."""
    compactor, compression = llm.engine.executor.runner.compactor, llm.engine.compression
    cls, options = SCORERS[scorer]
    scores = compactor.scores
    scores.compressor = cls(options, compactor.compressor.ctx)
    compression.observed, compression.every = compactor.compressor.window, every
    compression.sums = compactor.compressor.attention_sums
    if compression.observed and compactor.queries is None:
        scores.queries = QueryStore()


class Window:
    """Counts tokens, rows and blocks of an engine for some seconds, which begin ``settle`` steps after its cache is
    full.

    Then it ends all requests."""

    def __init__(self, llm: LLM, seconds: float, settle: int) -> None:
        self.engine, self.seconds, self.settle = llm.engine, seconds, settle
        self.step = self.engine.step
        self.quiet = self.entered = self.tokens = self.preempted = 0
        self.full = False
        self.begun = self.spent = 0.0
        self.rows: list[int] = []
        self.blocks: list[int] = []

    def __call__(self) -> bool:
        """Run a step of the engine."""
        worked = self.step()
        engine, now = self.engine, time.perf_counter()
        entered = engine.slots.next_serial
        self.quiet = self.quiet + 1 if entered == self.entered else 0
        self.entered = entered
        self.full |= self.quiet >= QUIET and engine.planner.n_waiting > 0
        self.settle -= self.full
        if not self.begun and self.full and self.settle < 0:
            self.begun, self.tokens = now, engine.publisher.tokens
            self.preempted = engine.planner.preemptions
        if self.begun and not self.spent:
            pool = engine.cache.pools[0]
            self.rows.append(engine.slots.n_running)
            self.blocks.append(pool.total - 1 - pool.free)
            if now - self.begun >= self.seconds:
                self.spent = now - self.begun
                self.tokens = engine.publisher.tokens - self.tokens
                self.preempted = engine.planner.preemptions - self.preempted
                for request in list(engine.requests):
                    engine.abort(request)
        return worked


def crowd(llm: LLM, args: argparse.Namespace, budget: float, seed: int) -> dict[str, float]:
    """Return tokens per second, running rows, tokens of memory of a row, and preemptions, with a full cache."""
    kept = args.prompt if not budget else math.ceil(budget * args.prompt)
    at_once = min(args.most, args.cache // (kept + args.tokens // 2) + 1)
    ages = [max(1, args.tokens * (i + 1) // at_once) for i in range(at_once)]
    random.Random(seed).shuffle(ages)
    count = (3 + args.settle // args.tokens) * at_once
    params = [sampled(ages[i] if i < at_once else args.tokens, budget) for i in range(count)]
    watched = Window(llm, args.window, args.settle)
    llm.engine.step = watched
    begun = time.perf_counter()
    outputs = llm.generate(prompts(count, args.prompt, seed), params, use_tqdm=False)
    llm.engine.step = watched.step
    failed = [output.error for output in outputs if output.error]
    assert not failed, failed[0]
    assert watched.spent, "the requests ended before the window: the cache was never full; lower --cache or --window"
    rows = sum(watched.rows) / len(watched.rows)
    blocks = sum(watched.blocks) / len(watched.blocks)
    return {
        "rate": watched.tokens / watched.spent,
        "rows": rows,
        "row_tokens": blocks * llm.engine.wiring.block / rows,
        "preempted": watched.preempted,
        "filled": watched.begun - begun,
    }


def full(llm: LLM, args: argparse.Namespace) -> None:
    """Print the table of the full cache."""
    use(llm, args.scorers[0], args.full_every)
    first: dict[str, float] = {}
    capacity = llm.engine.capacity
    of_token = capacity.block_bytes[0] / llm.engine.wiring.block
    print(
        f"full cache of {args.cache} tokens, {args.scorers[0]} every {args.full_every}, prompts of {args.prompt}, "
        f"outputs of {args.tokens}"
    )
    for budget in args.budgets:
        found = crowd(llm, args, budget, 2)
        first = first or found
        ratios = ", ".join(f"{found[key] / first[key]:.2f} x" for key in ("rate", "rows"))
        print(
            f"budget {budget:5}: {found['rate']:8.1f} tok/s, {found['rows']:5.1f} rows ({ratios} the first), "
            f"{found['row_tokens'] * of_token / 2**20:7.1f} MiB a row, {found['preempted']:.0f} preempted, "
            f"full after {found['filled']:.1f} s",
            flush=True,
        )


def prefill(llm: LLM, args: argparse.Namespace) -> None:
    """Print the cost of each scorer in the prefill of one prompt."""

    def once(budget: float, seed: int) -> float:
        begun = time.perf_counter()
        llm.generate(prompts(1, args.prompt, seed), sampled(2, budget), use_tqdm=False)
        return time.perf_counter() - begun

    budget = args.budgets[-1]
    times: dict[str, list[float]] = {"none": [], **{scorer: [] for scorer in args.scorers}}
    for turn in range(args.repeat + 1):
        for scorer, found in times.items():
            use(llm, args.scorers[0] if scorer == "none" else scorer)
            seconds = once(0 if scorer == "none" else budget, turn)
            if turn:  # the first turn compiles kernels
                found.append(seconds)
    plain = median(times["none"])
    print(f"prefill of {args.prompt} tokens, one prompt, budget {budget}, medians of {args.repeat}")
    for scorer, found in times.items():
        ratios = [own / base for own, base in zip(found, times["none"], strict=True)]
        print(
            f"{scorer:10} {1e3 * median(found):8.2f} ms, {median(found) / plain:.4f} of none "
            f"(pairs {min(ratios):.4f} to {max(ratios):.4f})",
            flush=True,
        )


def decode(llm: LLM, args: argparse.Namespace) -> None:
    """Print the milliseconds of a decode step of compressed and uncompressed rows, for each number of rows."""
    for rows in args.rows:
        decode_rows(llm, args, rows)


def decode_rows(llm: LLM, args: argparse.Namespace, rows: int) -> None:
    """Print the milliseconds of a decode step of ``rows`` compressed and uncompressed rows."""
    keep, tokens = args.prompt // 4, args.decoded

    def once(scorer: str, every: int, length: int, budget: float, seed: int) -> float:
        use(llm, scorer, every)
        engine, step, ends = llm.engine, llm.engine.step, []

        def watched() -> bool:
            worked = step()
            s = engine.slots
            if len(s.running) == rows and (s.collected[s.running] > s.prompt[s.running] + 2).all():
                ends.append((time.perf_counter(), engine.publisher.tokens))
            return worked

        engine.step = watched
        llm.generate(prompts(rows, length, seed), sampled(tokens, budget), use_tqdm=False)
        engine.step = step
        (begun, first), (ended, last) = ends[0], ends[-1]
        return 1e3 * (ended - begun) * rows / (last - first)

    kinds: dict[str, tuple[str, int, int, float]] = {"uncompressed": (args.scorers[0], 0, keep, 0)}
    for scorer in args.scorers:
        for every in args.every:
            kinds[f"{scorer}, every {every}" if every else f"{scorer}, once"] = (scorer, every, keep + keep // 4, keep)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(args.turns + 1):
        for kind, case in kinds.items():
            ms = once(*case, turn)
            if turn:
                times[kind].append(ms)
    plain = median(times["uncompressed"])
    print(f"decode of {rows} rows, {keep} tokens kept, {tokens} generated, medians of {args.turns}")
    for kind, found in times.items():
        ratios = [own / base for own, base in zip(found, times["uncompressed"], strict=True)]
        print(
            f"{kind:22} {median(found):8.3f} ms a step, {median(found) / plain:.4f} of uncompressed "
            f"(pairs {min(ratios):.4f} to {max(ratios):.4f})",
            flush=True,
        )


PARTS = {"full": full, "prefill": prefill, "decode": decode}


def main() -> None:
    """Print the tables of the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--prompt", type=int, default=16000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--cache", type=int, default=160000, help="tokens in the KV cache")
    parser.add_argument("--most", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--window", type=float, default=20.0, help="seconds that the part full counts")
    parser.add_argument("--settle", type=int, default=0, help="steps between the full cache and this window")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0, 0.5, 0.25])
    parser.add_argument("--scorers", nargs="+", choices=tuple(SCORERS), default=["knorm", "snapkv", "streaming"])
    parser.add_argument("--repeat", type=int, default=7, help="turns of the part prefill")
    parser.add_argument("--full-every", type=int, default=0, help="tokens between compressions of the part full")
    parser.add_argument("--rows", type=int, nargs="+", default=[8], help="rows of the part decode")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[0, 128], help="tokens between compressions of the part decode"
    )
    parser.add_argument("--decoded", type=int, default=400, help="tokens of a row of the part decode")
    parser.add_argument("--turns", type=int, default=3, help="turns of the part decode")
    parser.add_argument("--options", default="{}", help="further options of the engine, as JSON")
    args = parser.parse_args()
    begun = time.perf_counter()
    with start(args) as llm:
        print(f"engine ready after {time.perf_counter() - begun:.1f} s", flush=True)
        for part in args.parts:
            PARTS[part](llm, args)


if __name__ == "__main__":
    main()
