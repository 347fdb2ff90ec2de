"""The vision tower of Qwen3-VL and Qwen3.5 over the weights of transformers' modules, without waits for the device.

    patches [T, values] ── linear, + positions ──► layers: norm ─ attention within an image ─ norm ─ two products
                                                   ──► mergers: features of four patches each

Transformers' own forward computes positions for each image and has several times as many kernels.  The tables of
positions of a grid are kept here, so that ``PatchTower`` can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .tower_attention import hopper_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from .tower_attention import Attend

    # add_norm and its kernel: (x, residual, weight, bias, eps) -> (norm of the sum, sum)
    AddNorm = Callable[[Tensor, Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]

Grid = tuple[int, int, int]  # (frames, rows, columns) of the patches of an image or a video
GRIDS = 32  # largest number of grids whose position tables are cached
TABLE_PATCHES = 1 << 16  # largest number of their patches together; Qwen3-VL-8B has 2,880 bytes for a patch
REMEMBERED = 4096  # largest number of grids of earlier calls that are remembered
# Back ends of torch's attention for frequent grids, the preferred one first.  Torch's own order has cuDNN last.  With
# heads of 72 elements it takes 0.6 of the time of flash attention on an H200, but 40 ms more for the first call with a
# size.
FREQUENT = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Tables(NamedTuple):
    """The position tables of a grid of N patches: learned embeddings, and cos and sin of rotary embeddings.

    The patches that are merged to a feature, a square in the image, are consecutive."""

    learned: Tensor  # [N, width] learned position embeddings, in the dtype of the tower
    cos: Tensor  # f32 [N, dim of a head], of the rotary embedding
    sin: Tensor  # f32 [N, dim of a head]; the first half is negated, as the rotation needs


class PatchTower:
    """Computes features of image patches with the weights of ``visual``, the vision tower of a transformers model."""

    def __init__(self, visual: Any, levels: Sequence[int], repeatable: bool = False) -> None:
        """Store the modules of a vision tower.

        ``levels`` are the indices of the layers whose outputs give additional features (deepstack).  With
        ``repeatable`` the attention of all calls has the same back end, so features of equal images have equal bits.
        """
        self.visual = visual
        self.repeatable = repeatable
        self.levels = list(levels)
        config = visual.config
        self.heads = int(config.num_heads)
        self.merge = int(config.spatial_merge_size)
        self.dim = int(config.hidden_size) // self.heads
        # base of the rotary embedding; transformers renames its attribute often, and all checkpoints have 10,000
        rope = getattr(config, "rope_parameters", None) or {}
        self.theta = float(rope.get("rope_theta", 10000.0))
        embed = visual.patch_embed.proj
        self.embed = embed.weight.flatten(1), embed.bias
        self.turn: Callable[[Tensor, Tensor, Tensor], Tensor] = turned
        self.add_norm: AddNorm = add_norm
        # None for torch's attention
        self.attend: Attend | None = hopper_attention(self.dim, embed.weight.dtype, embed.weight.device)
        on_gpu = embed.weight.is_cuda
        if on_gpu and find_spec("triton") is not None:
            from minivllm.device.kernels.norm import add_layer_norm
            from minivllm.device.kernels.turn import turn

            self.turn = turn
            self.add_norm = add_layer_norm
        # cuBLAS computes GELU behind a product by the tanh formula, with less than float32 precision
        narrow = on_gpu and embed.weight.dtype != torch.float32
        self.joined_gelu = narrow and config.hidden_act == "gelu_pytorch_tanh"
        self._tables: OrderedDict[Grid, Tables] = OrderedDict()
        self._captured: dict[Grid, Tables] = {}  # tables that CUDA graphs read, so they are never freed
        self._seen: OrderedDict[Grid, None] = OrderedDict()  # grids of earlier calls, newest last

    def __call__(self, patches: Tensor, grid: Grid) -> list[Tensor]:
        """Return the features [tokens, hidden] of each level, for the patches [T, values] of images with the same grid.

        The patches of several images follow one another, and attend only to the same image.
        """
        *_, found = self.parts(patches, grid)
        assert isinstance(found, list)
        return found

    def frequent(self, grid: Grid) -> bool:
        """Remember the grid of a call, and return whether an earlier call had it.

        A capture calls the tower twice, first without recording, and only for a grid of earlier calls.  So both calls
        have the back ends ``FREQUENT``, and cuDNN prepares nothing while a graph is recorded."""
        frequent = grid in self._seen
        self._seen[grid] = None
        self._seen.move_to_end(grid)
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return frequent

    def parts(self, patches: Tensor, grid: Grid) -> Iterator[float | list[Tensor]]:
        """Yield the share of the layers that are computed, after each of them, and at last the features as ``__call__``
        returns them."""
        fixed = self.repeatable or self.attend is not None or not patches.is_cuda
        preferred = not fixed and self.frequent(grid)
        tables = self.tables(grid)
        visual = self.visual
        frame = grid[1] * grid[2]
        embedded = F.linear(patches, *self.embed)
        x = embedded.view(-1, len(tables.learned), embedded.shape[1]) + tables.learned
        x = x.view_as(embedded)
        del patches, embedded  # a divided image keeps the tensors that have a name, beside those of other steps
        found = {}
        added = None  # output of the previous layer, which is not in the residual stream x yet
        for number, block in enumerate(visual.blocks):
            normed, x = self._normed(block.norm1, x, added)
            with _preference(preferred):
                attended = self._attend(block.attn, normed, tables, frame)
            normed, x = self._normed(block.norm2, x, attended)
            added = self._mlp(block.mlp, normed)
            del attended, normed
            if number in self.levels:
                level = self.levels.index(number)
                merger = visual.deepstack_merger_list[level]
                found[number] = merger(x + added)
            yield (number + 1) / (len(visual.blocks) + 1)
        if added is not None:
            x = x + added
        last = visual.merger(x)
        yield [last, *(found[level] for level in self.levels)]

    def _normed(self, norm: Any, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the output ``added`` of a layer to the residual stream x, and return its norm and the new x."""
        how = norm.weight, norm.bias, norm.eps
        if added is None:
            return self.add_norm(x, None, *how)
        return self.add_norm(added, x, *how)

    def _mlp(self, mlp: Any, x: Tensor) -> Tensor:
        """Return the output [T, width] of the two products of a layer, with GELU in the first of them if possible."""
        if not self.joined_gelu:
            return mlp(x)
        first = mlp.linear_fc1
        inner = torch._addmm_activation(first.bias, x, first.weight.t(), use_gelu=True)
        return mlp.linear_fc2(inner)

    def _attend(self, attention: Any, x: Tensor, tables: Tables, frame: int) -> Tensor:
        """Return the outputs [T, width] of an attention layer in which the patches of a frame attend to each other."""
        qkv = attention.qkv(x)
        qkv = qkv.view(len(x), 3, self.heads, self.dim)
        q, k = self.turn(qkv, tables.cos, tables.sin)
        if self.attend is not None:
            joined = self.attend(q, k, qkv[:, 2], frame).flatten(1)
        else:
            joined = _library_attention(q, k, qkv[:, 2], frame)
        out: Tensor = attention.proj(joined)
        return out

    def tables(self, grid: Grid) -> Tables:
        """Return the position tables of the patches of a grid (frames, rows, columns), from a cache or computed."""
        found = self._captured.get(grid) or self._tables.get(grid)
        if found is None:
            found = self._computed(grid)
        if found.cos.is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured[grid] = found
        self._tables[grid] = found
        self._tables.move_to_end(grid)
        patches = sum(len(one.cos) for one in self._tables.values())
        while len(self._tables) > 1 and (len(self._tables) > GRIDS or patches > TABLE_PATCHES):
            _, oldest = self._tables.popitem(last=False)
            patches -= len(oldest.cos)
        return found

    def _computed(self, grid: Grid) -> Tables:
        """Compute the position tables of the patches of a grid (frames, rows, columns), on the host."""
        frames, rows, columns = grid
        weight = self.visual.pos_embed.weight
        device = weight.device
        merge = self.merge
        patches = torch.arange(rows * columns)
        squares = patches.view(rows // merge, merge, columns // merge, merge)
        # index of each patch when the patches of the image are counted row by row
        order = squares.transpose(1, 2).flatten()
        row = order // columns
        column = order % columns
        image = _resampled(weight, rows, columns)
        learned = image[order.to(device)].repeat(frames, 1)
        half = self.dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = self.theta**exponents
        positions = torch.stack([row, column], 1).float()
        turns = positions[..., None] / frequencies
        angles = turns.flatten(1).repeat(frames, 1)
        cos = angles.cos()
        sin = angles.sin()
        both_cos = torch.cat([cos, cos], 1)
        both_sin = torch.cat([-sin, sin], 1)
        return Tables(learned.to(weight.dtype), both_cos.to(device), both_sin.to(device))


def _library_attention(q: Tensor, k: Tensor, v: Tensor, frame: int) -> Tensor:
    """Return the outputs [T, width] of torch's attention within sequences of ``frame`` patches."""
    shape = (-1, frame, *q.shape[1:])
    q, k, v = (one.view(shape).transpose(1, 2) for one in (q, k, v))
    seen = F.scaled_dot_product_attention(q, k, v)
    return seen.transpose(1, 2).flatten(2).flatten(0, 1)


def _preference(preferred: bool) -> AbstractContextManager[None]:
    """Return a context in which attention has the back ends ``FREQUENT``, or else torch's own order."""
    if not preferred:
        return nullcontext()
    return sdpa_kernel(FREQUENT, set_priority=True)


def _resampled(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Interpolate learned position embeddings of a square grid [side², width] to a grid: f32 [rows * columns, width].

    Each one is a weighted sum of the four nearest, and the corners of both grids coincide.
    """
    side = int(len(weight) ** 0.5)
    wide = weight.view(side, side, -1).float()
    found: Tensor | None = None
    for row, row_share in _neighbours(rows, side):
        for column, column_share in _neighbours(columns, side):
            share = torch.outer(row_share, column_share).to(wide.device)
            nearest = wide[row.to(wide.device)][:, column.to(wide.device)]
            weighted = nearest * share[..., None]
            found = weighted if found is None else found + weighted
    assert found is not None
    return found.flatten(0, 1)


def _neighbours(count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the lower and the upper neighbours of ``count`` positions that are spread over ``side`` places.

    Each is (place i64 [count], weight f32 [count] of this place)."""
    at = torch.linspace(0, side - 1, count)
    low = at.long()
    high = (low + 1).clamp_max(side - 1)
    share = at - low
    return [(low, 1 - share), (high, share)]


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of x + ``residual`` [T, width] and the sum, as the kernel ``add_layer_norm`` does."""
    total = x if residual is None else x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def turned(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated queries and keys [2, T, H, D] of ``qkv`` [T, 3, H, D], as the kernel ``turn`` does."""
    tokens, _, heads, dim = qkv.shape
    both = qkv[:, :2].transpose(0, 1).float()
    wide = both.view(2, -1, len(cos), heads, dim)
    swapped = wide.roll(dim // 2, -1)
    found = wide * cos[:, None] + swapped * sin[:, None]
    found = found.view(2, tokens, heads, dim)
    return found.to(qkv.dtype)
