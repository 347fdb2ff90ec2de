"""Readers of published formats.  None copies a text: the traces hold lengths, and ids where prefixes are equal."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, shown

from .trace import Trace, build

MOST_TOKENS = 1 << 22  # of a prompt or an answer: a replay makes as many ids, and a block table for all of them
MOONCAKE_BLOCK = 512  # tokens of a hash id
BAILIAN_BLOCK = 16
STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|([+-]\d\d:\d\d))?")  # UTC without an offset
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def read_azure(name: str, lines: Iterator[str]) -> Trace:
    """Azure's LLM inference traces (Patel et al., "Splitwise", ISCA 2024; those of 2024 alike): TIMESTAMP,
    ContextTokens, GeneratedTokens.  They say nothing about content, so no two requests share any."""

    def fields(stamp: str, n: str, m: str) -> tuple[float, int, int]:
        # seven digits after the point are one too many for datetime; those of 2024 end with an offset
        found = STAMP.fullmatch(stamp)
        if found is None:
            raise ValueError(f"{stamp[:40]!r} is no time")
        whole, digits, offset = found.groups()
        at = datetime.fromisoformat(whole + (offset or "+00:00")).timestamp()
        return at + float(f"0.{digits or 0}"), int(n), int(m)

    return _unshared(name, lines, AZURE, fields, "a time and two numbers")


def read_burstgpt(name: str, lines: Iterator[str]) -> Trace:
    """BurstGPT (Wang et al., 2024): Timestamp (seconds), Request tokens, Response tokens; others are passed over.
    Rows without a response are failures of the service that was watched, and are left out."""
    return _unshared(name, lines, BURSTGPT, lambda t, n, m: (float(t), int(n), int(m)), "three numbers", failures=True)


def _checked(at: float, *lengths: int) -> None:
    """Raise ValueError for a time or a length that no request has."""
    if not math.isfinite(at):
        raise ValueError(f"a time of {at}, which is no time")
    if not all(0 <= n <= MOST_TOKENS for n in lengths):
        raise ValueError(f"lengths of {' and '.join(str(n)[:20] for n in lengths)} tokens; want 0 to {MOST_TOKENS:,}")


def _unshared(
    name: str,
    lines: Iterator[str],
    want: tuple[str, str, str],
    fields: Callable[[str, str, str], tuple[float, int, int]],
    what: str,
    failures: bool = False,
) -> Trace:
    """A CSV of times and lengths."""
    rows = csv.DictReader(lines)
    if missing := [c for c in want if c not in (rows.fieldnames or ())]:
        raise ConfigError(f"{name}: no column {missing[0]}; want {', '.join(want)}")
    arrival, prompt, output = [], [], []
    for row in rows:
        try:
            at, n, m = fields(*(row[c] for c in want))
            _checked(at, n, m)
        except (ValueError, TypeError, AttributeError, OverflowError) as e:
            raise ConfigError(f"{name}:{rows.line_num}: {e}; want {what}") from e
        if failures and (n < 1 or m < 1):
            continue
        arrival.append(at)
        prompt.append(n)
        output.append(m)
    runs = [[(2 * i, n)] for i, n in enumerate(prompt)]
    return build(name, arrival, prompt, output, [2 * i + 1 for i in range(len(prompt))], runs)


def read_mooncake(name: str, lines: Iterator[str]) -> Trace:
    """Mooncake's traces (Qin et al., "Mooncake", FAST 2025): timestamp (ms), input_length, output_length, hash_ids, one
    an equal prefix of 512 tokens.  What a turn answers is in no later prompt by name, so answers are never shared."""
    return _hashed(name, lines, MOONCAKE_BLOCK, 1e3, "Mooncake's fields")


def read_bailian(name: str, lines: Iterator[str]) -> Trace:
    """Qwen-Bailian's traces (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025): chat_id, parent_chat_id,
    timestamp (seconds), input_length, output_length, type, turn, hash_ids, one for an equal prefix of 16 tokens."""
    return _hashed(name, lines, BAILIAN_BLOCK, 1.0, "Qwen-Bailian's fields")


def _hashed(name: str, lines: Iterator[str], block: int, unit: float, fields: str) -> Trace:
    """JSON lines whose prompts are ids of blocks; ``unit``: the timestamp's parts of a second."""
    arrival, prompt, output, runs = [], [], [], []
    numbers: dict[int, int] = {}  # id -> content number, in order of appearance
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = files.parse_json(line, name, line=number)
            if not isinstance(row, dict):
                raise ConfigError(f"{name}:{number}: {shown(row)} is no object; want one with {fields}")
            ids, n = [int(x) for x in row["hash_ids"]], int(row["input_length"])
            arrival.append(float(row["timestamp"]) / unit)
            prompt.append(n)
            output.append(max(1, int(row["output_length"])))
            _checked(arrival[-1], n, output[-1])
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError) as e:
            raise ConfigError(f"{name}:{number}: {type(e).__name__}: {e}; want {fields}") from e
        if len(ids) != -(-n // block):
            what = f"{len(ids)} hash ids for {n} tokens"
            raise ConfigError(f"{name}:{number}: {what}; want one for each {block} tokens begun")
        runs.append([(numbers.setdefault(x, len(numbers)), block) for x in ids])
    answers = [len(numbers) + i for i in range(len(runs))]
    return build(name, arrival, prompt, output, answers, runs, block)
