"""Tokens per second and latencies through HTTP, at a fixed number of concurrent streams.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --streams 64 256 [--tokens 128] [--prompt 128]
    python benchmarks/serving.py --model pocket --streams 64 --offline          # starts the server itself

``--url`` may be any server with /v1/completions.  Each stream asks again as soon as its answer ends, until ``--rounds``
answers a stream have come; prompts are random token ids, no two alike; every token must come (``ignore_eos``).  TTFT is
the time to the first chunk, TPOT the mean time between tokens after it, both in milliseconds.  ``--offline`` runs the
same requests through ``LLM.generate`` afterwards, in one batch.  The client is bare sockets, and shares the machine's
cores with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from urllib.parse import urlsplit


async def ask(host: str, port: int, body: dict) -> tuple[float, float, int]:
    """(seconds to the first chunk, seconds per token after it, tokens) of one streamed completion."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    first, last, usage = 0.0, 0.0, {}
    status = (await reader.readline()).split()[1]
    assert status == b"200", (status, await reader.read())
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"usage":{' in line.replace(b" ", b""):
                usage = json.loads(line[6:])["usage"] or usage
            else:
                last = time.perf_counter()
                first = first or last
    writer.close()
    tokens = usage["completion_tokens"]
    assert tokens == body["max_tokens"], (tokens, body["max_tokens"])
    return first - start, (last - first) / max(tokens - 1, 1), tokens


def bodies(streams: int, rounds: int, prompt: int, tokens: int, vocab: int, seed: int) -> list[list[dict]]:
    rng = random.Random(seed)
    return [
        [
            {"prompt": [rng.randrange(vocab) for _ in range(prompt)], "max_tokens": tokens, "ignore_eos": True,
             "temperature": 0.6, "seed": rng.getrandbits(31)}
            for _ in range(rounds)
        ]
        for _ in range(streams)
    ]  # fmt: skip


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


async def measure(url: str, asks: list[list[dict]]) -> str:
    where = urlsplit(url)

    async def stream(mine: list[dict]) -> list[tuple[float, float, int]]:
        return [await ask(where.hostname, where.port, body) for body in mine]

    start = time.perf_counter()
    rows = [row for rows in await asyncio.gather(*map(stream, asks)) for row in rows]
    seconds = time.perf_counter() - start
    firsts, gaps = [1e3 * row[0] for row in rows], [1e3 * row[1] for row in rows]
    rate = sum(row[2] for row in rows) / seconds
    times = " ".join(f"{percentile(v, s):9.1f}" for v in (firsts, gaps) for s in (0.5, 0.99))
    return f"{len(asks):7} {len(rows):8} {rate:9.0f} {times}"


def start_server(model: str, more: list[str]) -> tuple[subprocess.Popen, str]:
    argv = [sys.executable, "-m", "minivllm", "serve", model, "--port", "0", *more]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if '"url"' in line:
            import threading

            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, json.loads(line)["url"]
    raise SystemExit(f"the server ended with {process.wait()}")


def offline(model: str, sets: list[str], asks: list[list[dict]]) -> float:
    from minivllm import LLM, SamplingParams
    from minivllm.config import load_config

    llm = LLM(config=load_config(sets=sets, keywords={"model": model}))
    flat = [body for mine in asks for body in mine]
    names = ("max_tokens", "ignore_eos", "temperature", "seed")
    params = [SamplingParams(**{name: body[name] for name in names}) for body in flat]
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    start = time.perf_counter()
    got = llm.generate([body["prompt"] for body in flat], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.close()
    return sum(len(out.tokens) for out in got) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started")
    parser.add_argument("--model", default="pocket")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for the server that is started"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--offline", action="store_true")
    args = parser.parse_args()
    process, url = (None, args.url)
    if url is None:
        process, url = start_server(args.model, [part for one in args.set for part in ("--set", one)])
    try:
        asyncio.run(measure(url, bodies(2, 1, args.prompt, 8, args.vocab, 99)))  # warms up
        print("streams requests     tok/s  TTFT p50       p99  TPOT p50       p99", flush=True)
        for number in args.streams:
            asks = bodies(number, args.rounds, args.prompt, args.tokens, args.vocab, number)
            print(asyncio.run(measure(url, asks)), flush=True)
    finally:
        if process is not None:
            process.terminate()
            process.wait()
    if args.offline:
        for number in args.streams:
            asks = bodies(number, args.rounds, args.prompt, args.tokens, args.vocab, number)
            print(f"{number:7} offline  {offline(args.model, args.set, asks):9.0f}", flush=True)


if __name__ == "__main__":
    main()
