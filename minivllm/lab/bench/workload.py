"""Requests to measure with: of random tokens from a seed, read from JSON lines, or made from a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, shown

VOCAB = 1000  # ids below it are drawn where nobody says how many there are
LONGEST = 1 << 20  # tokens of an answer
YEAR = 3.2e7  # seconds


@dataclass(frozen=True)
class BenchAsk:
    """One request: a text or token ids, exactly ``max_tokens`` tokens of answer, ``at`` seconds after the start (None:
    its arrival is up to the driver)."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Generated:
    """Random requests.  Lengths are uniform within ``range_ratio`` of the given ones (0.5: half to one and a half).
    Each prompt begins with one of ``num_prefixes`` of ``prefix_len`` tokens: those of a seed are drawn once, and the
    k-th comes with a weight of 1/k (Zipf), as system prompts and documents do."""

    num_prompts: int = 64
    input_len: int = 64
    output_len: int = 32
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab: int = VOCAB

    def asks(self, seed: int) -> list[BenchAsk]:
        rng = random.Random(f"minivllm bench {seed}")
        prefixes = [self._ids(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        weights = [1 / (k + 1) for k in range(self.num_prefixes)]
        drawn = lambda: rng.choices(prefixes, weights)[0] if len(prefixes) > 1 else prefixes[0]  # noqa: E731
        return [
            BenchAsk(drawn() + self._ids(rng, self._length(rng, self.input_len)), self._length(rng, self.output_len))
            for _ in range(self.num_prompts)
        ]

    def _length(self, rng: random.Random, n: int) -> int:
        return max(1, rng.randint(round(n * (1 - self.range_ratio)), round(n * (1 + self.range_ratio))))

    def _ids(self, rng: random.Random, n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(self.vocab) for _ in range(n))


def read(path: str, output_len: int) -> list[BenchAsk]:
    """Requests of a file with one JSON object a line: ``prompt`` (text or token ids), and where they are given
    ``max_tokens`` (default ``output_len``) and ``at`` (seconds after the start); or a text alone, as ``prompts_file``
    has them.  ConfigError names the line."""
    found = []
    want = "want one JSON object with a 'prompt' a line, or a trace"
    for number, line in enumerate(files.read_lines(path), 1):
        if line.strip():
            try:
                value = files.parse_json(line, path, line=number)
            except ConfigError as exc:
                raise ConfigError(f"{exc}; {want}") from None
            found.append(_ask(value, f"{path}:{number}", output_len))
    if not found:
        raise ConfigError(f"{path}: no requests; {want}")
    timed = [ask for ask in found if ask.at is not None]
    if timed and len(timed) < len(found):
        raise ConfigError(f"{path}: {len(found) - len(timed)} of {len(found)} requests have no 'at'; want all or none")
    return sorted(found, key=lambda ask: ask.at or 0.0)


def names_trace(source: str) -> bool:
    """Return whether ``--dataset`` names a trace (times and lengths) and no file of prompts."""
    if source == "synthetic" or source.startswith(("sample:", "synthetic:")) or source.lower().endswith(".csv"):
        return True
    try:
        first = next((line for line in files.read_lines(source) if line.strip()), "")
        value = json.loads(first.removeprefix("\ufeff"))
    except (ConfigError, ValueError, RecursionError):  # the reader of prompts reports it, with its line
        return False
    return isinstance(value, Mapping) and "prompt" not in value and "hash_ids" in value


def of_trace(source: str, vocab: int, longest: int | None) -> tuple[list[BenchAsk], int]:
    """Return the requests of a trace as token ids below ``vocab``, and the number of requests left out.

    Requests of more than ``longest`` tokens are left out.  Equal beginnings in the trace are equal tokens.
    ConfigError if none is left.
    """
    from minivllm.lab.traces.read import read_trace
    from minivllm.lab.traces.trace import tokens_within

    trace = read_trace(source)
    fit = [i for i in range(len(trace)) if longest is None or trace.prompt[i] + trace.output[i] <= longest]
    if not fit:
        least = int((trace.prompt + trace.output).min())
        what = f"{source}: its shortest request has {least} tokens, and this configuration allows {longest}"
        raise ConfigError(f"{what}; want a larger max_model_len and KV cache, or another trace")
    begin = float(trace.arrival[fit[0]])
    asks = [
        BenchAsk(
            tuple(tokens_within(trace.tokens(i), vocab).tolist()), int(trace.output[i]), float(trace.arrival[i]) - begin
        )
        for i in fit
    ]
    return asks, len(trace) - len(fit)


def _ask(value: Any, where: str, output_len: int) -> BenchAsk:
    value = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: want an object with a 'prompt', or a text, not {shown(value)}")
    if unknown := sorted(set(value) - {"prompt", "max_tokens", "at"}):
        raise ConfigError(f"{where}: {', '.join(map(shown, unknown))}: want prompt, max_tokens and at")
    prompt, tokens, at = value.get("prompt"), value.get("max_tokens", output_len), value.get("at")
    ids = isinstance(prompt, Sequence) and all(type(i) is int and i >= 0 for i in prompt)
    if not prompt or not (isinstance(prompt, str) or ids):
        raise ConfigError(f"{where}: prompt={shown(prompt)}: want a text or a list of token ids")
    if type(tokens) is not int or not 1 <= tokens <= LONGEST:
        raise ConfigError(f"{where}: max_tokens={shown(tokens)}: want a whole number from 1 to {LONGEST}")
    if at is not None and (type(at) not in (int, float) or not 0 <= at <= YEAR):
        raise ConfigError(f"{where}: at={shown(at)}: want seconds after the start")
    return BenchAsk(prompt if isinstance(prompt, str) else tuple(prompt), tokens, at)


def poisson(asks: Sequence[BenchAsk], rate: float, seed: int, burstiness: float = 1.0) -> list[BenchAsk]:
    """The same requests, arriving at ``rate`` a second: gaps have a Gamma distribution of shape ``burstiness``, as in
    vLLM's benchmark; 1 is a Poisson process, less comes in bursts."""
    rng, now, out = random.Random(f"minivllm arrivals {seed}"), 0.0, []
    for ask in asks:
        out.append(replace(ask, at=now))
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return out
