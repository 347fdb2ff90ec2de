"""``minivllm models``: the models on this machine, their formats and sizes, and whether they fit into its memory."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.cli.common import add_switch, add_value
from minivllm.errors import ConfigError, shown

GIB = 1 << 30
USED = 0.9  # default of the option gpu_memory_utilization: share of a device's memory for weights and the KV cache
LEAST_TOKENS = 2048  # tokens for which the KV cache should have room, at least
KV_BYTES = 2  # bytes of an element of the KV cache
PACKAGED = {"pocket": "model", "pocket-draft": "draft"}
WEIGHTS = {"safetensors": "*.safetensors", "pt": "pytorch_model*.bin", "gguf": "*.gguf"}
DEPTH = 3  # number of levels of subfolders in which models are searched
MOST = 1000  # most models that are listed


@dataclass
class LocalModel:
    """A model on this machine.  ``kv_token`` is the size of a token's keys and values in bytes, 0 if it is unknown."""

    name: str
    where: str
    type: str
    format: str
    bytes: int
    kv_token: int
    complete: bool


def add_commands(command: Any) -> None:
    """Add the command ``models``; ``command(name, ...)`` makes its parser."""
    text = "List the models on this machine: packaged, in the cache of the Hugging Face hub, and in folders."
    sub = command("models", "cli.models:models", text)
    sub.add_argument("folders", nargs="*", metavar="FOLDER", help="folders in which models are searched, too")
    add_value(sub, "--download-dir", str, "DIR", "the cache of the hub (default HF_HUB_CACHE, or HF_HOME)")
    add_switch(sub, "--json", "print a JSON list")


def models(args: argparse.Namespace) -> int:
    """Run ``minivllm models``, which lists the models on this machine and whether they fit into the device's memory;
    return its exit code."""
    found = list(local_models(args.folders, args.download_dir))[:MOST]
    memory, what = memory_of_device()
    rows = [{**asdict(model), "fits": fits(model, memory)} for model in found]
    if args.json:
        print(json.dumps({"memory": memory, "device": what, "models": rows}, indent=1))
        return 0
    print(f"{what}: {memory / GIB:.1f} GiB for weights and KV cache")
    cells = [("model", "type", "format", "size", "fits")]
    for model in found:
        cells.append((model.name, model.type, model.format, size_of(model.bytes), fits(model, memory)))
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    for row in cells:
        line = "  ".join(f"{text:{width}}" for text, width in zip(row[:4], widths, strict=True))
        print(f"{line}  {row[4]}")
    return 0


def memory_of_device() -> tuple[int, str]:
    """Return the bytes that an engine may use on this machine's device, and the device's name."""
    from minivllm.device.hardware import find_device, free_ram

    device = find_device("auto")
    if device.kind == "cpu":
        return free_ram(), "CPU, free memory"
    return int(USED * device.memory), f"{device.name}, {USED:.0%} of its memory"


def fits(model: LocalModel, memory: int) -> str:
    """Return whether a model fits into ``memory`` bytes, and why, as a text."""
    if not model.complete:
        return "no: files of its weights are missing; load it once with a network"
    room = memory - model.bytes
    if room < 0:
        return f"no: its weights need {size_of(-room)} more"
    if not model.kv_token:
        return f"yes: {size_of(room)} remain for the KV cache"
    tokens = room // model.kv_token
    if tokens < LEAST_TOKENS:
        return f"hardly: {size_of(room)} remain, the KV cache of {tokens:,} tokens"
    return f"yes: {size_of(room)} remain, the KV cache of {tokens:,} tokens"


def size_of(count: int) -> str:
    """Return a number of bytes as a text in MiB or GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"


def local_models(folders: list[str], download_dir: str | None) -> Iterator[LocalModel]:
    """Yield the models on this machine: the packaged ones, those in the hub's cache, and those in folders.

    ConfigError for a missing folder.
    """
    import minivllm

    package = Path(minivllm.__file__).parent / "pocket"
    for name, folder in PACKAGED.items():
        yield from _model(name, package / folder)
    yield from _cached(hub_cache(download_dir))
    for given in folders:
        if not os.path.isdir(given):
            raise ConfigError(f"{shown(given)}: no such folder; expected folders with models")
        yield from _below(Path(given), DEPTH)


def hub_cache(download_dir: str | None) -> Path:
    """Return the cache folder of the Hugging Face hub, which is ``download_dir`` if that is set."""
    if download_dir is not None:
        return files.expanded(download_dir)
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def _cached(cache: Path) -> Iterator[LocalModel]:
    """Yield the models in the hub's cache, each in its newest snapshot."""
    for folder in (path for path in files.listed(cache) if path.match("models--*--*")):
        snapshots = [path for path in files.listed(folder / "snapshots") if os.path.isdir(path)]
        if snapshots:
            name = folder.name.removeprefix("models--").replace("--", "/")
            yield from _model(name, max(snapshots, key=os.path.getmtime))


def _below(folder: Path, depth: int) -> Iterator[LocalModel]:
    """Yield the models in a folder (GGUF files, and the folder itself if it has a config.json), or else in its
    subfolders, ``depth`` levels deep."""
    for path in (path for path in files.listed(folder) if path.suffix == ".gguf" and os.path.isfile(path)):
        yield LocalModel(str(path), str(path), "-", "gguf", path.stat().st_size, 0, True)
    if os.path.isfile(folder / "config.json"):
        yield from _model(str(folder), folder)
    elif depth:
        for inner in (path for path in files.listed(folder) if os.path.isdir(path) and not path.name.startswith(".")):
            yield from _below(inner, depth - 1)


def _model(name: str, folder: Path) -> Iterator[LocalModel]:
    """Yield the model of a folder if it has a config.json, else nothing."""
    config = _json(folder / "config.json")
    if not config:
        return
    weights: list[Path] = []
    form = "no weights"
    for kind, pattern in WEIGHTS.items():
        weights = sorted(path for path in folder.glob(pattern) if os.path.exists(path))
        if weights:
            form = kind
            break
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        form += f", {quantized.get('quant_method', 'quantized')}"
    size = sum(path.stat().st_size for path in weights)
    kind = str(config.get("model_type", "-"))
    yield LocalModel(name, str(folder), kind, form, size, _kv_token(config), _complete(folder, weights))


def _complete(folder: Path, weights: list[Path]) -> bool:
    """Return whether all weight files of a model are there, by the index file if there is one."""
    shards = _json(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(shards, dict):
        return bool(weights)
    return {str(name) for name in shards.values()} <= {path.name for path in weights}


def _kv_token(config: Mapping[str, Any]) -> int:
    """Return the bytes of a token's keys and values in all layers, 0 if the configuration lacks a size."""
    text = config.get("text_config")
    about = text if isinstance(text, dict) else config
    layers, heads = about.get("num_hidden_layers"), about.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
        return 0
    kv_heads = about.get("num_key_value_heads") or heads
    width = about.get("head_dim") or about.get("hidden_size", 0) // heads
    return 2 * layers * kv_heads * width * KV_BYTES


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
