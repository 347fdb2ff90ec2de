"""``minivllm serve``: its flags.  Parsing them imports nothing heavy."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import find_modules, json_table, read_config, show_warnings
from minivllm.cli.vllm_flags import translate
from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
# flag, type, help; each is an option of [server] or of the engine by the same name
SERVER = (
    ("host", str, "address to listen on (default 127.0.0.1; 0.0.0.0: every network)"),
    ("port", int, "default 8000"),
    ("uds", str, "path of a Unix socket to listen on, instead of a port"),
    ("ssl_certfile", str, "serve https with this certificate (PEM)"),
    ("ssl_keyfile", str, "the key of the certificate (PEM), if it is in a file of its own"),
    ("ssl_ca_certs", str, "who signs the certificates of clients (PEM)"),
    ("ssl_cert_reqs", int, "certificates of clients: 0 none (default), 1 if there is one, 2 required"),
    ("ssl_ciphers", str, "ciphers of TLS 1.2, as OpenSSL writes them"),
    ("root_path", str, "the path under which a proxy shows the server"),
    ("api_key_file", str, "a file with one key a line"),
    ("steering_dir", str, "a folder of vectors NAME.npy that operators' taps may add; with --admin"),
    ("tool_parser", str, "how the model writes calls of tools: hermes (default) or json; also --tool-call-parser"),
    ("log_format", str, "auto (default: text on a terminal, else json), json or text"),
    ("log_level", str, "debug, info (default) or warning"),
    ("max_queue", int, "prompts of a key that may wait; more: 429 (default 256)"),
    ("stats_interval", float, "seconds between lines of the log about throughput; 0: none (default 10)"),
    ("restart", int, "times that an engine which has ended is started again (default 0)"),
    ("drain_timeout", float, "seconds for running requests after SIGTERM (default 30)"),
)
ENGINE = (
    ("max_model_len", int, "tokens of a prompt and its answer"), ("max_num_seqs", int, "sequences that run at once"),
    ("max_num_batched_tokens", int, "tokens of a step"), ("dtype", str, "auto, float32, bfloat16 or float16"),
    ("device", str, "auto, cpu or cuda"), ("gpu_memory_utilization", float, "share of the device's memory"),
    ("tensor_parallel_size", int, "processes that share the model"), ("seed", int, "of requests that bring none"),
    ("revision", str, "of a model that is a Hugging Face id: a branch, a tag or a commit (default main)"),
    ("tokenizer", str, "where the tokenizer is, if not with the model: a directory or a Hugging Face id"),
    ("tokenizer_revision", str, "of a tokenizer that is a Hugging Face id"),
    ("download_dir", str, "the cache of models that are Hugging Face ids (default HF_HUB_CACHE, or HF_HOME)"),
    ("chat_template", str, "a file with a Jinja template for chats, or its text, in place of the model's own"),
    ("generation_config", str, "sampling defaults: auto (the model's generation_config.json), none, or another path"),
    ("load_format", str, "auto, safetensors, pt (files of torch.save), or dummy: random weights"),
    ("quantization", str, "which quantizer: minivllm plugins quantizer"),
    ("kv_cache_dtype", str, "auto, bfloat16, float16 or float32, or a plug-in: minivllm plugins kvformat"),
    ("kvcache_block_size", int, "tokens of a KV block; also --block-size"),
    ("num_kvcache_blocks", int, "KV blocks, instead of as many as fit; also --num-gpu-blocks-override"),
    ("max_logprobs", int, "log-probabilities a token that a request may ask for (default 20)"),
    ("logprobs_mode", str, "raw_logprobs or processed_logprobs"),
    ("model_impl", str, "auto, minivllm or transformers: whose code runs the model"),
    ("scheduler", str, "which policy: minivllm plugins scheduler; also --scheduling-policy"),
)  # fmt: skip
SWITCHES = (
    ("enable_prefix_caching", "share the KV blocks of equal prefixes (default)"),
    ("enforce_eager", "never run captured graphs"),
    ("skip_tokenizer_init", "token ids in, token ids out"),
)
ALSO = {  # vLLM's names for the same
    "tool_parser": ["--tool-call-parser"],
    "kvcache_block_size": ["--block-size"],
    "num_kvcache_blocks": ["--num-gpu-blocks-override"],
    "scheduler": ["--scheduling-policy"],
    "quantization": ["-q"],
    "tensor_parallel_size": ["-tp"],
}
KV_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
GENERATION = {"max_new_tokens": "max_tokens"}  # names of generation_config.json that are others here


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add ``serve``.  ``command`` is that of ``minivllm.cli``."""
    sub = command("serve", "cli.serve:serve", "Serve a model over HTTP, as OpenAI's clients expect it.", wiring)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    for name, kind, text in (*SERVER, *ENGINE):
        flags = (f"--{name.replace('_', '-')}", *ALSO.get(name, ()))
        sub.add_argument(*flags, dest=name, type=kind, default=None, metavar=name.split("_")[-1].upper(), help=text)
    for name, text in SWITCHES:
        flag = f"--{name.replace('_', '-')}"
        sub.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text)
    sub.add_argument("--admin", action="store_true", default=None, help="offer operators' routes, and taps")
    sub.add_argument("--served-model-name", nargs="+", default=None, metavar="NAME", help="names for requests")
    sub.add_argument(
        "--allowed-origins", nargs="+", default=None, metavar="URL", help="web pages that may ask; or a JSON list"
    )
    hosts = "names that the server is asked for by, beside localhost; *.NAME: all below it, *: all"
    sub.add_argument("--allowed-hosts", nargs="+", default=None, metavar="NAME", help=hosts)
    text = """sampling parameters where a request has none: '{"temperature": 0.5}'"""
    sub.add_argument("--override-generation-config", metavar="JSON", default=None, help=text)
    sub.add_argument(
        "--api-key",
        action="append",
        default=None,
        metavar="KEY",
        help="a key that requests must have; again for more; MINIVLLM_API_KEY does the same and is not seen in ps",
    )
    text = "module:attribute of an ASGI middleware class, or an async function(request, call_next); again for more"
    sub.add_argument("--middleware", action="append", default=None, metavar="NAME", help=text)
    notes: list[str] = []
    sub.set_defaults(notes=notes)
    known = [flag for action in sub._actions for flag in action.option_strings if flag[:2] == "--"]
    sub.read = lambda argv: translate(argv, known, notes.append)


def load(args: argparse.Namespace) -> Loaded:
    """The configuration, flags laid over files."""
    if args.positional is not None and args.model is not None:
        raise ConfigError(f"MODEL {shown(args.positional)} beside --model {shown(args.model)}: want one")
    model = args.positional if args.positional is not None else args.model
    names = [name for name, _, _ in SERVER] + ["admin", "served_model_name", "allowed_hosts"]
    server = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    engine = [name for name, *_ in (*ENGINE, *SWITCHES)]
    flags: dict[str, Any] = {name: getattr(args, name) for name in engine if getattr(args, name) is not None}
    if "kv_cache_dtype" in flags:
        flags["kv_cache_dtype"] = KV_DTYPES.get(flags["kv_cache_dtype"], flags["kv_cache_dtype"])
    if "max_logprobs" in flags:  # of the engine and at the door
        server["max_logprobs"] = flags["max_logprobs"]
    if args.allowed_origins is not None:
        server["allowed_origins"] = _origins(args.allowed_origins)
    if args.override_generation_config is not None:
        flags["sampling"] = generation(args.override_generation_config)
    if args.hf_overrides is not None:
        flags["hf_overrides"] = json_table("--hf-overrides", args.hf_overrides)
    flags |= {} if model is None else {"model": model}
    flags |= {"server": server} if server else {}
    flags |= {"allow_targets": args.allow_target} if args.allow_target else {}
    loaded = read_config(args.config, args.set, flags)
    show_warnings()
    return loaded


def generation(text: str) -> dict[str, Any]:
    """Return sampling parameters from JSON with the names of generation_config.json.  ConfigError."""
    what = f"--override-generation-config {text[:80]}"
    found = json_table("--override-generation-config", text)
    made = {str(GENERATION.get(name, name)): value for name, value in found.items()}
    if len(made) < len(found):
        raise ConfigError(f"{what}: max_new_tokens is max_tokens; want one of them")
    if (draws := made.pop("do_sample", True)) is not True:
        if draws is not False or made.get("temperature", 0) != 0:
            raise ConfigError(f"{what}: do_sample is true, or false without a temperature")
        made["temperature"] = 0
    return made


def _origins(given: list[str]) -> list[str]:
    """``A B``, or vLLM's ``'["A", "B"]'``."""
    if len(given) != 1 or not given[0].startswith("["):
        return given
    try:
        return json.loads(given[0])
    except ValueError as exc:
        raise ConfigError(f"--allowed-origins {given[0][:80]}: want URLs, or a JSON list of them: {exc}") from None


def serve(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}. Do: pip install 'minivllm[serve]'")
    loaded = load(args)
    from minivllm.server import logs
    from minivllm.server.serve import serve as run

    names = args.middleware or ()
    find_modules([name.partition(":")[0] if ":" in name else name.rpartition(".")[0] for name in names], ())
    logs.set_up(loaded.server.log_format, loaded.server.log_level)
    for note in (*args.notes, *loaded.notes):
        logs.event("note", sentence=note, note=note)
    return run(args, loaded)
