"""A trace: when requests come, how long they are, and which prefixes they share.

Content is kept as runs: a prompt is a list of (content number, tokens), and equal numbers at equal places are equal
text.  What the answers hold is a run too, so that the next turn of a conversation can repeat it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from minivllm import files
from minivllm.errors import ConfigError, brief

MOONCAKE_BLOCK = 512  # tokens of a hash id


@dataclass(frozen=True)
class Trace:
    """n requests in order of arrival.  Content numbers are below 2**31, so they serve as token ids.

    The prompt of request i is ``runs[first[i]:first[i + 1]]``; its tokens are as many as ``prompt[i]`` says.
    ``unit``: tokens of a run if every run is one block of the trace's own cache (the last may be shorter), else 0.
    """

    name: str
    arrival: np.ndarray  # f64 [n] seconds since the first
    prompt: np.ndarray  # i32 [n] tokens
    output: np.ndarray  # i32 [n] tokens
    answer: np.ndarray  # i32 [n] content number of the answer
    first: np.ndarray  # i64 [n + 1]
    runs: np.ndarray  # i32 [total, 2] content number, tokens
    unit: int = 0

    def __len__(self) -> int:
        return len(self.arrival)

    def part(self, start: int, stop: int) -> Trace:
        """Requests [start, stop); the runs are shared."""
        columns = {name: getattr(self, name)[start:stop] for name in ("arrival", "prompt", "output", "answer")}
        columns["arrival"] = columns["arrival"] - (columns["arrival"][0] if stop > start else 0.0)
        return replace(self, **columns, first=self.first[start : stop + 1])

    def tokens(self, i: int) -> np.ndarray:
        """The prompt's token ids i32."""
        runs = self.runs[self.first[i] : self.first[i + 1]]
        return np.repeat(runs[:, 0], runs[:, 1])[: self.prompt[i]]

    def keys(self, i: int, block: int, root: int = 1) -> list[int]:
        """The keys of the prompt's full blocks: equal keys are equal prefixes.  With the key of an engine's root as
        ``root`` (see ``BlockPool.root``) they are the engine's."""
        from minivllm.core.engine.blocks import chain_key

        raw, step, key, keys = self.tokens(i).tobytes(), 4 * block, root, []
        for at in range(0, len(raw) - step + 1, step):
            key = chain_key(key, raw[at : at + step])
            keys.append(key)
        return keys

    def chain(self, i: int, block: int) -> list[int]:
        """The prompt's blocks as the trace itself counts them: if its unit is ``block`` its own ids, and the last block
        may be partial; otherwise ``keys``."""
        if block != self.unit:
            return self.keys(i, block)
        return [spread(x) for x in self.runs[self.first[i] : self.first[i + 1], 0].tolist()]


def spread(number: int) -> int:
    """A key that looks like a hash, never 0 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (x ^ x >> 31) or 1


def build(name: str, arrival: Any, prompt: Any, output: Any, answer: Any, runs: Sequence[Any], unit: int = 0) -> Trace:
    """Columns from lists; ``runs`` has one list of (content, tokens) a request.  Sorted by arrival, which is counted
    from the first; ConfigError for lengths that no request can have."""
    order = np.argsort(np.asarray(arrival, np.float64), kind="stable")
    flat = [run for i in order.tolist() for run in runs[i]]
    counts = np.array([len(runs[i]) for i in order.tolist()], np.int64)
    arrival = np.asarray(arrival, np.float64)[order]
    trace = Trace(
        name, arrival - (arrival[0] if len(arrival) else 0.0), np.asarray(prompt, np.int32)[order],
        np.asarray(output, np.int32)[order], np.asarray(answer, np.int32)[order],
        np.concatenate(([0], np.cumsum(counts))), np.array(flat, np.int32).reshape(-1, 2), unit,
    )  # fmt: skip
    if not len(trace):
        raise ConfigError(f"{name}: no request in it")
    short = np.flatnonzero((trace.prompt < 1) | (trace.output < 1))
    if len(short):
        i = int(short[0])
        what = f"{trace.prompt[i]} prompt and {trace.output[i]} output tokens"
        raise ConfigError(f"{name}: request {i} (by arrival) has {what}; want at least one of each")
    return trace


def read_trace(source: str) -> Trace:
    """``synthetic:...``, a .csv (Azure) or a .jsonl (Mooncake).  ConfigError says what is wrong with it."""
    if source == "synthetic" or source.startswith("synthetic:"):
        from .synthetic import generate, parse

        return generate(parse(source.partition(":")[2]))
    path = Path(source)
    readers = {".csv": read_azure, ".jsonl": read_mooncake}
    if path.suffix not in readers:
        raise ConfigError(f"{brief(source, 300)}: want a .csv (Azure), a .jsonl (Mooncake) or synthetic:key=value,...")
    try:
        return readers[path.suffix](source, files.read_lines(path, files.HUGE))
    except csv.Error as e:
        raise ConfigError(f"{source}: no CSV: {e}") from e


def read_azure(name: str, lines: Iterator[str]) -> Trace:
    """Azure's LLM inference traces (Patel et al., "Splitwise", ISCA 2024): TIMESTAMP, ContextTokens, GeneratedTokens.
    They say nothing about content, so no two requests share any."""
    rows = csv.DictReader(lines)
    want = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if missing := [c for c in want if c not in (rows.fieldnames or ())]:
        raise ConfigError(f"{name}: no column {missing[0]}; want {', '.join(want)}")
    arrival, prompt, output = [], [], []
    for row in rows:
        try:
            stamp, n, m = (row[c] for c in want)
            # seven digits after the point are one too many for datetime
            whole, _, rest = stamp.partition(".")
            arrival.append(datetime.fromisoformat(whole).timestamp() + float(f"0.{rest or 0}"))
            prompt.append(int(n))
            output.append(int(m))
        except (ValueError, TypeError, AttributeError) as e:
            raise ConfigError(f"{name}:{rows.line_num}: {e}; want a time and two numbers") from e
    runs = [[(2 * i, n)] for i, n in enumerate(prompt)]
    return build(name, arrival, prompt, output, [2 * i + 1 for i in range(len(prompt))], runs)


def read_mooncake(name: str, lines: Iterator[str]) -> Trace:
    """Mooncake's traces (Qin et al., "Mooncake", FAST 2025): timestamp (ms), input_length, output_length, hash_ids, one
    an equal prefix of 512 tokens.  What a turn answers is in no later prompt by name, so answers are never shared."""
    arrival, prompt, output, runs = [], [], [], []
    top = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = files.parse_json(line, name, line=number)
            ids, n = [int(x) for x in row["hash_ids"]], int(row["input_length"])
            arrival.append(float(row["timestamp"]) / 1e3)
            prompt.append(n)
            output.append(max(1, int(row["output_length"])))
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as e:
            raise ConfigError(f"{name}:{number}: {type(e).__name__}: {e}; want Mooncake's fields") from e
        if len(ids) != -(-n // MOONCAKE_BLOCK) or min(ids, default=0) < 0:
            what = f"{len(ids)} hash ids for {n} tokens"
            raise ConfigError(f"{name}:{number}: {what}; want one, from 0 on, for each {MOONCAKE_BLOCK} tokens begun")
        top = max(top, *ids)
        runs.append([(x, MOONCAKE_BLOCK) for x in ids])
    if top + len(runs) >= 2**31 - 1:
        raise ConfigError(f"{name}: a hash id of {top}; want small numbers, counted from 0")
    answers = [top + 1 + i for i in range(len(runs))]
    return build(name, arrival, prompt, output, answers, runs, MOONCAKE_BLOCK)
