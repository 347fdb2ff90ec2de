"""Readers of published trace formats.

A trace holds lengths and ids; equal ids mean equal prefixes.  No reader stores text.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, shown

from .trace import Trace, build

# the most tokens of a prompt or an answer; a larger number would make a replay allocate as many token ids and a huge
# block table
MOST_TOKENS = 1 << 22
MOONCAKE_BLOCK = 512  # number of tokens that a hash id stands for
BAILIAN_BLOCK = 16
# a time without an offset is UTC
STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|([+-]\d\d:\d\d))?")
WHOLE = re.compile(r"\s*[+-]?\d{1,20}\s*", re.ASCII)
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")

# converts the arrival (as text), the prompt length and the output length of a CSV row to numbers
Convert = Callable[[str, str, str], tuple[float, int, int]]


def read_azure(name: str, lines: Iterator[str]) -> Trace:
    """Read Azure's LLM inference traces of 2023 and 2024 (Patel et al., "Splitwise", ISCA 2024).

    The columns are TIMESTAMP, ContextTokens and GeneratedTokens.  These traces do not describe content, so no two
    requests share a prefix.
    """

    def convert(stamp: str, prompt: str, output: str) -> tuple[float, int, int]:
        # datetime rejects the seven decimals of Azure's times, so the fraction is added separately
        match = STAMP.fullmatch(stamp)
        if match is None:
            raise ValueError(f"{stamp[:40]!r} is no time")
        whole, digits, offset = match.groups()
        seconds = datetime.fromisoformat(whole + (offset or "+00:00")).timestamp()
        return seconds + float(f"0.{digits or 0}"), _whole(prompt), _whole(output)

    return _read_csv(name, lines, AZURE, convert, "a time and two numbers")


def read_burstgpt(name: str, lines: Iterator[str]) -> Trace:
    """Read a BurstGPT trace (Wang et al., 2024).

    The columns are Timestamp (seconds), Request tokens and Response tokens; other columns are ignored.  A row without
    response tokens records a failure of the observed service and is skipped.
    """

    def convert(seconds: str, prompt: str, output: str) -> tuple[float, int, int]:
        if NUMBER.fullmatch(seconds) is None:
            raise ValueError(f"{shown(seconds)} is no number of seconds")
        return float(seconds), _whole(prompt), _whole(output)

    return _read_csv(name, lines, BURSTGPT, convert, "three numbers", skip_empty=True)


def _whole(text: str) -> int:
    """Return the whole number in a cell of a CSV file.  ValueError for another text."""
    if WHOLE.fullmatch(text) is None:
        raise ValueError(f"{shown(text)} is no whole number of tokens")
    return int(text)


def _field(row: Mapping[str, Any], name: str, kind: type[Any], expected: str) -> Any:
    """Return the value of a field.  ValueError if the row lacks it, or if it is not of the type ``kind``.

    Whole numbers count as floats, true and false do not count as numbers."""
    if name not in row:
        raise ValueError(f"the field {name} is missing")
    value = row[name]
    kinds = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{name}={shown(value)}: expected {expected}")
    return value


def _check(seconds: float, *lengths: int) -> None:
    """Raise ValueError for an arrival time that is not finite, or a length outside 0 to ``MOST_TOKENS``."""
    if not math.isfinite(seconds):
        raise ValueError(f"the arrival time is {seconds}, which is not finite")
    if not all(0 <= n <= MOST_TOKENS for n in lengths):
        listed = " and ".join(str(n)[:20] for n in lengths)
        raise ValueError(f"lengths of {listed} tokens; expected 0 to {MOST_TOKENS:,}")


def _read_csv(
    name: str,
    lines: Iterator[str],
    columns: tuple[str, str, str],
    convert: Convert,
    expected: str,
    skip_empty: bool = False,
) -> Trace:
    """Read a CSV file of arrival times and lengths; ``expected`` describes a valid row in error messages.

    ``skip_empty`` skips rows whose prompt or output has no token.
    """
    rows = csv.DictReader(lines)
    for column in columns:
        if column not in (rows.fieldnames or ()):
            raise ConfigError(f"{name}: no column {column}; expected {', '.join(columns)}")
    arrivals, prompts, outputs = [], [], []
    for row in rows:
        cells = [row[column] for column in columns]
        try:
            if None in cells:
                raise ValueError("the row has fewer cells than the header")
            seconds, prompt, output = convert(*cells)
            _check(seconds, prompt, output)
        except (ValueError, OverflowError) as e:
            raise ConfigError(f"{name}:{rows.line_num}: {e}; expected {expected}") from e
        if skip_empty and min(prompt, output) < 1:
            continue
        arrivals.append(seconds)
        prompts.append(prompt)
        outputs.append(output)
    # prompt i has content number 2 * i and its answer 2 * i + 1, so every content number is unique
    runs = [[(2 * i, tokens)] for i, tokens in enumerate(prompts)]
    answers = range(1, 2 * len(prompts), 2)
    return build(name, arrivals, prompts, outputs, answers, runs)


def read_mooncake(name: str, lines: Iterator[str]) -> Trace:
    """Read Mooncake's traces (Qin et al., "Mooncake", FAST 2025).

    The fields are timestamp (ms), input_length, output_length and hash_ids.  Equal hash ids are equal prefixes; an id
    stands for 512 tokens.  The format does not name the content of answers, so an answer is never shared with a later
    prompt.
    """
    return _read_hashed(name, lines, MOONCAKE_BLOCK, 1e3, "timestamp (ms), input_length, output_length and hash_ids")


def read_bailian(name: str, lines: Iterator[str]) -> Trace:
    """Read Qwen-Bailian's traces (Wang et al., "KVCache Cache in the Wild", USENIX ATC 2025).

    The fields are chat_id, parent_chat_id, timestamp (seconds), input_length, output_length, type, turn and hash_ids.
    Equal hash ids are equal prefixes; an id stands for 16 tokens.
    """
    return _read_hashed(name, lines, BAILIAN_BLOCK, 1.0, "timestamp (s), input_length, output_length and hash_ids")


def _read_hashed(name: str, lines: Iterator[str], block: int, per_second: float, fields: str) -> Trace:
    """Read JSON lines whose prompts are lists of hash ids, each of ``block`` tokens.

    ``per_second`` is the number of timestamp units in a second.  ``fields`` lists the fields of a line for error
    messages.
    """
    arrivals, prompts, outputs, runs = [], [], [], []
    contents: dict[int, int] = {}  # hash id -> content number, in order of appearance
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        row: Any = files.parse_json(line, name, line=number)
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: {shown(row)} is not an object; expected an object with {fields}")
        try:
            ids = _field(row, "hash_ids", list, "a list of whole numbers")
            if not all(type(x) is int for x in ids):
                raise ValueError(f"hash_ids={shown(ids)}: expected a list of whole numbers")
            prompt = _field(row, "input_length", int, "a whole number of tokens")
            seconds = _field(row, "timestamp", float, "a number") / per_second
            output = max(1, _field(row, "output_length", int, "a whole number of tokens"))
            _check(seconds, prompt, output)
        except (ValueError, OverflowError) as e:
            raise ConfigError(f"{place}: {e}; a line has {fields}") from e
        if len(ids) != -(-prompt // block):
            raise ConfigError(
                f"{place}: {len(ids)} hash ids for {prompt} tokens; expected one id for each {block} tokens, "
                "and one for the rest"
            )
        arrivals.append(seconds)
        prompts.append(prompt)
        outputs.append(output)
        runs.append([(contents.setdefault(x, len(contents)), block) for x in ids])
    answers = range(len(contents), len(contents) + len(runs))  # each answer has a unique content number
    return build(name, arrivals, prompts, outputs, answers, runs, unit=block)
