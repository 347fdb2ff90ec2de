"""Write a trace in the published formats: for tests, for other tools, and for the samples of the package.

python -m minivllm.lab.traces.write FOLDER                    writes the samples again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

from .formats import BAILIAN_BLOCK, MOONCAKE_BLOCK
from .synthetic import generate, parse
from .trace import Trace

START = datetime(2026, 1, 1)


def azure(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file in Azure's format."""
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for seconds, prompt, output in _rows(trace):
        when = START + timedelta(seconds=seconds)
        yield f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond * 10:07d},{prompt},{output}"


def burstgpt(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file in BurstGPT's format."""
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    for seconds, prompt, output in _rows(trace):
        yield f"{seconds:.3f},ChatGPT,{prompt},{output},{prompt + output},Conversation log"


def mooncake(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file in Mooncake's format."""
    for (seconds, prompt, output), ids in zip(_rows(trace), _hash_ids(trace, MOONCAKE_BLOCK), strict=True):
        lengths = {"input_length": prompt, "output_length": output}
        yield json.dumps({"timestamp": round(1e3 * seconds), **lengths, "hash_ids": ids})


def bailian(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file in Qwen-Bailian's format.

    A trace does not store which turn follows which, so each request becomes a chat of one turn.
    """
    all_ids = _hash_ids(trace, BAILIAN_BLOCK)
    for chat, ((seconds, prompt, output), ids) in enumerate(zip(_rows(trace), all_ids, strict=True)):
        lengths = {"input_length": prompt, "output_length": output}
        row = {"chat_id": chat, "parent_chat_id": -1, "timestamp": round(seconds, 3), **lengths}
        yield json.dumps({**row, "type": "text", "turn": 1, "hash_ids": ids})


def _rows(trace: Trace) -> Iterator[tuple[float, int, int]]:
    """Return an iterator over (arrival in seconds, prompt tokens, output tokens) of each request."""
    return zip(trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist(), strict=True)


def _hash_ids(trace: Trace, block: int) -> Iterator[list[int]]:
    """Yield a list of hash ids per request: an id for each block of its prompt, the partial one included.

    Equal ids mean equal prefixes.
    """
    numbers: dict[tuple[int, ...], int] = {}  # (id of the block before, content of the block) -> id
    for i in range(len(trace)):
        tokens = trace.tokens(i)
        ids = []
        parent = -1
        for start in range(0, len(tokens), block):
            key = (parent, *tokens[start : start + block].tolist())
            parent = numbers.setdefault(key, len(numbers))
            ids.append(parent)
        yield ids


SAMPLES: dict[str, tuple[Callable[[Trace], Iterator[str]], str]] = {
    "azure.csv": (azure, "like=azure-conversation,requests=60,seed=11"),
    "burstgpt.csv": (burstgpt, "like=azure-code,requests=60,seed=12"),
    "mooncake.jsonl": (mooncake, "like=mooncake-conversation,requests=40,seed=13,longest=24000,fan=4,turns=4,rate=0.2"),
    "bailian.jsonl": (bailian, "like=chat,requests=40,seed=14,node=300,think=10"),
}


def write_samples(folder: Path) -> None:
    """Write every sample into a folder."""
    for name, (lines_of, parameters) in SAMPLES.items():
        lines = lines_of(generate(parse(parameters)))
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
