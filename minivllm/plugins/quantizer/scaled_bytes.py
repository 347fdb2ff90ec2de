"""Weights that are stored as bytes [out, in] with scales in a checkpoint, either int8 or float8 (e4m3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm.errors import ModelError

from .forms import Numbers
from .packed import FLOATS, PartLayout, Share, Want

SCALES = (*FLOATS, "F8_E8M0")


def scale_shapes(share: Share, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the accepted shapes of scales that ``rows`` outputs and ``columns`` inputs share.

    A single scale for all elements may have several shapes.
    """
    if rows == share.outputs and columns == share.inputs:
        return (1,), (1, 1), ()
    row_blocks = -(-share.outputs // rows)
    column_blocks = -(-share.inputs // columns)
    return ((row_blocks, column_blocks),)


def by_row(scales: Tensor, share: Share, rows: int) -> Tensor:
    """Return scales or zero points as float32 [this process's outputs, groups].

    In the checkpoint, ``rows`` neighbouring outputs share a scale.
    """
    blocks = -(-share.outputs // rows)
    table = scales.to(share.device).float().reshape(blocks, -1)
    outputs = torch.arange(share.outputs)[share.rows]
    block_of = outputs // rows
    return table[block_of.to(table.device)]


def group_of(given: Mapping[str, Tensor], share: Share, columns: int) -> Tensor:
    """Return the group of each of this process's inputs, i64, for groups of ``columns`` inputs.

    ``weight_g_idx`` has the groups if they were formed in another order of the inputs.
    """
    plain = share.group_of(columns)
    if "weight_g_idx" not in given:
        return plain
    found = given["weight_g_idx"][share.columns].long().cpu()
    if bool((found == -1).all()):  # -1 marks groups that have not been sorted
        return plain
    groups = -(-share.inputs // columns)
    outside = (found < 0) | (found >= groups)
    if bool(outside.any()):
        raise ModelError(f"weight_g_idx has groups beyond 0 to {groups - 1}, as many as there are scales")
    return found


def check_symmetric(zero: Tensor | None) -> None:
    """Raise ModelError for zero points other than 0 of a weight that is symmetric by its configuration."""
    if zero is not None and bool((zero.float() != 0).any()):
        raise ModelError("weight_zero_point is not 0, but config.json has symmetric=true: expected symmetric=false")


class BytesLayout(PartLayout):
    """The layout of ``weight`` and ``scale_name``, with a scale for blocks of ``rows`` outputs and ``columns`` inputs.

    If there are zero points, ``weight_zero_point`` has the shape of the scales.
    """

    def __init__(
        self, share: Share, dtype: str, rows: int, columns: int, why: str, scale_name: str, zero: bool = False
    ) -> None:
        super().__init__(share)
        self.rows = rows
        self.columns = columns
        self.why = why
        self.scale_name = scale_name
        self.zero = zero
        shapes = scale_shapes(share, rows, columns)
        self.want = {"weight": Want(dtype, (share.outputs, share.inputs))}
        self.want[scale_name] = Want(SCALES, *shapes)
        if zero:
            self.want["weight_zero_point"] = Want(("I8", "I32", *FLOATS), *shapes)

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        codes = given["weight"][share.rows, share.columns].to(share.device, copy=True)
        scale = by_row(given[self.scale_name], share, self.rows)
        zero = None
        if self.zero:
            zero = by_row(given["weight_zero_point"], share, self.rows)
        else:
            check_symmetric(given.get("weight_zero_point"))
        groups = group_of(given, share, self.columns)
        return Numbers(codes, scale, zero, groups)
