"""``minivllm compare-hf``: a model's operations beside those of transformers.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import read_config, show_warnings
from minivllm.errors import ConfigError, brief

if TYPE_CHECKING:
    from minivllm.config import Loaded

APART = 5  # exit code: something is beyond the bound
DTYPES = ("float32", "bfloat16", "float16")


def add_commands(command: Any) -> None:
    """Add ``compare-hf``.  ``command`` is that of ``minivllm.cli``."""
    text = "Compare each operation of a model with that of transformers; exit code 5 where they part."
    sub = command("compare-hf", "cli.compare_hf:compare", text)
    sub.add_argument("model", help="a directory, a Hugging Face id, or pocket")
    sub.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; again for several")
    sub.add_argument("--ids", action="append", default=[], metavar="N,N,...", help="the same as token ids")
    sub.add_argument("--max-tokens", type=int, default=8, metavar="N", help="greedy tokens of each prompt (default 8)")
    sub.add_argument("--dtype", action="append", default=[], choices=DTYPES, help="default float32; again for several")
    sub.add_argument("--bound", type=float, default=None, metavar="X", help="of an operation's relative error")
    sub.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML, YAML or JSON; later ones win")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. attention=sdpa")
    sub.add_argument("--allow-target", action="append", default=[], metavar="MODULE", help="may be named module:Class")
    sub.add_argument("--json", action="store_true", help="print every error as JSON")


def compare(args: argparse.Namespace) -> int:
    """0 if every operation is within its bound, 5 if not."""
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {args.max_tokens}: want at least 1")
    if args.bound is not None and not 0 < args.bound < float("inf"):
        raise ConfigError(f"--bound {args.bound:g}: want a positive number")
    prompts = [*args.prompt, *map(_ids, args.ids)]
    show_warnings()
    told, within = [], True
    for loaded in _configurations(args):
        from minivllm import LLM
        from minivllm.lab.compare_hf.compare import compare as compare_one

        with LLM(config=loaded) as llm:
            found = compare_one(llm, prompts, args.max_tokens, args.bound)
        within &= found.found.within
        told.append(found.as_dict())
        if not args.json:
            print(found.text(), flush=True)
    if args.json:
        print(json.dumps({"within": within, "comparisons": told}))
    return 0 if within else APART


def _configurations(args: argparse.Namespace) -> Iterator[Loaded]:
    """One for each dtype; without ``--dtype`` that of the configuration, or float32 where it names none."""
    flags = {"model": args.model, **({"allow_targets": args.allow_target} if args.allow_target else {})}
    first = read_config(args.config, args.set, flags)
    for note in first.notes:
        print(f"minivllm: {note}", file=sys.stderr)
    if not args.dtype and "dtype" in first.engine.model_fields_set:
        yield first
        return
    for dtype in dict.fromkeys(args.dtype or DTYPES[:1]):
        yield read_config(args.config, args.set, {**flags, "dtype": dtype})


def _ids(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ConfigError(f"--ids {brief(text)}: want whole numbers with commas between them") from None
