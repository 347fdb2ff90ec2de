"""``minivllm serve``: its flags.  Parsing them imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
# flag, type, help; each is an option of [server] or of the engine by the same name
SERVER = (
    ("host", str, "address to listen on (default 127.0.0.1; 0.0.0.0: every network)"),
    ("port", int, "default 8000"),
    ("root_path", str, "the path under which a proxy shows the server"),
    ("api_key_file", str, "a file with one key a line"),
    ("tool_parser", str, "how the model writes calls of tools: hermes (default) or json"),
    ("log_format", str, "json (default) or text"),
    ("log_level", str, "debug, info (default) or warning"),
    ("max_queue", int, "prompts that may wait; more: 429 (default 256)"),
    ("drain_timeout", float, "seconds for running requests after SIGTERM (default 30)"),
)
ENGINE = (
    ("max_model_len", int, "tokens of a prompt and its answer"), ("max_num_seqs", int, "sequences that run at once"),
    ("max_num_batched_tokens", int, "tokens of a step"), ("dtype", str, "auto, float32, bfloat16 or float16"),
    ("device", str, "auto, cpu or cuda"), ("gpu_memory_utilization", float, "share of the device's memory"),
    ("tensor_parallel_size", int, "processes that share the model"), ("seed", int, "of requests that bring none"),
)  # fmt: skip


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add ``serve``.  ``command`` is that of ``minivllm.cli``."""
    sub = command("serve", "cli.serve:serve", "Serve a model over HTTP, as OpenAI's clients expect it.", wiring)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    for name, kind, text in (*SERVER, *ENGINE):
        sub.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, default=None, help=text)
    sub.add_argument("--enforce-eager", action="store_true", default=None, help="never run captured graphs")
    sub.add_argument("--admin", action="store_true", default=None, help="offer routes for the profiler and the cache")
    sub.add_argument("--served-model-name", nargs="+", default=None, metavar="NAME", help="names for requests")
    sub.add_argument("--allowed-origins", nargs="+", default=None, metavar="URL", help="web pages that may ask")
    hosts = "names that the server is asked for by, beside localhost; *.NAME: all below it, *: all"
    sub.add_argument("--allowed-hosts", nargs="+", default=None, metavar="NAME", help=hosts)
    sub.add_argument(
        "--api-key", action="append", default=None, metavar="KEY",
        help="a key that requests must have; again for more; MINIVLLM_API_KEY does the same and is not seen in ps",
    )  # fmt: skip


def load(args: argparse.Namespace) -> Loaded:
    """The configuration, flags laid over files."""
    from minivllm.cli.commands import show_warnings
    from minivllm.config import load_config

    if args.positional is not None and args.model is not None:
        raise ConfigError(f"MODEL {shown(args.positional)} beside --model {shown(args.model)}: want one")
    model = args.positional if args.positional is not None else args.model
    names = [name for name, _, _ in SERVER] + ["admin", "served_model_name", "allowed_origins", "allowed_hosts"]
    server = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    engine = [name for name, _, _ in ENGINE] + ["enforce_eager"]
    flags: dict[str, Any] = {name: getattr(args, name) for name in engine if getattr(args, name) is not None}
    flags |= {} if model is None else {"model": model}
    flags |= {"server": server} if server else {}
    flags |= {"allow_targets": args.allow_target} if args.allow_target else {}
    loaded = load_config(args.config, args.set, flags=flags)
    for note in loaded.notes:
        print(f"minivllm: {note}", file=sys.stderr)
    show_warnings()
    return loaded


def serve(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}. Do: pip install 'minivllm[serve]'")
    from minivllm.server.serve import serve as run

    return run(args)
