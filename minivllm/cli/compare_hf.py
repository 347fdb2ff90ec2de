"""``minivllm compare-hf``: compare the outputs of a model's operations with those of transformers.

Parsing the command imports no large package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import (
    add_repeatable,
    add_switch,
    add_value,
    config_flags,
    print_notes,
    read_config,
    show_warnings,
    target_flags,
)
from minivllm.errors import ConfigError, brief

if TYPE_CHECKING:
    from minivllm.config import Loaded

APART = 5  # exit code if the error of an operation is above the bound
DTYPES = ("float32", "bfloat16", "float16")


def add_commands(command: Any) -> None:
    """Add the command ``compare-hf``; ``command(name, ...)`` makes its parser."""
    text = "Compare each operation of a model with that of transformers; exit code 5 if an error is above its bound."
    sub = command("compare-hf", "cli.compare_hf:compare", text)
    sub.add_argument("model", help="a directory, a Hugging Face id, or pocket")
    add_repeatable(sub, "--prompt", "TEXT", "a prompt; repeat the flag for several")
    add_repeatable(sub, "--ids", "N,N,...", "a prompt as token ids; repeat the flag for several")
    add_value(sub, "--max-tokens", int, "N", "greedy tokens of each prompt (default 8)", 8)
    text = "default float32; repeat the flag for several"
    sub.add_argument("--dtype", action="append", default=[], choices=DTYPES, help=text)
    text = "largest relative error of an operation (default: by dtype)"
    add_value(sub, "--bound", float, "X", text)
    config_flags(sub, example="e.g. attention=sdpa")
    add_switch(sub, "--json", "print every error as JSON")


def compare(args: argparse.Namespace) -> int:
    """Run ``minivllm compare-hf`` and return its exit code: 0 if every operation is within its bound, else 5.
    ConfigError for a wrong ``--max-tokens`` or ``--bound``."""
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens}: expected at least 1")
    if args.bound is not None and not 0 < args.bound < float("inf"):
        raise ConfigError(f"--bound {args.bound:g}: expected a positive number")
    prompts = [*args.prompt, *map(_ids, args.ids)]
    show_warnings()
    comparisons = []
    within = True
    for loaded in _configurations(args):
        from minivllm import LLM
        from minivllm.lab.compare_hf.compare import compare as compare_model

        with LLM(config=loaded) as llm:
            comparison = compare_model(llm, prompts, args.max_tokens, args.bound)
        within &= comparison.found.within
        comparisons.append(comparison.as_dict())
        if not args.json:
            print(comparison.text(), flush=True)
    if args.json:
        print(json.dumps({"within": within, "comparisons": comparisons}))
    return 0 if within else APART


def _configurations(args: argparse.Namespace) -> Iterator[Loaded]:
    """Yield a configuration for each ``--dtype``.

    Without the flag yield one, with the dtype of the configuration, or float32 if the configuration sets none.
    """
    flags = {"model": args.model, **target_flags(args)}
    first = read_config(args.config, args.set, flags)
    print_notes(first.notes)
    if not args.dtype and "dtype" in first.engine.model_fields_set:
        yield first
        return
    for dtype in dict.fromkeys(args.dtype or DTYPES[:1]):
        yield read_config(args.config, args.set, {**flags, "dtype": dtype})


def _ids(text: str) -> list[int]:
    """Return the token ids of an ``--ids`` argument.  ConfigError if one is not a whole number."""
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ids {brief(text)}: expected whole numbers with commas between them") from None
