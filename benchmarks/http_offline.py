"""Compare requests through HTTP with ``LLM.generate`` in turns on the same cores, and engines that run at the same
time.

    python benchmarks/http_offline.py [--model pocket] [--streams 64] [--prompt 64] [--tokens 128] [--turns 5]
    python benchmarks/http_offline.py --beside 2                 # engines at once, without a server, against one alone

In each turn an offline engine answers ``--streams`` requests in one batch.  Then the server answers the same requests
as streams over kept connections.  Both run in their own processes, and one is idle while the other works.  The load
generator is a third process that uses the same cores.  ``us`` is CPU time in microseconds per token of the offline
engine, of the server's engine, of HTTP and of the load.  The ratio is that of served to offline tokens per second in
the same turn, and the last line has the medians.  ``others`` is the share of the cores that other processes used; with
more than a few percent a turn is not reliable.

``--beside N`` prints tokens per second of one engine alone, of each of N at once, and the share that each lost beyond
its N-th part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

from load import measure
from serving import TICKS, bodies, cpu_times, start_server

OURS = ("max_tokens", "ignore_eos", "temperature", "seed")


def _engine(link: Connection, model: str, sets: list[str], environ: dict[str, str]) -> None:
    """Run an engine that answers each list of bodies with (tokens, seconds, CPU seconds), until it receives None."""
    os.environ.update(environ)
    from minivllm import LLM, SamplingParams
    from minivllm.config import load_config

    llm = LLM(config=load_config(sets=sets, keywords={"model": model}))
    link.send(None)
    while (requested := link.recv()) is not None:
        params = [SamplingParams(**{name: body[name] for name in OURS}) for body in requested]
        begin, cpu = time.perf_counter(), time.process_time()
        got = llm.generate([body["prompt"] for body in requested], params, use_tqdm=False)
        link.send((sum(len(one.tokens) for one in got), time.perf_counter() - begin, time.process_time() - cpu))
    llm.close()


class Offline:
    """An engine in its own process.  ``begin`` sends bodies, and ``end`` waits for (tokens, seconds, CPU seconds)."""

    def __init__(self, model: str, sets: list[str], environ: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, far = context.Pipe()
        self._process = context.Process(target=_engine, args=(far, model, sets, environ), daemon=True)
        self._process.start()
        self._link.recv()

    def begin(self, requested: list[dict]) -> None:
        self._link.send(requested)

    def end(self) -> tuple[int, float, float]:
        return self._link.recv()

    def close(self) -> None:
        self._link.send(None)
        self._process.join()


def asks(args: argparse.Namespace, seed: int, tokens: int | None = None) -> list[list[dict]]:
    return bodies(args.streams, 1, args.prompt, tokens or args.tokens, args.vocab, seed)


def flat(found: list[list[dict]]) -> list[dict]:
    return [body for mine in found for body in mine]


class Others:
    """The share of the cores that other processes used between ``begin`` and ``share``."""

    def begin(self) -> None:
        self._busy, self._ours, self._at = *self._look(), time.perf_counter()

    def share(self, ended: float) -> float:
        """Return the share.  ``ended`` is the CPU time of our processes that have ended since ``begin``."""
        busy, ours = self._look()
        spent = busy - self._busy - (ours - self._ours) - ended
        return max(spent, 0.0) / (time.perf_counter() - self._at) / (os.cpu_count() or 1)

    def _look(self) -> tuple[float, float]:
        words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(words) - words[3] - words[4]  # without idle time and waits for a disk
        return busy / TICKS, sum(cpu_times(os.getpid()).values())


def in_turns(args: argparse.Namespace, environ: dict[str, str]) -> None:
    more = [part for one in args.set for part in ("--set", one)]
    process, url = start_server(args.model, more, environ)
    offline = Offline(args.model, args.set, environ)
    rows, others = [], Others()
    try:
        warm = asks(args, 0, 16)
        offline.begin(flat(warm))
        offline.end()
        measure(url, warm, args.clients, health=False, keep=True)
        print("offline tok/s    us   served tok/s  ratio  engine us  http us  load us  others", flush=True)
        for turn in range(1, args.turns + 1):
            requested = asks(args, turn)
            others.begin()
            offline.begin(flat(requested))
            tokens, seconds, cpu = offline.end()
            before = cpu_times(process.pid)
            found = measure(url, requested, args.clients, health=False, keep=True)
            after = cpu_times(process.pid)
            if found.wrong:
                raise SystemExit(f"{len(found.wrong)} answers were wrong; the first: {found.wrong[0]}")
            served = sum(one.tokens for one in found.answers)
            if served != tokens:
                raise SystemExit(f"{served} tokens were served; expected the {tokens} that LLM.generate gave")
            spent = {name: after[name] - before.get(name, 0.0) for name in after}
            http = spent.pop("http")
            rates = tokens / seconds, served / found.seconds
            each = [1e6 * s / tokens for s in (cpu, sum(spent.values()), http, found.cpu)]
            rows.append((rates[0], each[0], rates[1], rates[1] / rates[0], *each[1:], 100 * others.share(found.cpu)))
            print(ROW.format(*rows[-1]), flush=True)
        print(ROW.format(*map(statistics.median, zip(*rows, strict=True))), " median", flush=True)
    finally:
        process.terminate()
        process.wait()
        offline.close()


ROW = "{:13.0f} {:5.0f} {:14.0f} {:6.2f} {:10.0f} {:8.1f} {:8.1f} {:6.0f}%"


def beside(args: argparse.Namespace, environ: dict[str, str]) -> None:
    engines = [Offline(args.model, args.set, environ) for _ in range(args.beside)]
    rows = []
    for engine in engines:
        engine.begin(flat(asks(args, 0, 16)))
        engine.end()
    print("alone tok/s   each of them beside the others   lost beyond the share", flush=True)
    for turn in range(1, args.turns + 1):
        requested = flat(asks(args, turn))
        engines[0].begin(requested)
        tokens, seconds, _ = engines[0].end()
        for engine in engines:
            engine.begin(requested)
        both = [tokens / took for _, took, _ in [engine.end() for engine in engines]]
        alone = tokens / seconds
        rows.append((alone, *both, 1 - statistics.mean(both) * len(engines) / alone))
        print(
            "{:11.0f}  {}   {:20.0%}".format(alone, " ".join(f"{one:6.0f}" for one in both), rows[-1][-1]), flush=True
        )
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    print("{:11.0f}  {}   {:20.0%}  median".format(middle[0], " ".join(f"{x:6.0f}" for x in middle[1:-1]), middle[-1]))
    for engine in engines:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every engine")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for every engine's process")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=1, help="processes that ask")
    parser.add_argument("--beside", type=int, metavar="N", help="that many engines at once instead of a server")
    args = parser.parse_args()
    environ = dict(one.split("=", 1) for one in args.env)
    if args.beside:
        beside(args, environ)
    else:
        in_turns(args, environ)


if __name__ == "__main__":
    main()
