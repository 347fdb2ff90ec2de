"""``minivllm serve``: its flags, and the start of the server.

Parsing the flags imports no large package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from minivllm.cli.common import (
    add_quiet,
    check_one_model,
    find_modules,
    json_table,
    read_config,
    show_warnings,
    target_flags,
)
from minivllm.cli.vllm_flags import translate
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config import Loaded

NEEDS = ("fastapi", "uvicorn", "prometheus_client")
# (name, type, help) of flags; each sets the option of the same name, in [server] or of the engine
SERVER = (
    ("host", str, "address to listen on (default 127.0.0.1; 0.0.0.0: all networks)"),
    ("port", int, "default 8000"),
    ("uds", str, "path of a Unix socket to listen on, instead of a port"),
    ("ssl_certfile", str, "serve https with this certificate (PEM)"),
    ("ssl_keyfile", str, "the key of the certificate (PEM), if it is in a file of its own"),
    ("ssl_ca_certs", str, "the authority that signs certificates of clients (PEM)"),
    ("ssl_cert_reqs", int, "certificates of clients: 0 not requested (default), 1 optional, 2 required"),
    ("ssl_ciphers", str, "ciphers of TLS 1.2, as OpenSSL writes them"),
    ("root_path", str, "the path prefix that a proxy gives the server"),
    ("api_key_file", str, "a file with one API key a line"),
    ("lora_dir", str, "a folder within which operators may load adapters; with --admin and --enable-lora"),
    ("weights_dir", str, "a folder within which operators name folders of new weights; with --admin"),
    ("steering_dir", str, "a folder of vectors NAME.npy that taps of operators may add; with --admin"),
    ("responses_dir", str, "a folder in which responses are stored (default: in memory)"),
    (
        "tool_parser",
        str,
        "format of reasoning and tool calls: auto (default), or one of `minivllm plugins parser`; "
        "also --tool-call-parser",
    ),
    ("reasoning_parser", str, "format of the reasoning, if that of --tool-parser has none"),
    ("log_format", str, "auto (default: text on a terminal, else json), json or text"),
    ("log_level", str, "debug, info (default) or warning"),
    ("max_queue", int, "prompts of an API key that may wait; more get status 429 (default 256)"),
    ("stats_interval", float, "seconds between log lines about throughput; 0: none (default 10)"),
    ("restart", int, "how often an engine that ended is started again (default 0)"),
    ("replicas", int, "engines, each in a process with a KV cache of its own (default 1)"),
    ("router", str, "plug-in that chooses the replica of a request; `minivllm plugins router` lists them"),
    ("cluster", str, "local (default), or ray: the replicas are deployments of Ray Serve"),
    ("ray_address", str, "Ray cluster to join, host:port or auto (default: start one on this machine)"),
    ("drain_timeout", float, "seconds that running requests get after SIGTERM (default 30)"),
)
ENGINE = (
    ("max_model_len", int, "most tokens of a prompt and its answer"),
    ("max_num_seqs", int, "most sequences that run at once"),
    ("max_num_batched_tokens", int, "most tokens of a step"), ("dtype", str, "auto, float32, bfloat16 or float16"),
    ("device", str, "auto, cpu or cuda"), ("gpu_memory_utilization", float, "share of the device's memory to use"),
    ("tensor_parallel_size", int, "processes that share the model"), ("seed", int, "seed of requests that have none"),
    ("revision", str, "branch, tag or commit of a model that is a Hugging Face id (default main)"),
    ("tokenizer", str, "directory or Hugging Face id of the tokenizer (default: the model's)"),
    ("tokenizer_mode", str, "plug-in that reads the tokenizer's files; `minivllm plugins tokenizer` lists them"),
    ("tokenizer_revision", str, "branch, tag or commit of a tokenizer that is a Hugging Face id"),
    ("download_dir", str, "the cache of models that are Hugging Face ids (default HF_HUB_CACHE, or HF_HOME)"),
    ("chat_template", str, "a file with a Jinja template for chats, or its text, in place of the model's own"),
    ("generation_config", str, "sampling defaults: auto (the model's generation_config.json), none, or another path"),
    ("load_format", str, "auto, safetensors, pt (files of torch.save), or dummy: random weights"),
    ("quantization", str, "quantizer; `minivllm plugins quantizer` lists them"),
    ("kv_cache_dtype", str, "auto, bfloat16, float16, float32, or one of `minivllm plugins kvformat`"),
    ("kvcache_block_size", int, "tokens of a KV block; also --block-size"),
    ("num_kvcache_blocks", int, "KV blocks, instead of as many as fit; also --num-gpu-blocks-override"),
    ("max_logprobs", int, "most log-probabilities of a token that a request may have (default 20)"),
    ("logprobs_mode", str, "raw_logprobs or processed_logprobs"),
    ("max_loras", int, "adapters on the device at the same time (default 8)"),
    ("max_lora_rank", int, "largest rank of an adapter (default 16)"),
    ("max_cpu_loras", int, "adapters in host memory (default: four times max_loras)"),
    ("model_impl", str, "code that runs the model: auto, minivllm or transformers"),
    ("scheduler", str, "policy; `minivllm plugins scheduler` lists them; also --scheduling-policy"),
)  # fmt: skip
SWITCHES = (
    ("enable_lora", "serve adapters (LoRA)"),
    ("enable_prefix_caching", "share the KV blocks of equal prefixes (default)"),
    ("enforce_eager", "run no captured graphs"),
    ("skip_tokenizer_init", "load no tokenizer: requests and answers are token ids"),
)
ALSO = {  # flag -> other names of it, from vLLM
    "tool_parser": ["--tool-call-parser"],
    "kvcache_block_size": ["--block-size"],
    "num_kvcache_blocks": ["--num-gpu-blocks-override"],
    "scheduler": ["--scheduling-policy"],
    "quantization": ["-q"],
    "tensor_parallel_size": ["-tp"],
}
KV_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# names in generation_config.json that differ from the names of sampling parameters here
GENERATION = {"max_new_tokens": "max_tokens"}


def add_commands(command: Any, wiring: argparse.ArgumentParser) -> None:
    """Add the command ``serve``.

    ``command(name, ...)`` makes the parser of a command; ``wiring`` has flags for it.
    """
    sub = command("serve", "cli.serve:serve", "Serve a model over HTTP with OpenAI's API.", wiring)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    _add_flags(sub, SERVER)
    add_engine_flags(sub)
    add_quiet(sub)
    text = "offer the routes of operators, and taps"
    sub.add_argument("--admin", action="store_true", default=None, help=text)
    text = "serve the page with a chat and the live engine at /, and the page of the API at /docs (default)"
    sub.add_argument("--page", action=argparse.BooleanOptionalAction, help=text)
    text = "adapters (LoRA) to serve, with --enable-lora; requests send the name as model; a JSON object also works"
    sub.add_argument("--lora-modules", nargs="+", metavar="NAME=FOLDER", help=text)
    text = "names of the model in requests"
    sub.add_argument("--served-model-name", nargs="+", metavar="NAME", help=text)
    text = "web pages whose scripts may use the server (CORS); or a JSON list"
    sub.add_argument("--allowed-origins", nargs="+", metavar="URL", help=text)
    text = "host names of the server besides localhost; *.NAME: all names below it, *: all names"
    sub.add_argument("--allowed-hosts", nargs="+", metavar="NAME", help=text)
    text = "an API key; repeat the flag for more; MINIVLLM_API_KEY does the same and is not visible in ps"
    sub.add_argument("--api-key", action="append", metavar="KEY", help=text)
    text = "module:attribute of an ASGI middleware class or an async function(request, call_next); repeatable"
    sub.add_argument("--middleware", action="append", metavar="NAME", help=text)
    text = "with --cluster ray: write the configuration for `serve run` to a file in YAML, and end"
    sub.add_argument("--write-ray-config", metavar="FILE", help=text)
    notes: list[str] = []
    sub.set_defaults(notes=notes)
    flags_of = [action.option_strings for action in sub._actions]
    known = [flag for flags in flags_of for flag in flags if flag[:2] == "--"]
    sub.read = lambda argv: translate(argv, known, notes.append)


def _add_flags(sub: argparse.ArgumentParser, flags: Iterable[tuple[str, Any, str]]) -> None:
    """Add the flags of the table ``SERVER`` or ``ENGINE`` to a parser."""
    for name, kind, text in flags:
        names = (f"--{name.replace('_', '-')}", *ALSO.get(name, ()))
        metavar = name.split("_")[-1].upper()
        sub.add_argument(*names, dest=name, type=kind, metavar=metavar, help=text)


def add_engine_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of the table ``ENGINE``, for ``serve`` and ``run-batch``."""
    _add_flags(sub, ENGINE)
    for name, text in SWITCHES:
        flag = f"--{name.replace('_', '-')}"
        sub.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
    text = """sampling parameters for requests that have none: '{"temperature": 0.5}'"""
    sub.add_argument("--override-generation-config", metavar="JSON", help=text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that flags of the command line set."""
    flags = _used(args, [name for name, *_ in (*ENGINE, *SWITCHES)])
    if "kv_cache_dtype" in flags:
        flags["kv_cache_dtype"] = KV_DTYPES.get(flags["kv_cache_dtype"], flags["kv_cache_dtype"])
    if args.override_generation_config is not None:
        flags["sampling"] = generation(args.override_generation_config)
    if args.hf_overrides is not None:
        flags["hf_overrides"] = json_table("--hf-overrides", args.hf_overrides)
    if args.model is not None:
        flags["model"] = args.model
    return flags | target_flags(args)


def check_packages(command: str) -> None:
    """Raise ConfigError if packages that the server needs are not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{command} needs {', '.join(missing)}. Do: pip install 'minivllm[serve]'")


def load(args: argparse.Namespace) -> Loaded:
    """Return the configuration of the server, with the flags laid over the files."""
    check_one_model(args)
    server = _used(args, [name for name, _, _ in SERVER] + ["admin", "page", "served_model_name", "allowed_hosts"])
    flags = engine_options(args)
    if "max_logprobs" in flags:  # the server has an option of this name too, and checks the limit itself
        server["max_logprobs"] = flags["max_logprobs"]
    if args.lora_modules is not None:
        server["lora_modules"] = [_module(value) for value in args.lora_modules]
    if args.allowed_origins is not None:
        server["allowed_origins"] = _origins(args.allowed_origins)
    if server:
        flags["server"] = server
    loaded = read_config(args.config, args.set, flags)
    show_warnings()
    return loaded


def _used(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Return the values of the flags among ``names`` that the user gave, by name."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def generation(text: str) -> dict[str, Any]:
    """Return sampling parameters from a JSON object with the names of generation_config.json.

    ConfigError for a wrong object.
    """
    flag = f"--override-generation-config {text[:80]}"
    found = json_table("--override-generation-config", text)
    params = {str(GENERATION.get(name, name)): value for name, value in found.items()}
    if len(params) < len(found):
        raise ConfigError(f"{flag}: max_new_tokens is max_tokens; expected only one of them")
    do_sample = params.pop("do_sample", True)
    if do_sample is True:
        return params
    if do_sample is not False or params.get("temperature", 0) != 0:
        raise ConfigError(f"{flag}: do_sample must be true, or false without a temperature")
    params["temperature"] = 0
    return params


def _origins(values: list[str]) -> list[str]:
    """Return the URLs of ``--allowed-origins``, written as ``A B`` or, as in vLLM, as ``'["A", "B"]'``.  ConfigError if
    the JSON is malformed."""
    if len(values) != 1 or not values[0].startswith("["):
        return values
    try:
        return json.loads(values[0])
    except (ValueError, RecursionError) as exc:
        text = values[0][:80]
        raise ConfigError(f"--allowed-origins {text}: expected URLs, or a JSON list of them: {exc}") from None


def _module(value: str) -> str:
    """Return an adapter as NAME=FOLDER, which may also be a JSON object as in vLLM.

    ConfigError for another object.
    """
    if not value.startswith("{"):
        return value
    table = json_table("--lora-modules", value)
    if not {"name", "path"} <= table.keys() or table.keys() - {"name", "path", "base_model_name"}:
        raise ConfigError(f"--lora-modules {value[:80]}: expected name and path")
    return f"{table['name']}={table['path']}"


def serve(args: argparse.Namespace) -> int:
    """Run ``minivllm serve`` until it is stopped, and return its exit code.  ConfigError if arguments contradict each
    other."""
    check_packages("serve")
    loaded = load(args)
    if loaded.server.cluster == "ray":
        return _serve_on_ray(args, loaded)
    if args.write_ray_config is not None:
        raise ConfigError("--write-ray-config without --cluster ray: set both, or neither")
    from minivllm.server import logs
    from minivllm.server.serve import serve as run

    modules = [_module_of(name) for name in args.middleware or ()]
    find_modules(modules, ())
    logs.set_up(loaded.server.log_format, loaded.server.log_level)
    for note in (*args.notes, *loaded.notes):
        logs.event("note", sentence=note, note=note)
    return run(args, loaded, lambda: load(args))


def _serve_on_ray(args: argparse.Namespace, loaded: Loaded) -> int:
    """Start the server on a Ray cluster, or write its Ray configuration, and return the exit code.  ConfigError for
    flags that a Ray cluster cannot follow, such as ``--middleware``."""
    from minivllm.server import logs
    from minivllm.server.cluster.run import serve_on_ray, write_file
    from minivllm.server.serve import given_keys

    if args.middleware:
        raise ConfigError("--middleware together with --cluster ray: replicas load no middleware; remove it")
    if args.write_ray_config is not None:
        if args.api_key:
            raise ConfigError("--api-key together with --write-ray-config: a file has no keys; use --api-key-file")
        write_file(loaded, args.write_ray_config)
        return 0
    logs.set_up(loaded.server.log_format, loaded.server.log_level)
    return serve_on_ray(loaded, given_keys(args.api_key or (), ""), lambda: load(args))


def _module_of(name: str) -> str:
    """Return the module of a middleware, which is written ``module:attribute`` or ``module.attribute``."""
    return name.partition(":")[0] if ":" in name else name.rpartition(".")[0]
