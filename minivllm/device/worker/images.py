"""The images of one device: their features, and the places of the rows' images.

    Delta.image (number, values) ──► encoder ──► features [levels, tokens, hidden], until the host frees them
    Join.image ──► images of a slot ──► in each step: features in place of embeddings, rows of the rotary tables

A step whose rows reach images runs as separate launches, or in captures of its own kind (``image_steps``).  The
features enter the model at tap points: in place of the value of "embedding", and added to the inputs of the layers 1, 2
... for the further levels.

A part of an image may have a position for each axis (m-rope).  Its cos and sin are written to rows of the rotary tables
behind those of positions, so attention needs no other kernel.  Tokens behind the images have the positions of text with
an offset, which is a column of the slots (``DeviceState.rope_first``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.images import values_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.encoder import ImageFacts
    from minivllm.core.interfaces.model import StepTaps
    from minivllm.core.interfaces.plan import Delta, Join, StepPlan

    from .encoder import LoadedEncoder
    from .state import DeviceState

EMBEDDING = "embedding"
MISSING = "the features of an image are missing"


def layer_point(level: int) -> str:
    """Return the name of the tap point (place in the model) at which the features of a level are added."""
    return f"layers.{level}.input"


class Span(NamedTuple):
    """An image of a row: ``tokens`` placeholders from ``position`` on."""

    number: int
    position: int
    tokens: int
    shape: tuple[int, int, int]

    @property
    def end(self) -> int:
        """Return the position after the image's last placeholder."""
        return self.position + self.tokens


class Piece(NamedTuple):
    """A part of an image in a step: rows ``[first, first + length)`` of its features, from the step's token ``at``."""

    span: Span
    slot: int
    at: int
    first: int
    length: int

    def tokens(self) -> np.ndarray:
        """Return the indices i64 [length] of the part's tokens in the step."""
        return np.arange(self.at, self.at + self.length)


def _rows(plan: StepPlan) -> Iterator[tuple[int, int, int, int]]:
    """Yield the slot, the computed tokens, the tokens and the first token's index in the step of each row."""
    starts = np.cumsum(plan.q_len) - plan.q_len
    return zip(plan.slots.tolist(), plan.computed.tolist(), plan.q_len.tolist(), starts.tolist(), strict=True)


class ImageState:
    """The features of images on the device, and the images of each slot."""

    def __init__(
        self,
        facts: ImageFacts,
        encoder: LoadedEncoder,
        state: DeviceState,
        tables: Sequence[tuple[Tensor, Tensor]],
        scratch: int,
    ) -> None:
        """Start without images.  ``tables`` are the rotary tables, whose rows from ``scratch`` on are free."""
        self.facts = facts
        self.encoder = encoder
        self.state = state
        self.tables = tables
        self.scratch = scratch
        slots = len(state.known)
        self.features: dict[int, Tensor] = {}
        self.failed: dict[int, str] = {}  # number of an image -> reason why its features are missing
        self.spans: list[tuple[Span, ...]] = [()] * slots
        self.upto = np.zeros(slots, np.int64)  # end position of the last image of each slot, 0 means no image
        # difference between position and token index after the images of each slot
        self.offset = np.zeros(slots, np.int64)
        self.axes: Tensor | None = None
        if facts.sections:
            self.axes = axis_of_frequency(facts).to(state.device)

    # ---- changes -------------------------------------------------------------------------------------------------

    def apply(self, delta: Delta) -> None:
        """Compute and free features, and set the images of slots that join or fork."""
        at = 0
        for number, size, each, *shape in delta.image.tolist():
            self.features.pop(number, None)
            self.failed.pop(number, None)
            if size:
                pixels = delta.pixels[at : at + size]
                self._encode(number, values_in(pixels, each), shape)
                at += size
        changed = []
        if delta.join is not None:
            changed += self._join(delta.join)
        for source, to, _ in delta.fork.tolist():
            if self.spans[source] or self.spans[to]:
                self._set(to, self.spans[source])
                changed.append(to)
        if changed and self.facts.sections:
            slots = np.array(changed)
            assert self.state.rope_first is not None
            pairs = np.stack([slots, self.offset[slots]])
            where, offsets = self.state.to(pairs)
            self.state.rope_first[where] = offsets

    def _encode(self, number: int, values: np.ndarray, shape: Sequence[int]) -> None:
        """Compute the features of an image.  A failure ends the requests that reach the image."""
        try:
            self.features[number] = self.encoder(self.state.to(values), shape)
        except Exception as e:
            self.failed[number] = self.encoder.describe(e)

    def _join(self, join: Join) -> list[int]:
        """Set the images of slots that join, and return the slots that have or had images."""
        spans: dict[int, list[Span]] = {}
        for i, number, position, tokens, *shape in join.image.tolist():
            span = Span(number, position, tokens, (shape[0], shape[1], shape[2]))
            spans.setdefault(int(join.slot[i]), []).append(span)
        changed = [slot for slot in join.slot.tolist() if self.spans[slot] or slot in spans]
        for slot in changed:
            self._set(slot, tuple(spans.get(slot, ())))
        return changed

    def _set(self, slot: int, spans: tuple[Span, ...]) -> None:
        self.spans[slot] = spans
        self.upto[slot] = spans[-1].end if spans else 0
        self.offset[slot] = sum(self._shift(span) for span in spans)

    def _shift(self, span: Span) -> int:
        """Return the difference between the positions and the tokens of an image.

        An image takes as many positions as its longer side has tokens.
        """
        if not self.facts.sections:
            return 0
        return max(span.shape[1:]) // self.facts.merge - span.tokens

    # ---- a step --------------------------------------------------------------------------------------------------

    def reached(self, plan: StepPlan) -> bool:
        """Return whether a row of a step has a token before the end of its last image."""
        return bool((plan.computed < self.upto[plan.slots]).any())

    def pieces(self, plan: StepPlan) -> Iterator[Piece]:
        """Yield the parts of images that the rows of a step compute."""
        for slot, computed, n, start in _rows(plan):
            for span in self.spans[slot]:
                first = max(span.position, computed)
                end = min(span.end, computed + n)
                if first < end:
                    at = start + first - computed
                    yield Piece(span, slot, at, first - span.position, end - first)

    def enter(self, plan: StepPlan, meta: AttnMeta) -> tuple[FeatureTaps | None, dict[int, str]]:
        """Prepare a step for its images: set the rotary rows of ``meta``, and return the taps that insert the features.

        Also return the numbers of images without features, each with the reason."""
        found = []
        lost = {}
        pieces = list(self.pieces(plan))
        for piece in pieces:
            reason = self.why_lost(piece.span)
            if reason:
                lost[piece.span.number] = reason
            else:
                found.append(piece)
        if self.facts.span:
            meta.host_sees = self._seen(plan, pieces)
        if self.axes is not None:
            without = [piece for piece in pieces if piece.span.number in lost]
            where, rows = self.rotary_rows(plan, found, without)
            if len(where):
                index, to = self.state.to(np.stack([where, rows]))
                meta.position[index] = to
        if not found:
            return None, lost
        tokens = np.concatenate([piece.tokens() for piece in found])
        parts = []
        for piece in found:
            end = piece.first + piece.length
            features = self.features[piece.span.number]
            parts.append(features[:, piece.first : end])
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return FeatureTaps(self.state.to(tokens), values), lost

    def _seen(self, plan: StepPlan, pieces: list[Piece]) -> np.ndarray:
        """Return the last position i64 [T] that each token of a step attends to: its own, or the end of its image."""
        starts = np.cumsum(plan.q_len) - plan.q_len
        shift = np.repeat(plan.computed - starts, plan.q_len)
        seen = np.arange(len(shift)) + shift
        for piece in pieces:
            seen[piece.at : piece.at + piece.length] = piece.span.end - 1
        return seen.astype(np.int64)

    def why_lost(self, span: Span) -> str:
        """Return why an image has no features, "" if it has them."""
        features = self.features.get(span.number)
        if features is None:
            return self.failed.get(span.number, MISSING)
        if features.shape[1] != span.tokens:
            return f"the image encoder gave {features.shape[1]} features; expected {span.tokens}, one for each token"
        return ""

    def rotary_rows(self, plan: StepPlan, pieces: list[Piece], lost: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that a step computes before the end of their row's images, and their rows in the rotary
        tables, i64 [n] each.  The rows of parts of images are written to the tables.

        Tokens of ``lost`` pieces get row 0, because their own positions may be outside of the tables.
        """
        text: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        for slot, computed, n, start in _rows(plan):
            end = min(computed + n, int(self.upto[slot]))
            shift = 0
            behind = computed
            for span in self.spans[slot]:
                # the text between the previous image and this one
                positions = np.arange(behind, min(span.position, end))
                behind = max(behind, span.end)
                text.append(start + positions - computed)
                rows.append(positions + shift)
                shift += self._shift(span)
        if pieces:
            axes = np.concatenate([self._positions(piece) for piece in pieces], axis=1)
            tokens = axes.shape[1]
            free = len(self.tables[0][0]) - self.scratch if self.tables else 0
            if tokens > free:
                raise ValueError(f"a step has {tokens} tokens of images; expected at most {free}")
            self._write(self.state.to(axes))
            text += [piece.tokens() for piece in pieces]
            rows.append(self.scratch + np.arange(tokens))
        for piece in lost:
            text.append(piece.tokens())
            rows.append(np.zeros(piece.length, np.int64))
        if not text:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(text), np.concatenate(rows)

    def _positions(self, piece: Piece) -> np.ndarray:
        """Return the positions i64 [3, length] (time, row, column) of a part of an image."""
        span = piece.span
        earlier = [one for one in self.spans[piece.slot] if one.position < span.position]
        shift = sum(self._shift(one) for one in earlier)
        merge = self.facts.merge
        frames, height, width = span.shape
        grid = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        end = piece.first + piece.length
        return grid[:, piece.first : end] + span.position + shift

    def _write(self, positions: Tensor) -> None:
        """Write the cos and sin of ``positions`` i64 [3, n] to the free rows of the tables."""
        assert self.axes is not None
        n = positions.shape[1]
        index = self.axes.expand(n, 1, -1)
        for cos, sin in self.tables:
            for table in (cos, sin):
                of_axes = table[positions.T]  # [n, 3, dim]
                table[self.scratch : self.scratch + n] = of_axes.gather(1, index).squeeze(1)


class FeatureTaps:
    """The taps of a step that insert the features of images (``model.StepTaps``).

    ``index`` i64 [n] are tokens of the step, and ``values`` [levels, n, hidden] their features.  ``then`` are the taps
    of other rows of the step, which are called with the values that contain the features."""

    then: StepTaps | None = None

    def __init__(self, index: Tensor, values: Tensor) -> None:
        self.index = index
        self.values = values
        self.levels = {layer_point(level): level for level in range(1, len(values))}
        self.points = frozenset({EMBEDDING, *self.levels})

    def precede(self, taps: StepTaps | None) -> None:
        """Set the taps that are called after the features are inserted, with the values that contain them."""
        self.then = taps
        if taps is not None:
            self.points |= taps.points

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """Insert the features of the step's image tokens into the value of a point, call the taps of other rows with
        it, and return the result."""
        x = self._insert(point, x)
        return x if self.then is None else self.then(point, x)

    def given(self, point: str) -> Tensor | None:
        """Return the experts that the step gives at a point to rows without images, or None."""
        return None if self.then is None else self.then.given(point)

    def _insert(self, point: str, x: Tensor) -> Tensor:
        """Return the value of a point with the features of the step's image tokens."""
        if point == EMBEDDING:
            return x.index_copy(0, self.index, self.values[0].to(x.dtype))
        level = self.levels.get(point)
        if level is None:
            return x
        return x.index_add(0, self.index, self.values[level].to(x.dtype))


def axis_of_frequency(facts: ImageFacts) -> Tensor:
    """Return the axis (0 time, 1 row, 2 column) that each element of a head follows, i64 [dim]."""
    sections = facts.sections
    if facts.interleaved:
        axes = torch.zeros(sum(sections), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    else:
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    return axes.repeat(2)


def lacks_points(points: Mapping[str, int], levels: int) -> str:
    """Return why a model with these tap points cannot read features of ``levels`` levels, "" if it can."""
    needed = [EMBEDDING]
    needed += [layer_point(level) for level in range(1, levels)]
    missing = [point for point in needed if point not in points]
    return f"the model has no point {missing[0]!r}, at which features enter" if missing else ""
