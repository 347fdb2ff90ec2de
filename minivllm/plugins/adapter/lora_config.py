"""The fields of a LoRA in adapter_config.json.  No torch.

A field that would change the result and is not implemented is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.core.interfaces.adapter import adapter_refusal
from minivllm.errors import shown

from .peft_config import LAYERS, MERGE, refuse_other_fields
from .peft_targets import Targets, read_targets

MOST_PATTERNS, MOST_PATTERN = 4096, 256  # largest number of patterns in a field, and of characters in a pattern
MOST_REPEATS = 3  # largest number of the operators * and + in a pattern
# fields of adapter_config.json that are read, or that do not change the result of the stored weights
FIELDS = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
    "corda_config", "ensure_weight_tying", "eva_config", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "qalora_group_size",
    "runtime_config", *LAYERS,
}  # fmt: skip
# values of init_lora_weights with which the base weights stay as they are
PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
HINTS = {
    "use_dora": MERGE,
    "modules_to_save": MERGE,
    "lora_bias": "train it with lora_bias=false",
    "trainable_token_indices": MERGE,
    "target_parameters": "experts are not adapted: train it on linear layers",
    "layer_replication": MERGE,
}
LEAST_RANK = 16  # the least rank in memory, since tensor cores multiply 16 columns at a time
HINT = f"train a plain LoRA, or {MERGE}"


def padded_rank(rank: int) -> int:
    """Return the rank of the matrices in memory for adapters of at most this rank."""
    return -(-rank // LEAST_RANK) * LEAST_RANK


@dataclass(frozen=True)
class LoraSettings:
    """The fields of adapter_config.json that determine modules, ranks and scales."""

    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]  # pattern of module names -> rank
    alphas: Mapping[str, float]
    targets: Targets

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the base model."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the scale of a module, by which its product with A and B is multiplied."""
        rank = self.rank_of(module)
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT chooses it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def read_settings(folder: str, config: Mapping[str, Any], max_rank: int) -> LoraSettings:
    """Read the fields of adapter_config.json.  RequestError for a value that is not implemented."""
    init = config.get("init_lora_weights", True)
    if not any(init is value or init == value for value in PLAIN_INIT):
        raise adapter_refusal(
            folder, f"init_lora_weights={shown(init)} changes the base weights: convert it to a plain LoRA"
        )
    bias = config.get("bias", "none")
    if bias not in (None, "none"):
        raise adapter_refusal(folder, f"bias={shown(bias)} is not implemented: train it with bias='none'")
    refuse_other_fields(folder, config, FIELDS, HINTS, HINT)
    rank = _number(folder, "r", config.get("r"), whole=True)
    alpha = _number(folder, "lora_alpha", config.get("lora_alpha"))
    ranks = _patterns(folder, "rank_pattern", config.get("rank_pattern"), whole=True)
    alphas = _patterns(folder, "alpha_pattern", config.get("alpha_pattern"))
    largest = max(rank, *ranks.values()) if ranks else rank
    if largest > max_rank:
        raise adapter_refusal(folder, f"its rank is {largest}; expected at most max_lora_rank={max_rank}")
    rslora = bool(config.get("use_rslora"))
    targets = read_targets(folder, config)
    return LoraSettings(int(rank), alpha, rslora, ranks, alphas, targets)


def _number(folder: str, name: str, value: Any, whole: bool = False) -> float:
    """Return a number of adapter_config.json if it is positive and finite, and with ``whole`` an integer.

    RequestError for another value.
    """
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not 0 < value < math.inf:
        what = "a whole number of at least 1" if whole else "a positive number"
        raise adapter_refusal(folder, f"{name}={shown(value)}: expected {what}")
    return value


def _patterns(folder: str, name: str, values: Any, whole: bool = False) -> dict[str, Any]:
    """Return the numbers of a field that has a number for each pattern of module names.

    RequestError for a pattern that is no simple regular expression, or for a number that is not positive, or with
    ``whole`` no integer.
    """
    if not values:
        return {}
    if not isinstance(values, dict) or len(values) > MOST_PATTERNS:
        raise adapter_refusal(folder, f"{name}: expected at most {MOST_PATTERNS} numbers by pattern")
    for pattern, value in values.items():
        _number(folder, f"{name}[{shown(pattern)}]", value, whole)
        try:
            fine = len(pattern) <= MOST_PATTERN and re.compile(pattern) is not None
        except re.error:
            fine = False
        # with more repetitions, matching may take a time of 2 to the power of the length of a name
        repeats = re.findall(r"(?<!\\)[*+]", pattern)
        if not fine or len(repeats) > MOST_REPEATS or re.search(r"\)[*+{]|\{", pattern):
            what = f"a regular expression of at most {MOST_PATTERN} characters and {MOST_REPEATS} times * or +, without"
            what += " repeated groups and {}"
            raise adapter_refusal(folder, f"{name}: the pattern {shown(pattern)}: expected {what}")
    return values
