"""The options of ``minivllm quantize``, and their limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minivllm.errors import ConfigError, shown

METHODS = ("rtn", "gptq", "awq")
BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2", "compressed-tensors")
# orders in which GPTQ rounds the inputs: as they are; the largest second moment first, with groups of adjacent inputs;
# the largest second moment first, with groups of inputs that are adjacent in this order
ORDERS = ("no", "static", "groups")
LEAST_GROUP = 8
LEAST_LENGTH = 8  # tokens of a sample
DAMPING = 0.01
SAMPLES, LENGTH = 128, 2048


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of a quantization.  Raise ConfigError for a wrong value or options that exclude each other."""

    method: str
    bits: int = 4
    group: int = 128  # inputs that share a scale; -1 means all inputs of an output
    format: str = "gptq"
    symmetric: bool = True
    act_order: str = ORDERS[0]  # for GPTQ only
    damping: float = DAMPING  # damping of GPTQ, as a share of the mean second moment; other methods ignore it
    samples: int | None = None  # number of samples for methods that read a text; None means SAMPLES
    length: int | None = None  # tokens of a sample; None means LENGTH
    skip: tuple[str, ...] = ()  # regular expressions; modules whose names begin with a match are not quantized

    def __post_init__(self) -> None:
        for name, allowed in (("method", METHODS), ("bits", BITS), ("format", FORMATS), ("act_order", ORDERS)):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(str, allowed))
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {shown(getattr(self, name))}: expected one of {choices}")
        if self.group != -1 and (self.group < LEAST_GROUP or self.group % LEAST_GROUP):
            raise ConfigError(f"--group {self.group}: expected a multiple of {LEAST_GROUP}, or -1 for all inputs")
        if self.act_order != "no" and self.method != "gptq":
            raise ConfigError(f"--act-order with --method {self.method}: only --method gptq rounds in an order")
        if self.sorts and self.format == "compressed-tensors":
            raise ConfigError(
                "--act-order groups: compressed-tensors no longer has such a format; use --act-order static, or "
                "--format gptq"
            )
        if self.damping != DAMPING and self.method != "gptq":
            raise ConfigError(f"--damping with --method {self.method}: only --method gptq uses a damping")
        if not 0 < self.damping < 1:
            raise ConfigError(f"--damping {self.damping:g}: expected a number between 0 and 1")
        for name in ("samples", "length"):
            if getattr(self, name) is not None and not self.calibrated:
                raise ConfigError(f"--{name} with --method {self.method}: only --method gptq and awq read a text")
        if self.sample_count < 1:
            raise ConfigError(f"--samples {self.samples}: expected at least 1")
        if self.sample_length < LEAST_LENGTH:
            raise ConfigError(f"--length {self.length}: expected at least {LEAST_LENGTH}")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"--skip {shown(pattern)}: expected a regular expression ({e})") from None

    @property
    def calibrated(self) -> bool:
        """Return whether the method reads a text."""
        return self.method != "rtn"

    @property
    def sample_count(self) -> int:
        """Return the number of samples."""
        return SAMPLES if self.samples is None else self.samples

    @property
    def sample_length(self) -> int:
        """Return the tokens of a sample."""
        return LENGTH if self.length is None else self.length

    @property
    def sorts(self) -> bool:
        """Return whether a group may have inputs that are not adjacent in the weight."""
        return self.act_order == "groups"

    def left_out(self, name: str) -> bool:
        """Return whether ``skip`` excludes the module with a name."""
        return any(re.match(pattern, name) for pattern in self.skip)

    def check_skips(self, names: Sequence[str]) -> None:
        """Raise ConfigError if a pattern of ``skip`` matches none of ``names``, the linear modules."""
        for pattern in self.skip:
            if not any(re.match(pattern, name) for name in names):
                raise ConfigError(
                    f"--skip {shown(pattern)}: matches no linear module of a layer; expected a regular expression that "
                    f"matches names from their start, such as {names[-1]}, or one that begins with .*"
                )

    def check_sizes(self, sizes: Iterable[tuple[str, int, int]]) -> None:
        """Raise ConfigError if a module (name, outputs, inputs) does not fit the bits, the format or the group size."""
        sizes = list(sizes)
        per_word = 32 // self.bits
        for name, outputs, inputs in sizes:
            or_skip = f"or leave it out with --skip {shown(re.escape(name))}"
            if inputs % per_word:
                raise ConfigError(
                    f"--bits {self.bits}: {name} has {inputs} inputs, which do not fill words of 32 bits: expected a "
                    f"multiple of {per_word}; {or_skip}"
                )
            if outputs % per_word and (self.format != "compressed-tensors" or not self.symmetric):
                raise ConfigError(
                    f"--format {self.format}: {name} has {outputs} outputs, and a word holds {per_word} zero points of "
                    f"{self.bits} bits: use --format compressed-tensors without --asymmetric, {or_skip}"
                )
            if self.group != -1 and inputs % self.group:
                fitting = [g for g in (256, 128, 64, 32, 16, 8) if all(n % g == 0 for _, _, n in sizes)]
                choices = " or ".join(map(str, [*fitting, -1]))
                raise ConfigError(
                    f"--group {self.group}: {name} has {inputs} inputs, which the group size does not divide: use "
                    f"{choices}, {or_skip}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the options with their defaults filled in, so that equal quantizations have equal dicts."""
        options = asdict(self) | {"skip": list(self.skip)}
        if self.calibrated:
            options |= {"samples": self.sample_count, "length": self.sample_length}
        return options
