"""Options of the quantizers in this folder."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

OfBits = Literal[4, 8, 16, "fp8", "fp8-weight", "int4", "int8", "int8-w8a8", "llm-int8", "nf4", "none"]


class WeightOnlyOptions(BaseModel):
    """The choice of the modules that are quantized, and of another quantizer for some modules."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    skip: list[str] = Field(
        default_factory=list,
        description='Modules to leave unquantized, as shell patterns over their names, "layers.0.*", or regular '
        'expressions for whole names, "re:layers\\.[0-3]\\..*"; the names here or those of the checkpoint, '
        '"*.down_proj".',
    )
    bits: dict[str, OfBits] = Field(
        default_factory=dict,
        description="What modules get instead, by patterns over their names (as of skip), of which the first that fits "
        'counts: {"*.down_proj" = 8}. 4: as quantizer=int4; 8: as int8; 16: unquantized; or one of these quantizers by '
        "its name, with the settings that it has by itself.",
    )
    lm_head: bool = Field(
        default=False,
        description="Quantize the output head too; a tied one gets a quantized copy of its own, unless the embedding "
        "is quantized.",
    )
    embedding: bool = Field(
        default=False,
        description="Quantize the embedding of tokens too: rows are made numbers of as they are looked up. A tied head "
        "multiplies by the same weight.",
    )


class Int8Options(WeightOnlyOptions):
    """Options of weight-only int8, with one symmetric scale per output channel."""


class Int8W8A8Options(WeightOnlyOptions):
    """Options of int8 weights and activations, with one scale per output channel and one per row of activations."""


class Fp8WeightOptions(WeightOnlyOptions):
    """Options of weight-only float8 (e4m3), with one scale per output channel."""


class Fp8Options(WeightOnlyOptions):
    """Options of float8 (e4m3) weights and activations, with one scale per output channel and one per row of
    activations.
    """


class Int4Options(WeightOnlyOptions):
    """Options of weight-only int4, with a scale for each group of inputs of an output channel."""

    group_size: Literal[32, 64, 128] = Field(
        default=32, description="Inputs that share a scale; the inputs of every module must be a multiple of it."
    )
    symmetric: bool = Field(
        default=True, description="The grid has a point at 0, and no zero points are kept: 1 bit less an element of 32."
    )
    clip: bool = Field(
        default=False,
        description="Cut off the largest elements of a group where that makes the squared error of all smaller.",
    )


class Nf4Options(WeightOnlyOptions):
    """Options of weight-only NF4 as in bitsandbytes, with 16 quantiles of a normal distribution and a scale for each
    block.
    """

    group_size: Literal[32, 64, 128] = Field(
        default=64, description="Inputs that share a scale; the inputs of every module must be a multiple of it."
    )


class LlmInt8Options(WeightOnlyOptions):
    """Options of LLM.int8() as in bitsandbytes, with int8 weights and activations, except large activations."""

    threshold: float = Field(
        default=6.0, gt=0, description="Elements of a row that are as large are not rounded, and do not make its steps."
    )
