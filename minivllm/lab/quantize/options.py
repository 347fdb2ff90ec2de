"""What ``minivllm quantize`` is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minivllm.errors import ConfigError, shown

METHODS = ("rtn", "gptq", "awq")
BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2", "compressed-tensors")
ORDERS = ("no", "static", "groups")  # of inputs: groups lie as they did, or are made in that order
LEAST_GROUP = 8
LEAST_LENGTH = 8  # tokens of a sample
DAMPING = 0.01
SAMPLES, LENGTH = 128, 2048


@dataclass(frozen=True)
class QuantizeOptions:
    """``group`` -1: all inputs of an output share a scale.  ConfigError for what cannot be."""

    method: str
    bits: int = 4
    group: int = 128
    format: str = "gptq"
    symmetric: bool = True
    act_order: str = ORDERS[0]  # of GPTQ: inputs of large second moment first
    damping: float = DAMPING  # of GPTQ: a share of the mean second moment
    samples: int | None = None  # of a method that reads a text: None is SAMPLES
    length: int | None = None  # tokens of a sample, likewise LENGTH
    skip: tuple[str, ...] = ()  # regular expressions: names that they match, from the start, stay as they are

    def __post_init__(self) -> None:
        for name, allowed in (("method", METHODS), ("bits", BITS), ("format", FORMATS), ("act_order", ORDERS)):
            if getattr(self, name) not in allowed:
                wanted = ", ".join(map(str, allowed))
                raise ConfigError(f"--{name.replace('_', '-')} {shown(getattr(self, name))}: want one of {wanted}")
        if self.group != -1 and (self.group < LEAST_GROUP or self.group % LEAST_GROUP):
            raise ConfigError(f"--group {self.group}: want a multiple of {LEAST_GROUP}, or -1 for all inputs")
        if self.act_order != "no" and self.method != "gptq":
            raise ConfigError(f"--act-order with --method {self.method}: want --method gptq, which goes by an order")
        if self.sorts and self.format == "compressed-tensors":
            raise ConfigError(
                "--act-order groups: compressed-tensors has no such format any more; want --act-order static, or "
                "--format gptq"
            )
        if self.damping != DAMPING and self.method != "gptq":
            raise ConfigError(f"--damping with --method {self.method}: want --method gptq, which damps")
        if not 0 < self.damping < 1:
            raise ConfigError(f"--damping {self.damping:g}: want a number between 0 and 1")
        for name in ("samples", "length"):
            if getattr(self, name) is not None and not self.calibrated:
                raise ConfigError(f"--{name} with --method {self.method}: want --method gptq or awq, which read a text")
        if self.sample_count < 1:
            raise ConfigError(f"--samples {self.samples}: want at least 1")
        if self.sample_length < LEAST_LENGTH:
            raise ConfigError(f"--length {self.length}: want at least {LEAST_LENGTH}")
        for pattern in self.skip:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"--skip {shown(pattern)}: want a regular expression ({e})") from None

    @property
    def calibrated(self) -> bool:
        return self.method != "rtn"

    @property
    def sample_count(self) -> int:
        return SAMPLES if self.samples is None else self.samples

    @property
    def sample_length(self) -> int:
        return LENGTH if self.length is None else self.length

    @property
    def sorts(self) -> bool:
        """Whether inputs that share a scale do not lie side by side."""
        return self.act_order == "groups"

    def left_out(self, name: str) -> bool:
        return any(re.match(pattern, name) for pattern in self.skip)

    def check_skips(self, names: Sequence[str]) -> None:
        """ConfigError if a pattern leaves none of ``names``, the linear modules, as it is."""
        for pattern in self.skip:
            if not any(re.match(pattern, name) for name in names):
                raise ConfigError(
                    f"--skip {shown(pattern)}: matches no linear module of a layer; want a regular expression that "
                    f"matches names from their start, such as {names[-1]}, or one that begins with .*"
                )

    def check_sizes(self, sizes: Iterable[tuple[str, int, int]]) -> None:
        """ConfigError if a module (name, outputs, inputs) does not fit bits and group."""
        sizes, each = list(sizes), 32 // self.bits
        for name, outputs, inputs in sizes:
            if inputs % each:
                raise ConfigError(
                    f"--bits {self.bits}: {name} has {inputs} inputs, which fill no words of 32 bits: want a multiple "
                    f"of {each}; or leave it out with --skip {shown(re.escape(name))}"
                )
            if outputs % each and (self.format != "compressed-tensors" or not self.symmetric):
                raise ConfigError(
                    f"--format {self.format}: {name} has {outputs} outputs, and zero points of {self.bits} bits fill "
                    f"words of {each}: want --format compressed-tensors without --asymmetric, or leave it out with "
                    f"--skip {shown(re.escape(name))}"
                )
            if self.group != -1 and inputs % self.group:
                fits = [g for g in (256, 128, 64, 32, 16, 8) if all(n % g == 0 for _, _, n in sizes)]
                wanted = " or ".join(map(str, [*fits, -1]))
                raise ConfigError(
                    f"--group {self.group}: {name} has {inputs} inputs, which it does not divide: want {wanted}, or "
                    f"leave it out with --skip {shown(re.escape(name))}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Two that ask for the same are equal."""
        read = {"samples": self.sample_count, "length": self.sample_length} if self.calibrated else {}
        return asdict(self) | {"skip": list(self.skip)} | read
