"""The functions of xFormers that the back end calls, for machines without xFormers."""

from dataclasses import dataclass
from typing import Any

from . import attn_bias as attn_bias
from . import cutlass as cutlass


@dataclass
class Inputs:
    """Queries, keys and values [1, tokens, heads, dim], and a mask."""

    query: Any
    key: Any
    value: Any
    attn_bias: Any = None
    p: float = 0.0
    scale: float | None = None
