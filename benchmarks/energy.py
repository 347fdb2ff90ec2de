"""Measure the shares of joules of requests with a real counter, for two kinds of requests.

    python benchmarks/energy.py --model pocket --device cuda
    python benchmarks/energy.py --model DIR --dummy --device cuda --rows 64

It prints how often the counter changes, the time to read it, the joules of each kind and of the counter, and the time
that the account adds to a decode step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from minivllm import LLM, SamplingParams


def movement(llm, seconds: float) -> str:
    """Describe how the counter changes while the machine is idle."""
    meter, moved, took = llm.engine.energy.meter, [], []
    last, end = meter.joules(), time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        joules = meter.joules()
        took.append(time.perf_counter() - now)
        if joules != last:
            moved.append((now, joules - last))
            last = joules
    gaps = np.diff([at for at, _ in moved]) * 1e3
    watts = sum(j for _, j in moved[1:]) / max(moved[-1][0] - moved[0][0], 1e-9) if len(moved) > 1 else float("nan")
    return (
        f"counter {meter.name}: moves each {np.median(gaps):.1f} ms ({gaps.min():.1f} to {gaps.max():.1f}), a reading "
        f"takes {1e6 * statistics.median(took):.0f} us, {watts:.0f} W at rest"
    )


def served(llm, kinds: dict[str, tuple[int, int, int]], vocab: int) -> None:
    """Serve requests of several kinds at once and print their joules.

    ``kinds`` maps a name to (requests, tokens of a prompt, tokens of an answer).
    """
    rng = np.random.default_rng(0)
    prompts, params, names = [], [], []
    for name, (count, prompt, answer) in kinds.items():
        for _ in range(count):
            prompts.append({"prompt_token_ids": rng.integers(5, vocab - 5, prompt).tolist()})
            params.append(SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0))
            names.append(name)
    meter = llm.engine.energy.meter
    before, stats = meter.joules(), llm.stats()["energy"]
    start = time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    after, now = meter.joules(), llm.stats()["energy"]
    joules = [out.metrics.joules for out in outs]
    busy = now["busy_joules"] - stats["busy_joules"]
    print(f"{len(outs)} requests in {seconds:.2f} s")
    for name, (_count, prompt, answer) in kinds.items():
        mine = [j for j, n in zip(joules, names, strict=True) if n == name]
        each = sum(mine) / len(mine)
        print(
            f"  {name:8} {prompt:5} + {answer:4} tokens: {each:9.4f} J a request ({min(mine):.4f} to {max(mine):.4f}), "
            f"{each / answer:.5f} J an output token"
        )
    print(f"  sum of requests {sum(joules):.4f} J, busy {busy:.4f} J, counter {after - before:.4f} J", flush=True)


def cost(options: dict, rows: int, steps: int, vocab: int) -> None:
    """Print the seconds of decode steps with and without the account, in turns."""
    found: dict[str, list[float]] = {"off": [], "on": []}
    params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0)
    prompts = [{"prompt_token_ids": [5 + i % (vocab - 10)] * 8} for i in range(rows)]
    for energy in ("off", "on", "off", "on"):
        with LLM(**options, energy=energy) as llm:
            for _ in range(3):
                llm.generate(prompts, params, use_tqdm=False)
                clock = llm.engine.clock
                at = (np.arange(clock.count - steps + 5, clock.count - 5)) % clock.size
                found[energy].append(float(np.median(np.diff(clock.start[np.sort(at)]))) * 1e6)
    off, on = (statistics.median(found[which]) for which in ("off", "on"))
    print(f"a decode step of {rows} rows: {off:.1f} us without, {on:.1f} us with ({on - off:+.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--energy", default="on")
    parser.add_argument("--cost", action="store_true", help="also what it costs a step: four starts")
    args = parser.parse_args()
    options = {"model": args.model, "device": args.device, "max_num_seqs": args.rows, "max_model_len": 2048}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True} if args.dummy else {}
    options |= {"num_kvcache_blocks": 1024} if args.device == "cpu" else {}
    with LLM(**options, energy=args.energy) as llm:
        vocab = llm.engine.capacity.vocab_size
        llm.generate({"prompt_token_ids": [5] * 64}, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
        time.sleep(0.3)
        print(movement(llm, 2.0), flush=True)
        half = args.rows // 2
        long = 384 if args.model == "pocket" else 1500
        served(llm, {"chat": (half, 64, 400), "reader": (half, long, 32)}, vocab)
        served(llm, {"short": (half, 32, 200), "context": (half, long, 200)}, vocab)
        served(llm, {"alone": (1, 64, 400)}, vocab)
        served(llm, {"blink": (1, 8, 4)}, vocab)
        print(llm.stats()["energy"], flush=True)
    if args.cost:
        for rows in (1, args.rows):
            cost(options, rows, 150, vocab)


if __name__ == "__main__":
    main()
