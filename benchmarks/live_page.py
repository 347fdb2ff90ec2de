"""Measure the speed of the engine with an open page: decode steps of 256 rows with and without readers of ``/v1/live``.

    python benchmarks/live_page.py --executor sim      the host's part alone: steps of the simulated device take 0 ms
    python benchmarks/live_page.py --executor local    pocket on this machine

The periods alternate, so that other load of the machine affects both alike.  The median of their ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from minivllm.config import load_config
from minivllm.core.interfaces.params import SamplingParams
from minivllm.server.link.live_states import LiveStates
from minivllm.server.link.process_client import ProcessClient

SIMULATED = {"name": "sim", "options": {"step_ms": 0.0}}


async def period(client: ProcessClient, seconds: float) -> float:
    """Return the tokens per second of a period."""
    before = (await client.stats())["generated_tokens"]
    begin = time.perf_counter()
    await asyncio.sleep(seconds)
    after = (await client.stats())["generated_tokens"]
    return (after - before) / (time.perf_counter() - begin)


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
    ratios = []
    for _ in range(args.pairs):
        alone = await period(client, args.seconds)
        offer = lambda text: sizes.append(len(text))  # noqa: E731
        states.join(None, offer)
        watched = await period(client, args.seconds)
        states.leave(None, offer)
        ratios.append(watched / alone)
        print(f"{alone:10,.0f} tokens/s alone, {watched:10,.0f} with a page: {ratios[-1]:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}; {len(sizes)} states of {statistics.mean(sizes) / 1e3:.0f} KB")
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
