"""Checkpoints of AWQ (arXiv:2306.00978) in the format of AutoAWQ and GPTQModel with ``version: gemm``, 4 bits per
weight.

    qweight  i32 [in, out / 8]      fields of 8 outputs; from the lowest, those of output 0, 2, 4, 6, 1, 3, 5, 7
    qzeros   i32 [groups, out / 8]  the same for zero points
    scales   f16 [groups, out]
    weight   w[n, k] = (q - z) * scales[k // group_size, n]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError, shown

from . import forms
from .forms import Numbers
from .packed import FLOATS, CheckpointQuantizer, PartLayout, Share, Want, holds_words

FIELDS = 8  # of a word
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each output's field in a word
GEMM = (
    "its words lie in another order; use the same model as version=gemm, which AutoAWQ writes by default and to which "
    "GPTQModel converts others"
)


class AwqLayout(PartLayout):
    """The layout of a weight of 4 bits with a scale for each ``group_size`` inputs, or for all inputs if it is -1."""

    def __init__(self, share: Share, group_size: int) -> None:
        super().__init__(share)
        self.size = share.inputs if group_size == -1 else group_size
        self.why = f" with bits=4, group_size={group_size}"
        if share.outputs % FIELDS:
            raise ModelError(f"{share.outputs} outputs of 4 bits do not fill whole words: expected a multiple of 8")
        groups = -(-share.inputs // self.size)
        words = share.outputs // FIELDS
        self.want = {"qweight": Want("I32", (share.inputs, words))}
        self.want["qzeros"] = Want("I32", (groups, words))
        self.want["scales"] = Want(FLOATS, (groups, share.outputs))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        codes = self._outputs(given["qweight"])
        zero = self._outputs(given["qzeros"])
        scales = given["scales"][:, share.rows].to(share.device)
        scale = scales.t().float()
        group_of = share.group_of(self.size)
        return Numbers(codes[:, share.columns], scale, zero.float(), group_of, bits=4, centre=forms.CENTRE)

    def _outputs(self, words: Tensor) -> Tensor:
        """Return this process's share of unpacked words: u8 [outputs, n] of words [n, all outputs / 8]."""
        rows = self.share.rows
        if not isinstance(rows, slice):
            return self._unpacked(words)[:, rows].t()
        first = rows.start // FIELDS
        last = -(-rows.stop // FIELDS)
        whole = self._unpacked(words[:, first:last])
        before = first * FIELDS  # number of outputs in front of the unpacked ones
        return whole[:, rows.start - before : rows.stop - before].t()

    def _unpacked(self, words: Tensor) -> Tensor:
        """Unpack words i32 [n, m] to 4-bit codes u8 [n, 8 * m], in the order of the outputs."""
        words = words.to(self.share.device)
        codes = forms.fields(words, 4, FIELDS * words.shape[1])
        by_word = codes.view(len(words), -1, FIELDS)
        return by_word[:, :, list(ORDER)].flatten(1)


class Awq(CheckpointQuantizer):
    """The quantizer for modules with ``qweight``.  Modules that ``modules_to_not_convert`` names stay unquantized."""

    method = "awq"
    packed_by = ("qweight",)
    beside = ("qzeros", "scales")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        given = self.settings.given
        for key in ("version", "backend"):
            value = given.get(key) or ""
            if str(value).lower() not in ("", "gemm", "autoawq", "auto"):
                raise ModelError(f"the checkpoint is AWQ of {key}={shown(value)}: {GEMM}")
        bits_key = "w_bit" if "w_bit" in given else "bits"
        group_key = "q_group_size" if "q_group_size" in given else "group_size"
        self.settings.one_of(bits_key, (4,), None)
        self.group_size = self.settings.group(group_key, -1)
        self.left_out = self.settings.names("modules_to_not_convert")

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        if source is None:
            if self.left_out:
                raise ModelError(
                    "modules_to_not_convert names modules, and this architecture does not give the names of its modules"
                )
            return AwqLayout(share, self.group_size)
        if not holds_words(source, self.beside):
            return None
        name = f".{source.name}."
        excluding = [one for one in self.left_out if f".{one.strip('.')}." in name]
        if excluding:
            raise ModelError(
                f"the checkpoint has {source.name}.qweight, and modules_to_not_convert={shown(excluding)} excludes "
                "it from quantization"
            )
        return AwqLayout(share, self.group_size)
