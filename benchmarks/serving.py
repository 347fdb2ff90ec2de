"""Measure tokens per second and latencies through HTTP, at a fixed number of concurrent streams.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --streams 64 256 [--tokens 128] [--prompt 128]
    python benchmarks/serving.py --model pocket --streams 64 --offline          # starts the server itself
    python benchmarks/serving.py --paced 9 --streams 256                        # an engine without a model, 9 ms a step

``--url`` may be any server with /v1/completions.  Each stream asks again as soon as its answer ends, until ``--rounds``
answers a stream have come; prompts are random token ids, no two alike; every token must come (``ignore_eos``).  TTFT is
the time to the first text, TPOT the mean time between tokens after it, health the time of GET /health meanwhile, all in
milliseconds; tok/event says how many tokens came at once.  The line below has the CPU time in microseconds per token of
each process: that of HTTP, its children (the engine), and the generators of the load, of which ``--clients`` run.
``--offline`` runs the same requests through ``LLM.generate`` afterwards, in one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

from load import Found, measure

TICKS = os.sysconf("SC_CLK_TCK")


def bodies(streams: int, rounds: int, prompt: int, tokens: int, vocab: int, seed: int) -> list[list[dict]]:
    rng = random.Random(seed)
    return [
        [
            {
                "prompt": [rng.randrange(vocab) for _ in range(prompt)],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0.6,
                "seed": rng.getrandbits(31),
            }
            for _ in range(rounds)
        ]
        for _ in range(streams)
    ]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else float("nan")


def cpu_times(pid: int | None) -> dict[str, float]:
    """Return the CPU seconds so far of a process and of its children, by their roles."""
    if pid is None:
        return {}
    found = {"http": _cpu(pid)}
    waiting = _children(pid)
    while waiting:
        child = waiting.pop()
        found[f"engine {child}"] = _cpu(child)
        waiting += _children(child)
    return found


def _cpu(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


def _children(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for one in lists for word in one.read_text().split()]


HEAD = "streams requests     tok/s  TTFT p50       p99  TPOT p50       p99  health p99  tok/event"


def row(streams: int, found: Found) -> str:
    answers = found.answers
    tokens = sum(one.tokens for one in answers)
    gaps = [1e3 * one.span / max(one.tokens - 1, 1) for one in answers]
    times = " ".join(
        f"{percentile(v, s):9.1f}" for v in ([1e3 * one.first for one in answers], gaps) for s in (0.5, 0.99)
    )
    health = 1e3 * percentile(found.health, 0.99)
    events = tokens / max(sum(one.events for one in answers), 1)
    return f"{streams:7} {len(answers):8} {tokens / found.seconds:9.0f} {times} {health:11.1f} {events:10.2f}"


def shares(found: Found, before: dict[str, float], after: dict[str, float]) -> str:
    """Return the CPU microseconds per token of each process, and the share of a core that the generators used,
    as text.
    """
    tokens = max(sum(one.tokens for one in found.answers), 1)
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    engines = {name: value for name, value in spent.items() if name != "http" and value > 0.01 * max(spent.values())}
    parts = [f"http {1e6 * spent['http'] / tokens:.1f}"] if spent else []
    parts += [f"engine {1e6 * value / tokens:.1f}" for value in engines.values()]
    parts.append(f"clients {1e6 * found.cpu / tokens:.1f} ({100 * found.cpu / found.seconds:.0f} % of a core)")
    return "        CPU us/token: " + ", ".join(parts)


def start_server(model: str, more: list[str], env: dict[str, str] | None = None) -> tuple[subprocess.Popen, str]:
    argv = [sys.executable, "-m", "minivllm", "serve", model, "--port", "0", *more]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    reported = []
    for line in process.stderr:
        reported.append(line)
        if '"url"' in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, json.loads(line)["url"]
    raise SystemExit(f"the server ended with {process.wait()}: {''.join(reported[-8:])}")


def offline(model: str, sets: list[str], asks: list[list[dict]]) -> tuple[float, float]:
    """Return tokens per second, and CPU microseconds per token."""
    from minivllm import LLM, SamplingParams
    from minivllm.config import load_config

    llm = LLM(config=load_config(sets=sets, keywords={"model": model}))
    flat = [body for mine in asks for body in mine]
    names = ("max_tokens", "ignore_eos", "temperature", "seed")
    params = [SamplingParams(**{name: body[name] for name in names}) for body in flat]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    start, cpu = time.perf_counter(), time.process_time()
    got = llm.generate([body["prompt"] for body in flat], params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    llm.close()
    tokens = sum(len(out.tokens) for out in got)
    return tokens / seconds, 1e6 * cpu / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started")
    parser.add_argument("--pid", type=int, help="of the server at --url, whose CPU time is to be shown")
    parser.add_argument("--model", default="pocket")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for the server that is started"
    )
    parser.add_argument("--paced", type=float, metavar="MS", help="no model: a step takes that many milliseconds")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=1, help="processes that ask")
    parser.add_argument("--offline", action="store_true")
    args = parser.parse_args()
    process, url, pid = None, args.url, args.pid
    if url is None:
        more = [part for one in args.set for part in ("--set", one)]
        if args.paced is not None:
            more += ["--set", "executor=sim", "--set", f"executor.options.step_ms={args.paced}", "--set", "run_ahead=2"]
            more += ["--set", "max_num_seqs=256"]
        process, url = start_server(args.model, more)
        pid = process.pid
    wrong = []
    try:
        print(HEAD, flush=True)
        for number in args.streams:
            asks = bodies(number, args.rounds, args.prompt, args.tokens, args.vocab, number)
            # compiles and allocates for a batch of that size
            warm = bodies(number, 1, args.prompt, 16, args.vocab, number + 1)
            wrong += measure(url, warm, args.clients, health=False).wrong
            before = cpu_times(pid)
            found = measure(url, asks, args.clients)
            print(row(number, found), shares(found, before, cpu_times(pid)), sep="\n", flush=True)
            wrong += found.wrong
            short = [one.tokens for one in found.answers if one.tokens != args.tokens]
            wrong += [f"{n} tokens of {args.tokens}" for n in short]
    finally:
        if process is not None:
            process.terminate()
            process.wait()
    if wrong:
        raise SystemExit(f"{len(wrong)} answers were wrong; the first: {wrong[0]}")
    if args.offline:
        for number in args.streams:
            asks = bodies(number, args.rounds, args.prompt, args.tokens, args.vocab, number)
            rate, cpu = offline(args.model, args.set, asks)
            print(f"{number:7} offline  {rate:9.0f}\n        CPU us/token: {cpu:.1f}", flush=True)


if __name__ == "__main__":
    main()
