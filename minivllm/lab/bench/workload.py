"""The requests of a benchmark: random tokens from a seed, a file of JSON lines, or a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError, shown

VOCAB = 1000  # upper bound of drawn token ids if the size of the vocabulary is not given
LONGEST = 1 << 20  # largest number of tokens of an answer
YEAR = 3.2e7  # seconds


@dataclass(frozen=True)
class BenchAsk:
    """A request: a prompt as text or token ids, with an answer of exactly ``max_tokens`` tokens.

    ``at`` is its arrival in seconds after the start; None leaves the arrival to the load.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Generated:
    """Random requests.

    Lengths are uniform within ``range_ratio`` of the given lengths; 0.5 means from half to one and a half of them.
    Each prompt begins with one of ``num_prefixes`` shared prefixes of ``prefix_len`` tokens.  The k-th prefix has a
    weight of 1/k (Zipf), as system prompts and documents have in real traffic.
    """

    num_prompts: int = 64
    input_len: int = 64
    output_len: int = 32
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    vocab: int = VOCAB

    def asks(self, seed: int) -> list[BenchAsk]:
        """Return the requests of a seed."""
        rng = random.Random(f"minivllm bench {seed}")
        prefixes = [self._ids(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        weights = [1 / (k + 1) for k in range(self.num_prefixes)]
        found = []
        for _ in range(self.num_prompts):
            prefix = rng.choices(prefixes, weights)[0] if len(prefixes) > 1 else prefixes[0]
            ids = self._ids(rng, self._length(rng, self.input_len))
            found.append(BenchAsk(prefix + ids, self._length(rng, self.output_len)))
        return found

    def _length(self, rng: random.Random, n: int) -> int:
        """Draw a length between ``n`` times 1 - ``range_ratio`` and ``n`` times 1 + ``range_ratio``."""
        low = round(n * (1 - self.range_ratio))
        high = round(n * (1 + self.range_ratio))
        return max(1, rng.randint(low, high))

    def _ids(self, rng: random.Random, n: int) -> tuple[int, ...]:
        """Draw ``n`` token ids."""
        return tuple(rng.randrange(self.vocab) for _ in range(n))


def read(path: str, output_len: int) -> list[BenchAsk]:
    """Read the requests of a file, in the order of their arrivals.

    Each line is a JSON object with ``prompt`` (text or token ids), and optionally ``max_tokens`` (default
    ``output_len``) and ``at`` (seconds after the start).  A line may also be a JSON string, the prompt, as in a
    ``prompts_file``.  Raise ConfigError with the line for anything else.
    """
    found = []
    expected = "expected one JSON object with a 'prompt' a line, or a trace"
    for number, line in enumerate(files.read_lines(path), 1):
        if line.strip():
            try:
                value = files.parse_json(line, path, line=number)
            except ConfigError as exc:
                raise ConfigError(f"{exc}; {expected}") from None
            found.append(_ask(value, f"{path}:{number}", output_len))
    if not found:
        raise ConfigError(f"{path}: no requests; {expected}")
    untimed = sum(ask.at is None for ask in found)
    if 0 < untimed < len(found):
        raise ConfigError(f"{path}: {untimed} of {len(found)} requests have no 'at'; expected it in all or in none")
    return sorted(found, key=lambda ask: ask.at or 0.0)


def names_trace(source: str) -> bool:
    """Return whether ``--dataset`` names a trace (times and lengths) rather than a file of prompts."""
    if source == "synthetic" or source.startswith(("sample:", "synthetic:")) or source.lower().endswith(".csv"):
        return True
    try:
        first = next((line for line in files.read_lines(source) if line.strip()), "")
        value = json.loads(first)
    except (ConfigError, ValueError, RecursionError):  # the reader of prompts reports the error with its line
        return False
    return isinstance(value, Mapping) and "prompt" not in value and "hash_ids" in value


def of_trace(source: str, vocab: int, longest: int | None) -> tuple[list[BenchAsk], int]:
    """Return the requests of a trace as token ids below ``vocab``, and the number of requests that are left out.

    Requests of more than ``longest`` tokens are left out; None means no limit.  Prefixes that are equal in the trace
    have equal token ids.  Raise ConfigError if no request is left.
    """
    from minivllm.lab.traces.read import read_trace
    from minivllm.lab.traces.trace import tokens_within

    trace = read_trace(source)
    fit = [i for i in range(len(trace)) if longest is None or trace.prompt[i] + trace.output[i] <= longest]
    if not fit:
        least = int((trace.prompt + trace.output).min())
        limit = f"{source}: its shortest request has {least} tokens, and this configuration allows {longest}"
        raise ConfigError(f"{limit}; use a larger max_model_len and KV cache, or another trace")
    begin = float(trace.arrival[fit[0]])
    asks = []
    for i in fit:
        ids = tokens_within(trace.tokens(i), vocab).tolist()
        asks.append(BenchAsk(tuple(ids), int(trace.output[i]), float(trace.arrival[i]) - begin))
    return asks, len(trace) - len(fit)


def _ask(value: Any, where: str, output_len: int) -> BenchAsk:
    """Return the request that a JSON value describes; ``where`` is its file and line.  Raise ConfigError for a wrong
    value.
    """
    value = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected an object with a 'prompt', or a text, not {shown(value)}")
    unknown = sorted(set(value) - {"prompt", "max_tokens", "at"})
    if unknown:
        raise ConfigError(f"{where}: {', '.join(map(shown, unknown))}: expected prompt, max_tokens and at")
    prompt = value.get("prompt")
    are_ids = isinstance(prompt, Sequence) and all(type(i) is int and i >= 0 for i in prompt)
    if not prompt or not (isinstance(prompt, str) or are_ids):
        raise ConfigError(f"{where}: prompt={shown(prompt)}: expected a text or a list of token ids")
    tokens = value.get("max_tokens", output_len)
    if type(tokens) is not int or not 1 <= tokens <= LONGEST:
        raise ConfigError(f"{where}: max_tokens={shown(tokens)}: expected a whole number from 1 to {LONGEST}")
    at = value.get("at")
    if at is not None and (type(at) not in (int, float) or not 0 <= at <= YEAR):
        raise ConfigError(f"{where}: at={shown(at)}: expected seconds after the start")
    return BenchAsk(prompt if isinstance(prompt, str) else tuple(prompt), tokens, at)


def poisson(asks: Sequence[BenchAsk], rate: float, seed: int, burstiness: float = 1.0) -> list[BenchAsk]:
    """Return the requests with random arrivals, ``rate`` per second on average.

    The gaps have a gamma distribution of shape ``burstiness``, as in vLLM's benchmark.  1 is a Poisson process, and
    lower values give bursts.
    """
    rng = random.Random(f"minivllm arrivals {seed}")
    now = 0.0
    out = []
    for ask in asks:
        out.append(replace(ask, at=now))
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return out
