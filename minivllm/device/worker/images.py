"""The images on one device: their features, and their places in the sequences.

    Delta.image (number, values) ──► encoder ──► features [levels, tokens, hidden], until the host frees them
                (with several steps) ──► a share of the work in each step ──┘
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
    """Return the name of the tap point (named value in the model) to which image features of ``level`` are added."""
    return f"layers.{level}.input"


class Span(NamedTuple):
    """An image in a sequence: ``tokens`` placeholder tokens from index ``position`` on."""

    number: int
    position: int
    tokens: int
    shape: tuple[int, int, int]

    @property
    def end(self) -> int:
        """Return the index behind the image's last placeholder token."""
        return self.position + self.tokens


class Piece(NamedTuple):
    """The part of an image that a step computes: ``length`` tokens from index ``first`` of its features on.  ``at`` is
    the index of its first token in the step."""

    span: Span
    slot: int
    at: int
    first: int
    length: int

    def tokens(self) -> np.ndarray:
        """Return the indices i64 [length] of this part's tokens among the tokens of the step."""
        return np.arange(self.at, self.at + self.length)


def _rows(plan: StepPlan) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each row: its slot, its number of computed tokens, its number of tokens in the step, and the index of
    the first of these among the tokens of the step."""
    starts = np.cumsum(plan.q_len) - plan.q_len
    return zip(plan.slots.tolist(), plan.computed.tolist(), plan.q_len.tolist(), starts.tolist(), strict=True)


class DividedFeatures:
    """The features of an image that ``steps`` steps compute, equal shares each."""

    def __init__(self, parts: Iterator[float | Tensor], steps: int) -> None:
        """Store the result ``parts`` of ``LoadedEncoder.parts``."""
        self.parts = parts
        self.steps = steps
        self.step = 0  # number of steps that have computed a share
        self.done = 0.0  # share of the work that is done

    def advance(self, whole: bool) -> Tensor | None:
        """Compute the share of the next step, or the ``whole`` rest.  Return the features [levels, tokens, hidden] if
        they are complete, else None."""
        self.step += 1
        goal = 1.0 if whole else self.step / self.steps
        while self.done < goal:
            found = next(self.parts)
            if isinstance(found, Tensor):
                return found
            self.done = found
        return None


class ImageState:
    """The features of images on the device, and the places of images in the sequence of each slot."""

    def __init__(
        self,
        facts: ImageFacts,
        encoder: LoadedEncoder,
        state: DeviceState,
        tables: Sequence[tuple[Tensor, Tensor]],
        scratch: int,
    ) -> None:
        """Create the state without any images.

        ``tables`` are the (cos, sin) tables of rotary embeddings, whose rows from ``scratch`` on are free."""
        self.facts = facts
        self.encoder = encoder
        self.state = state
        self.tables = tables
        self.scratch = scratch
        slots = len(state.known)
        self.features: dict[int, Tensor] = {}
        self.failed: dict[int, str] = {}  # id of an image -> reason why it has no features
        self.divided: dict[int, DividedFeatures] = {}  # id of an image -> its features, which are not complete
        self.spans: list[tuple[Span, ...]] = [()] * slots
        self.upto = np.zeros(slots, np.int64)  # slot -> index behind its last image token, 0 without images
        # slot -> difference between the position and the index of a token behind the slot's images
        self.offset = np.zeros(slots, np.int64)
        self.axes: Tensor | None = None
        if facts.sections:
            self.axes = axis_of_frequency(facts).to(state.device)

    # ---- changes -------------------------------------------------------------------------------------------------

    def apply(self, delta: Delta) -> None:
        """Apply the changes of a step: compute and free features of images, and set the images of slots that join or
        fork.  Images that several steps encode are advanced by a share."""
        at = 0
        for number, size, each, *shape, steps in delta.image.tolist():
            for known in (self.features, self.failed, self.divided):
                known.pop(number, None)
            if size:
                pixels = delta.pixels[at : at + size]
                self._encode(number, values_in(pixels, each), shape, steps)
                at += size
        for number in list(self.divided):
            self._advance(number)
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

    def _encode(self, number: int, values: np.ndarray, shape: Sequence[int], steps: int) -> None:
        """Compute the features of an image, or prepare their computation by several ``steps``.  After a failure,
        requests whose steps reach the image end with an error."""
        try:
            if steps > 1:
                self.divided[number] = DividedFeatures(self.encoder.parts(self.state.to(values), shape), steps)
            else:
                self.features[number] = self.encoder(self.state.to(values), shape)
        except Exception as e:
            self.failed[number] = self.encoder.describe(e)

    def _advance(self, number: int, whole: bool = False) -> None:
        """Compute the next share of the features of an image, or the ``whole`` rest."""
        try:
            features = self.divided[number].advance(whole)
        except Exception as e:
            self.failed[number] = self.encoder.describe(e)
            del self.divided[number]
            return
        if features is not None:
            self.features[number] = features
            del self.divided[number]

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
        """Return the number of positions of an image minus its number of tokens.

        With positions for each axis, an image takes as many positions as its longer side has tokens.
        """
        if not self.facts.sections:
            return 0
        return max(span.shape[1:]) // self.facts.merge - span.tokens

    # ---- a step --------------------------------------------------------------------------------------------------

    def reached(self, plan: StepPlan) -> bool:
        """Return whether a row of a step begins before the end of its last image."""
        return bool((plan.computed < self.upto[plan.slots]).any())

    def pieces(self, plan: StepPlan) -> Iterator[Piece]:
        """Yield the parts of images whose tokens a step computes."""
        for slot, computed, n, start in _rows(plan):
            for span in self.spans[slot]:
                first = max(span.position, computed)
                end = min(span.end, computed + n)
                if first < end:
                    at = start + first - computed
                    yield Piece(span, slot, at, first - span.position, end - first)

    def enter(self, plan: StepPlan, meta: AttnMeta) -> tuple[FeatureTaps | None, dict[int, str]]:
        """Set the rotary positions of a step's image tokens in ``meta``, and return the object that inserts their
        features.

        Also return the ids of images without features, each with the reason."""
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
        """Return the reason why an image has no usable features; "" if it has them.  Features that are not complete yet
        are computed now."""
        if span.number in self.divided:
            self._advance(span.number, whole=True)
        features = self.features.get(span.number)
        if features is None:
            return self.failed.get(span.number, MISSING)
        if features.shape[1] != span.tokens:
            return f"the image encoder gave {features.shape[1]} features; expected {span.tokens}, one for each token"
        return ""

    def rotary_rows(self, plan: StepPlan, pieces: list[Piece], lost: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of tokens in a step and their rows in the rotary tables, i64 [n] each.

        These are the tokens before the end of the last image of their sequence.  Rows for the tokens of ``pieces`` are
        written to the tables.  Tokens of ``lost`` (parts of images without features) get row 0, because their own
        positions may be outside of the tables.
        """
        text: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        for slot, computed, n, start in _rows(plan):
            end = min(computed + n, int(self.upto[slot]))
            shift = 0
            behind = computed
            for span in self.spans[slot]:
                # positions of the text between the previous image and this one
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
        """Return the positions i64 [3, length] (time, row, column) of the tokens of a part of an image."""
        span = piece.span
        earlier = [one for one in self.spans[piece.slot] if one.position < span.position]
        shift = sum(self._shift(one) for one in earlier)
        merge = self.facts.merge
        frames, height, width = span.shape
        grid = np.indices((frames, height // merge, width // merge)).reshape(3, -1)
        end = piece.first + piece.length
        return grid[:, piece.first : end] + span.position + shift

    def _write(self, positions: Tensor) -> None:
        """Write cos and sin for ``positions`` i64 [3, n] (time, row, column) to the free rows of the rotary tables."""
        assert self.axes is not None
        n = positions.shape[1]
        index = self.axes.expand(n, 1, -1)
        for cos, sin in self.tables:
            for table in (cos, sin):
                of_axes = table[positions.T]  # [n, 3, dim]
                table[self.scratch : self.scratch + n] = of_axes.gather(1, index).squeeze(1)


class FeatureTaps:
    """Insert the features of images into the values at tap points of a step (``model.StepTaps``).

    ``index`` i64 [n] are the indices of image tokens in the step, and ``values`` [levels, n, hidden] their features.
    ``then`` reads or changes the values for other rows of the step afterwards."""

    then: StepTaps | None = None

    def __init__(self, index: Tensor, values: Tensor) -> None:
        self.index = index
        self.values = values
        self.levels = {layer_point(level): level for level in range(1, len(values))}
        self.points = frozenset({EMBEDDING, *self.levels})

    def precede(self, taps: StepTaps | None) -> None:
        """Set the object that reads or changes values at tap points after the features were inserted."""
        self.then = taps
        if taps is not None:
            self.points |= taps.points

    def __call__(self, point: str, x: Tensor) -> Tensor:
        """Insert the features of image tokens into the value ``x`` of a tap point, pass it to ``then``, and return the
        result."""
        x = self._insert(point, x)
        return x if self.then is None else self.then(point, x)

    def given(self, point: str) -> Tensor | None:
        """Return the experts that requests set at a tap point for rows without images, or None."""
        return None if self.then is None else self.then.given(point)

    def _insert(self, point: str, x: Tensor) -> Tensor:
        """Return the value ``x`` of a tap point with the features of image tokens: they replace embeddings, or are
        added to later layers."""
        if point == EMBEDDING:
            return x.index_copy(0, self.index, self.values[0].to(x.dtype))
        level = self.levels.get(point)
        if level is None:
            return x
        return x.index_add(0, self.index, self.values[level].to(x.dtype))


def axis_of_frequency(facts: ImageFacts) -> Tensor:
    """Return i64 [dim]: the axis (0 time, 1 row, 2 column) whose position rotates each element of an attention head."""
    sections = facts.sections
    if facts.interleaved:
        axes = torch.zeros(sum(sections), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    else:
        axes = torch.arange(3).repeat_interleave(torch.tensor(sections))
    return axes.repeat(2)


def lacks_points(points: Mapping[str, int], levels: int) -> str:
    """Return why image features of ``levels`` levels cannot enter a model with these tap points; "" if they can.

    ``points`` maps a tap point (named value in the model) to its width."""
    needed = [EMBEDDING]
    needed += [layer_point(level) for level in range(1, levels)]
    missing = [point for point in needed if point not in points]
    return f"the model has no point {missing[0]!r}, at which features enter" if missing else ""
