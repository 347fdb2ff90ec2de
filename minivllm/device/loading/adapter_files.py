"""The folder of an adapter, as PEFT writes it: adapter_config.json and adapter_model.safetensors.  No torch.

``adapter_config.json`` has a field for each of PEFT's methods.  A field that would change the result and is not
implemented is refused by its name.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.core.interfaces.adapters import AdapterFiles
from minivllm.errors import RequestError, brief, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
MOST_PATTERNS, MOST_PATTERN = 4096, 256  # patterns of a folder, and characters of one of them
MOST_REPEATS = 3  # the most repetitions (* and +) in a pattern
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_type", "init_lora_weights"}
# fields that do not change the result of the weights in the file
HARMLESS = {
    "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
# values of init_lora_weights with which the base weights stay as they are
PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
HINTS = {
    "use_dora": "merge the adapter into the weights",
    "modules_to_save": "merge the adapter into the weights",
    "lora_bias": "train it with lora_bias=false",
    "trainable_token_indices": "merge the adapter into the weights",
    "target_parameters": "experts are not adapted: train it on linear layers",
    "layer_replication": "merge the adapter into the weights",
}


@dataclass(frozen=True)
class AdapterSettings:
    """The fields of adapter_config.json that determine ranks and scales."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]  # pattern of module names -> rank
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the base model."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's product with A and B."""
        rank, alpha = self.rank_of(module), _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT chooses it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def check_adapter(folder: str, max_rank: int) -> AdapterFiles:
    """Check the folder of an adapter without reading its weights.

    Raise a RequestError for an adapter that cannot run.
    """
    path = Path(folder)
    if not path.is_dir():
        raise _refusal(path, "no such folder; expected one with adapter_config.json and adapter_model.safetensors")
    read_settings(path, max_rank)
    if not files.is_there(path / WEIGHTS):
        pickled = next((name for name in PICKLED if files.is_there(path / name)), None)
        found = f"only {pickled}, a pickle, which is never opened; " if pickled else ""
        raise _refusal(path, f"no {WEIGHTS}: {found}save the adapter with safe_serialization=True")
    files.check(path / WEIGHTS, error=RequestError)
    return AdapterFiles(str(path), stamp_of(path))


def stamp_of(folder: Path) -> str:
    """Return a digest of the place of an adapter, and of the sizes and times of its files."""
    sha = hashlib.sha256(os.fsencode(os.path.realpath(folder)))
    for name in (CONFIG, WEIGHTS):
        try:
            state = os.stat(folder / name)
        except OSError as e:
            raise _refusal(folder, f"{name} cannot be read: {e.strerror}") from None
        sha.update(f" {state.st_size} {state.st_mtime_ns} {state.st_ino}".encode())
    return sha.hexdigest()[:32]


def read_settings(folder: Path, max_rank: int) -> AdapterSettings:
    """Read adapter_config.json.  RequestError for a method or a value that is not implemented."""
    if not files.is_there(folder / CONFIG):
        raise _refusal(folder, f"no {CONFIG}; expected the folder that PEFT's save_pretrained wrote")
    config = files.read_json(folder / CONFIG, files.SMALL, RequestError)
    if not isinstance(config, dict):
        raise _refusal(folder, f"{CONFIG} is not an object")
    if config.get("peft_type") != "LORA":
        raise _refusal(folder, f"peft_type={shown(config.get('peft_type'))}: expected 'LORA'")
    init = config.get("init_lora_weights", True)
    if not any(init is value or init == value for value in PLAIN_INIT):
        raise _refusal(folder, f"init_lora_weights={shown(init)} changes the base weights: convert it to a plain LoRA")
    _refuse_other(folder, config)
    rank = _number(folder, "r", config.get("r"), whole=True)
    alpha = _number(folder, "lora_alpha", config.get("lora_alpha"))
    ranks = _patterns(folder, "rank_pattern", config.get("rank_pattern"), whole=True)
    alphas = _patterns(folder, "alpha_pattern", config.get("alpha_pattern"))
    largest = max(rank, *ranks.values()) if ranks else rank
    if largest > max_rank:
        raise _refusal(folder, f"its rank is {largest}; expected at most max_lora_rank={max_rank}")
    return AdapterSettings(int(rank), alpha, bool(config.get("use_rslora")), ranks, alphas)


def _refuse_other(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise RequestError for a field with a value that has an effect and is not implemented."""
    bias = config.get("bias", "none")
    if bias not in (None, "none"):
        raise _refusal(folder, f"bias={shown(bias)} is not implemented: train it with bias='none'")
    for name, value in config.items():
        if not value or name in READ or name in HARMLESS or name == "bias":
            continue
        hint = HINTS.get(name, "train a plain LoRA, or merge the adapter into the weights")
        raise _refusal(folder, f"{brief(name, 80)}={shown(value)} is not implemented: {hint}")


def _number(folder: Path, name: str, value: Any, whole: bool = False) -> float:
    """Return a positive number of adapter_config.json.  RequestError for another value."""
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not 0 < value < math.inf:
        what = "a whole number of at least 1" if whole else "a positive number"
        raise _refusal(folder, f"{name}={shown(value)}: expected {what}")
    return value


def _patterns(folder: Path, name: str, values: Any, whole: bool = False) -> dict[str, Any]:
    """Return the numbers of a field by pattern.  RequestError for a malformed field."""
    if not values:
        return {}
    if not isinstance(values, dict) or len(values) > MOST_PATTERNS:
        raise _refusal(folder, f"{name}: expected at most {MOST_PATTERNS} numbers by pattern")
    for pattern, value in values.items():
        _number(folder, f"{name}[{shown(pattern)}]", value, whole)
        try:
            fine = len(pattern) <= MOST_PATTERN and re.compile(pattern) is not None
        except re.error:
            fine = False
        # such a pattern may take as long as 2 to the power of the length of a name
        repeats = re.findall(r"(?<!\\)[*+]", pattern)
        if not fine or len(repeats) > MOST_REPEATS or re.search(r"\)[*+{]|\{", pattern):
            what = f"a regular expression of at most {MOST_PATTERN} characters and {MOST_REPEATS} times * or +, without"
            what += " repeated groups and {}"
            raise _refusal(folder, f"{name}: the pattern {shown(pattern)}: expected {what}")
    return values


def _refusal(folder: Path, what: str) -> RequestError:
    return RequestError(f"adapter {shown(str(folder))}: {what}", "lora_request")
