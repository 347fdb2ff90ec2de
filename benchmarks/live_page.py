"""Measure the speed of the engine with an open page: decode steps of 256 rows with and without readers of ``/v1/live``.

    python benchmarks/live_page.py --executor sim      the host's part alone: steps of the simulated device take 0 ms
    python benchmarks/live_page.py --executor local    pocket on this machine

Periods with and without a reader alternate, in an order that alternates too, so that other load of the machine affects
both alike.  The median of the ratios of their speeds counts.  The CPU time of the engine's process for each token is
printed as well, because other load changes it less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from minivllm.config import load_config
from minivllm.core.interfaces.params import SamplingParams
from minivllm.server.link.live_states import LiveStates
from minivllm.server.link.process_client import ProcessClient

SIMULATED = {"name": "sim", "options": {"step_ms": 0.0}}


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def period(client: ProcessClient, seconds: float) -> tuple[float, float]:
    """Return the tokens per second of a period, and the tokens per CPU second of the engine's process."""
    before, spent = (await client.stats())["generated_tokens"], cpu_seconds(client.pid)
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    made, taken = (await client.stats())["generated_tokens"] - before, time.perf_counter() - begin
    return made / taken, made / (cpu_seconds(client.pid) - spent)


async def read(stream: Any) -> None:
    """Read a stream until it ends."""
    async for _ in stream:
        pass


async def keep_busy(client: ProcessClient, rows: int) -> None:
    """Run ``rows`` requests for ever; each begins again when it ends."""
    params = SamplingParams.make(max_tokens=500, ignore_eos=True, temperature=0)

    async def one(number: int) -> None:
        turn = 0
        while True:
            prompt = [1 + (number * 7 + turn * 31 + i) % 200 for i in range(40)]
            await read(await client.stream(prompt, params, f"{number}-{turn}", pieces=False))
            turn += 1

    await asyncio.gather(*(one(number) for number in range(rows)))


async def measure(args: argparse.Namespace) -> None:
    """Print the speeds and the ratios."""
    engine: dict[str, Any] = {"model": "pocket", "max_num_seqs": args.rows, "num_kvcache_blocks": 10_000}
    if args.executor == "sim":
        engine["executor"] = SIMULATED
    loaded = load_config(keywords=engine, environ={})
    client = ProcessClient(loaded)
    await client.open()
    busy = asyncio.create_task(keep_busy(client, args.rows))
    await asyncio.sleep(3)
    states = LiveStates(client, loaded.server)
    sizes: list[int] = []
    ratios, cpu_ratios = [], []

    def offer(text: str) -> None:
        sizes.append(len(text))

    async def watched() -> tuple[float, float]:
        states.join(None, offer)
        try:
            return await period(client, args.seconds)
        finally:
            states.leave(None, offer)

    for number in range(args.pairs):
        if number % 2:
            page = await watched()
            alone = await period(client, args.seconds)
        else:
            alone = await period(client, args.seconds)
            page = await watched()
        ratios.append(page[0] / alone[0])
        cpu_ratios.append(page[1] / alone[1])
        line = f"{alone[0]:10,.0f} tokens/s alone, {page[0]:10,.0f} with a page: {ratios[-1]:.3f}"
        print(f"{line}; by CPU seconds {cpu_ratios[-1]:.3f}", flush=True)
    found = f"median ratio {statistics.median(ratios):.3f}, by CPU seconds {statistics.median(cpu_ratios):.3f}"
    print(f"{found}; {len(sizes)} states of {statistics.mean(sizes) / 1e3:.0f} KB")
    busy.cancel()
    await states.close()
    await client.close()


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executor", choices=["sim", "local"], default="sim")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
