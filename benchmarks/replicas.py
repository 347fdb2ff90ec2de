"""Measure replicas: their throughput against the same engines driven directly, and answers while engines are killed.

    python benchmarks/replicas.py speed [--replicas 4] [--rounds 8]
    python benchmarks/replicas.py deaths [--kills 1000] [--minutes 120]
    python benchmarks/replicas.py scale --model DIR --replicas 2 [--load-format dummy] [--device cuda]

``speed`` alternates batches through the router with batches that are dealt to the engines by hand.  ``deaths`` kills
simulated engines at random moments.  Every answer is compared.  The exit status is 1 if an answer was wrong, repeated
or lost.  A request that has a token may end with an error behind a correct beginning.  ``scale`` alternates batches for
the first replica alone with N times as many requests for N replicas, each with a GPU of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from minivllm import SamplingParams
from minivllm.config import load_config
from minivllm.errors import EngineDeadError
from minivllm.server.replicas.client import ReplicaClient

SIM = {"executor": {"name": "sim", "options": {"step_ms": 5}}, "max_num_seqs": 16, "max_model_len": 512}
TWENTY = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
PATIENCE = 120.0  # seconds in which a request must end


async def opened(replicas: int, server: dict[str, Any], engine: dict[str, Any]) -> ReplicaClient:
    """Return a client of replicas that run."""
    table = {"replicas": replicas, **server}
    client = ReplicaClient(load_config(keywords={"model": "pocket", **engine, "server": table}, environ={}))
    await client.open()
    return client


def cpu_seconds(client: ReplicaClient) -> float:
    """Return the CPU time of this process and of the engines."""
    found = time.process_time()
    for one in client.replicas:
        fields = Path(f"/proc/{one.pid}/stat").read_text().rpartition(") ")[2].split()
        found += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


async def speed(args: argparse.Namespace) -> int:
    """Print output tokens a second, and CPU microseconds a token, of both ways.  ``ratio`` is through / by hand."""
    client = await opened(args.replicas, {"router": args.router}, {"max_num_seqs": 32})
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0)
    rng = np.random.default_rng(0)
    names = iter(range(10**9))

    async def one(target: Any, ids: list[int]) -> int:
        stream = await target.stream(ids, params, f"r{next(names)}")
        return sum([len(piece.token_ids) async for piece in stream])

    async def batch(direct: bool) -> tuple[float, float]:
        """Return tokens a second, and CPU microseconds a token."""
        prompts = [rng.integers(10, 500, 100).tolist() for _ in range(12 * args.replicas)]
        targets = client.replicas if direct else [client]
        start, before = time.perf_counter(), cpu_seconds(client)
        tokens = sum(await asyncio.gather(*(one(targets[i % len(targets)], ids) for i, ids in enumerate(prompts))))
        return tokens / (time.perf_counter() - start), 1e6 * (cpu_seconds(client) - before) / tokens

    figures: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for direct in (False, True):
        await batch(direct)
    for turn in range(args.rounds):
        for direct in (False, True) if turn % 2 else (True, False):
            figures[direct].append(await batch(direct))
    (rate, cpu), (rate_by_hand, cpu_by_hand) = (np.median(figures[direct], axis=0) for direct in (False, True))
    rates = {"through": round(rate), "by_hand": round(rate_by_hand), "ratio": round(rate / rate_by_hand, 3)}
    cpus = {"through": round(cpu), "by_hand": round(cpu_by_hand), "ratio": round(cpu_by_hand / cpu, 3)}
    print(json.dumps({"tokens_per_second": rates, "cpu_us_per_token": cpus, "load": os.getloadavg()[0]}))
    await client.close()
    return 0


async def scale(args: argparse.Namespace) -> int:
    """Print output tokens a second of one replica and of all, and their ratio."""
    engine = {"model": args.model, "load_format": args.load_format, "device": args.device, "max_model_len": 2048}
    client = await opened(args.replicas, {"router": args.router}, {**engine, "skip_tokenizer_init": True})
    rng = np.random.default_rng(0)
    names = iter(range(10**9))

    async def one(target: Any) -> int:
        ids = rng.integers(10, 10_000 if args.model != "pocket" else 500, int(rng.integers(100, 1024))).tolist()
        params = SamplingParams(max_tokens=int(rng.integers(100, 1024)), ignore_eos=True, detokenize=False)
        stream = await target.stream(ids, params, f"r{next(names)}")
        return sum([len(piece.token_ids) async for piece in stream])

    async def rate(target: Any, requests: int) -> float:
        """Return output tokens a second of this number of requests."""
        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(target) for _ in range(requests))))
        return tokens / (time.perf_counter() - start)

    rates: dict[str, list[float]] = {"one": [], "all": []}
    await rate(client, 16 * args.replicas)
    for _ in range(args.rounds):
        rates["one"].append(await rate(client.replicas[0], args.requests))
        rates["all"].append(await rate(client, args.requests * args.replicas))
    alone, together = (float(np.median(found)) for found in rates.values())
    print(
        json.dumps({"replicas": args.replicas, "one": round(alone), "all": round(together), "ratio": together / alone})
    )
    await client.close()
    return 0


class Soak:
    """Users who ask replicas of a simulated model, and check each answer, while engines are killed.

    Each request ends in one way: an answer, an error behind the correct beginning of an answer, a wrong answer (also a
    repeated or a missing token), or a loss (an error without a token, or no end within ``PATIENCE`` seconds).
    """

    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.rng = random.Random(0)
        self.requested = 0
        self.results: Counter[str] = Counter()
        self.expected: list[list[int]] = []
        self.ended = False

    async def ask(self, number: int, pieces: bool = True) -> tuple[list[int], Exception | None]:
        """Return the tokens of an answer to prompt ``number``, and the error that ended it."""
        tokens: list[int] = []
        self.requested += 1
        try:
            stream = await self.client.stream([1, 2, 3 + number] * 8, TWENTY, f"r{self.requested}", pieces=pieces)
            async for piece in stream:
                tokens += piece.token_ids
        except EngineDeadError as error:
            return tokens, error
        return tokens, None

    async def learn(self) -> None:
        """Store the right answers, before an engine is killed."""
        self.expected = [(await self.ask(number))[0] for number in range(20)]

    async def user(self) -> None:
        """Ask until the soak ends."""
        while not self.ended:
            number = self.rng.randrange(20)
            try:
                tokens, error = await asyncio.wait_for(self.ask(number, self.rng.random() < 0.5), PATIENCE)
            except asyncio.TimeoutError:
                self.results["lost"] += 1
                continue
            right = tokens == self.expected[number][: len(tokens)]
            if error is not None:
                self.results["ended with an error behind tokens" if right and tokens else "lost"] += 1
            else:
                self.results["answered" if right and len(tokens) == 20 else "wrong"] += 1

    async def kill_one(self) -> None:
        """Kill a random engine while another one serves, and wait until the client has noticed."""
        while sum(one.accepts for one in self.client.replicas) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(self.rng.uniform(0.02, 0.2))
        victim = self.rng.choice([one for one in self.client.replicas if one.accepts])
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        while victim.accepts:
            await asyncio.sleep(0.01)


async def deaths(args: argparse.Namespace) -> int:
    """Kill engines while users ask, and print the ends of their requests."""
    client = await opened(args.replicas, {"router": args.router, "replica_retries": 20}, SIM)
    soak = Soak(client)
    await soak.learn()
    start, kills = time.monotonic(), 0
    users = [asyncio.create_task(soak.user()) for _ in range(args.users)]
    while kills < args.kills and time.monotonic() - start < 60 * args.minutes:
        await soak.kill_one()
        kills += 1
        if kills % 50 == 0:
            report(soak, kills, start)
    soak.ended = True
    await asyncio.gather(*users)
    report(soak, kills, start)
    await client.close()
    return int(bool(soak.results["lost"] or soak.results["wrong"]))


def report(soak: Soak, kills: int, start: float) -> None:
    """Print the counts of a soak so far."""
    seconds = round(time.monotonic() - start)
    print(json.dumps({"kills": kills, "seconds": seconds, "moved": soak.client.moved, **soak.results}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "deaths", "scale"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--router", default="least-tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=120, help="end the kills after this time")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--model", default="pocket", help="of scale")
    parser.add_argument("--load-format", default="auto", help="of scale")
    parser.add_argument("--device", default="auto", help="of scale")
    parser.add_argument("--requests", type=int, default=256, help="of scale, for each replica")
    args = parser.parse_args()
    sys.exit(asyncio.run({"speed": speed, "deaths": deaths, "scale": scale}[args.what](args)))


if __name__ == "__main__":
    main()
