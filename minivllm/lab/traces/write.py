"""The published formats, from a trace: for tests, for other tools, and for the samples of the package.

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
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for at, n, m in zip(trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist(), strict=True):
        when = START + timedelta(seconds=at)
        yield f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond * 10:07d},{n},{m}"


def burstgpt(trace: Trace) -> Iterator[str]:
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    for at, n, m in zip(trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist(), strict=True):
        yield f"{at:.3f},ChatGPT,{n},{m},{n + m},Conversation log"


def mooncake(trace: Trace) -> Iterator[str]:
    for i, ids in enumerate(_block_ids(trace, MOONCAKE_BLOCK)):
        yield json.dumps(
            {
                "timestamp": round(1e3 * float(trace.arrival[i])),
                "input_length": int(trace.prompt[i]),
                "output_length": int(trace.output[i]),
                "hash_ids": ids,
            }
        )


def bailian(trace: Trace) -> Iterator[str]:
    """Which request a turn follows is not kept in a trace, so each is a chat of its own."""
    for i, ids in enumerate(_block_ids(trace, BAILIAN_BLOCK)):
        yield json.dumps(
            {
                "chat_id": i,
                "parent_chat_id": -1,
                "timestamp": round(float(trace.arrival[i]), 3),
                "input_length": int(trace.prompt[i]),
                "output_length": int(trace.output[i]),
                "type": "text",
                "turn": 1,
                "hash_ids": ids,
            }
        )


def _block_ids(trace: Trace, block: int) -> Iterator[list[int]]:
    """Of each request, a number for each block begun: equal numbers are equal prefixes."""
    numbers: dict[tuple[int, ...], int] = {}
    for i in range(len(trace)):
        tokens, ids, before = trace.tokens(i), [], -1
        for at in range(0, len(tokens), block):
            key = (before, *tokens[at : at + block].tolist())
            before = numbers.setdefault(key, len(numbers))
            ids.append(before)
        yield ids


SAMPLES: dict[str, tuple[Callable[[Trace], Iterator[str]], str]] = {
    "azure.csv": (azure, "like=azure-conversation,requests=60,seed=11"),
    "burstgpt.csv": (burstgpt, "like=azure-code,requests=60,seed=12"),
    "mooncake.jsonl": (mooncake, "like=mooncake-conversation,requests=40,seed=13,longest=24000,fan=4,turns=4,rate=0.2"),
    "bailian.jsonl": (bailian, "like=chat,requests=40,seed=14,node=300,think=10"),
}


def write_samples(folder: Path) -> None:
    for name, (lines, parameters) in SAMPLES.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines(generate(parse(parameters)))))


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
