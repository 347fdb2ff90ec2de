"""The images of an engine: their numbers, and the features that the device keeps.

    request ──► numbers by content ──► tokens of the prefix index: VOCAB + number at each placeholder
    admitted ──► the bytes of its images are reserved ──► chunk reaches an image ──► Delta.image computes its features
                 (before a chunk reaches it, if rows decode; a large image in several steps) ──────────────┘
    last image computed ──► features without a row stay as a cache, and the least recently used ones make room
    features are lost ──► their sequences end, and later requests with the image get a new number

So a block of the KV cache that covers a part of an image has the number of the image's content among its tokens.
Numbers are never used twice, and different contents have different numbers: no two images share a cached prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.errors import RequestError

from .image_content import Content, ContentKey

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from minivllm.core.interfaces.executor import Capacity, ImageWiring, Wiring
    from minivllm.core.interfaces.images import PreparedImage
    from minivllm.core.interfaces.plan import StepPlan

    from .request import Request, Seq
    from .slots import Slots

MAX_CONTENTS = 65536  # largest number of image contents that keep their number without a request
# image tokens that a step encodes at most while other rows decode: about 30 ms for Qwen3-VL-8B on
# an H200
MOST_AHEAD = 1024
MOST_AT_ONCE = 4  # see ``Images.encode_next``
NO_TOKENS = 1e-6  # a sum of image tokens up to this is 0 with rounding errors
NUMBERS = 2**31 - 1  # first number of an image content; larger than every token id, within int32


class Images:
    """The images of all requests, and the memory of their features on the device.

    Invariant: the features that running rows need and the features that were computed have at most ``limit`` bytes
    together."""

    def __init__(self, wiring: ImageWiring, vocab: int, token_bytes: int) -> None:
        """Start without images.  ``token_bytes`` are the bytes of the features of one token."""
        self.wiring = wiring
        self.vocab = vocab
        self.token_bytes = token_bytes
        self.limit = wiring.cache_mb << 20
        # image contents that new requests with the same image share, the least recently requested
        # first
        self.contents: OrderedDict[ContentKey, Content] = OrderedDict()
        # number -> content whose features are on the device and that no running row needs, the
        # least recently used first; and the sum of the bytes of these features
        self.idle: OrderedDict[int, Content] = OrderedDict()
        self.idle_bytes = 0
        # sequence in a slot -> image contents whose features it still needs
        self.held: dict[Seq, list[Content]] = {}
        self.used = 0  # bytes of features that are on the device or reserved there
        self.feature_bytes = 0  # of encoded contents
        # images whose features the device computes from the next delta on, and the number of steps
        # that compute them
        self.encodes: list[tuple[Content, PreparedImage, int]] = []
        self.step = 0  # id of the step that is planned
        # the last image whose features several steps compute
        self.divided: Content | None = None
        # id of a planned step -> (image tokens that it encodes, mean tokens of their images)
        self.work: dict[int, tuple[float, float]] = {}
        self.frees: list[int] = []  # numbers, likewise
        self.encoded = self.reused = self.evicted = 0
        self._next = 0

    @classmethod
    def of(cls, wiring: Wiring, capacity: Capacity) -> Images | None:
        """Return the object that manages an engine's images, None if the engine serves no images."""
        if not wiring.images.max_images or not capacity.image_bytes:
            return None
        return cls(wiring.images, capacity.vocab_size, capacity.image_bytes)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> np.ndarray:
        """Set the ``contents`` of a new request, one for each of its images.

        Return the prompt as tokens of the prefix cache, in which the number of an image's content replaces its
        placeholder tokens."""
        keyed = request.prompt.copy()
        for placed in request.images:
            content = self._content(request.salt, placed.image)
            content.requests += 1
            request.contents += (content,)
            keyed[placed.position : placed.end] = self.vocab + content.number
        return keyed

    def end(self, request: Request) -> None:
        """Count the images of a request as used by one request less, because it has ended or was refused."""
        for content in request.contents:
            content.requests -= 1

    def _content(self, salt: tuple[str, ...], image: PreparedImage) -> Content:
        """Return the content of an image for requests with this salt, a new one if there is none, and mark it as the
        most recently requested.  RequestError if the engine has used up all numbers of contents."""
        key = salt, image.digest
        content = self.contents.get(key)
        if content is None:
            self._forget_some()
            if self.vocab + self._next >= NUMBERS:
                raise RequestError("this engine has read too many images; start it again", "images")
            content = Content(self._next, image.tokens * self.token_bytes, key)
            self.contents[key] = content
            self._next += 1
        self.contents.move_to_end(key)
        return content

    def _forget_some(self) -> None:
        """Remove the least recently requested contents without a request, if there are more than MAX_CONTENTS."""
        if len(self.contents) < MAX_CONTENTS:
            return
        unused = (one for one in self.contents.values() if not one.requests)
        for one in list(islice(unused, MAX_CONTENTS // 2)):
            self._unlist(one)

    def _unlist(self, content: Content) -> None:
        """Leave this content to its present rows, so that later requests with the same image do not use it."""
        if not content.listed:
            return
        content.listed = False
        del self.contents[content.key]
        if content.number in self.idle:
            self._free(self._wake(content))

    # ---- slots -------------------------------------------------------------------------------------------------------

    def place(self, seq: Seq) -> bool:
        """Reserve device memory for the image features of a sequence that enters a slot, and return True.  Return False
        if there is no room because running rows need the memory."""
        if not seq.request.images:
            return True
        wanted = list(dict.fromkeys(seq.request.contents))
        need = sum(one.size for one in wanted if not one.rows and not one.encoded)
        kept = sum(one.size for one in wanted if one.number in self.idle)
        if self.used + need - (self.idle_bytes - kept) > self.limit:
            return False
        self._hold(seq, wanted)
        while self.used > self.limit:
            oldest = next(iter(self.idle.values()))
            self._free(self._wake(oldest))
            self.evicted += 1
        return True

    def share(self, seq: Seq, computed: int) -> None:
        """Reserve the image features for a branch that forks from a running row with ``computed`` tokens, if these
        tokens do not include all images."""
        images = seq.request.images
        if images and computed < images[-1].end:
            self._hold(seq, list(dict.fromkeys(seq.request.contents)))

    def _hold(self, seq: Seq, contents: list[Content]) -> None:
        """Record that a sequence in a slot needs the features of these contents.  Contents without other users count as
        used memory."""
        for one in contents:
            if not one.rows and not one.encoded:
                self.used += one.size
            if one.number in self.idle:
                self._wake(one)
            one.rows += 1
        self.held[seq] = contents

    def leave(self, seq: Seq) -> None:
        """Record that a sequence does not need its image features any longer.

        The features stay on the device until other images need the room."""
        for one in self.held.pop(seq, ()):
            one.rows -= 1
            if one.rows:
                continue
            if not one.encoded:
                self.used -= one.size
            elif one.listed:
                self.idle[one.number] = one
                self.idle_bytes += one.size
            else:
                self._free(one)

    def _wake(self, content: Content) -> Content:
        """Remove an image content from the cache of those that no running row needs, and return it."""
        del self.idle[content.number]
        self.idle_bytes -= content.size
        return content

    def _free(self, content: Content) -> None:
        """Free the features of a content that no running row needs.  The device frees the memory with the next
        delta."""
        self._cut(content)
        content.encoded = content.ahead = False
        self.used -= content.size
        self.feature_bytes -= content.size
        self.frees.append(content.number)

    def lose(self, numbers: Iterable[int]) -> None:
        """Record that the device may lack the features of images.

        Rows that reach one of these images compute its features again, and later requests with the image receive a new
        number.
        """
        held = chain.from_iterable(self.held.values())
        contents = {one.number: one for one in chain(self.contents.values(), held)}
        for number in numbers:
            self.frees.append(number)
            content = contents.get(number)
            if content is None:
                continue
            self._unlist(content)
            if content.encoded:
                self._cut(content)
                content.encoded = content.ahead = False
                self.feature_bytes -= content.size

    # ---- steps -------------------------------------------------------------------------------------------------------

    def reach(self, slots: Slots, at: np.ndarray, q_len: np.ndarray) -> None:
        """Request the features of the images that the rows of a step reach.

        ``at`` i64 [R] are the slots of the rows.  Rows that have computed their last image release their features.
        """
        if not self.held:
            return
        for seq in list(self.held):
            if slots.computed[seq.slot] >= seq.request.images[-1].end:
                self.leave(seq)
        first = slots.computed[at]
        for slot, a, n in zip(at.tolist(), first.tolist(), q_len.tolist(), strict=True):
            seq = slots.at(slot)
            if seq not in self.held:
                continue
            request = seq.request
            for placed, content in zip(request.images, request.contents, strict=True):
                if placed.position >= a + n or placed.end <= a:
                    continue
                if not content.encoded:
                    self._encode(content, placed.image)
                    continue
                rest = self._cut(content)  # the planned step computes and reads it
                if rest:
                    self._count(self.step, rest, placed.image.tokens)
                if not content.ahead:
                    self.reused += a <= placed.position
                content.ahead = False

    @property
    def dividing(self) -> bool:
        """Return whether the planned step computes a part of an image's features, and a later one the rest."""
        one = self.divided
        return one is not None and one.encoded and one.due > self.step

    def encoded_tokens(self, seq: Seq, first: int) -> int:
        """Return the number of tokens of a sequence, from position ``first`` on, before the next image whose features
        the planned step does not find computed."""
        for placed, content in zip(seq.request.images, seq.request.contents, strict=True):
            if placed.end > first and not content.ready(self.step):
                return max(placed.position - first, 0)
        return NUMBERS

    def encode_next(
        self, slots: Slots, budget: int, steps_of: Callable[[int], int] = lambda tokens: 1
    ) -> None:
        """Request the features of the next images of the sequences in slots, before a step reads them.

        ``steps_of`` returns the number of steps that compute the features of an image with some number of tokens.  An
        image of several steps is encoded alone.

        Together the images have at most ``budget`` tokens, and at most MOST_AHEAD times half the number of sequences
        that wait for features.  This factor is at least 1 and at most MOST_AT_ONCE.  A single image may have more.
        Encoding images of several sequences in one step delays the decoding rows as long in sum, but in fewer steps.
        """
        if self.dividing:
            return
        waiting = sum(
            self.encoded_tokens(seq, int(slots.computed[seq.slot])) < NUMBERS for seq in self.held
        )
        left = budget = min(budget, MOST_AHEAD * min(max(waiting // 2, 1), MOST_AT_ONCE))
        for seq in self.held:
            first = slots.computed[seq.slot]
            for placed, content in zip(seq.request.images, seq.request.contents, strict=True):
                if placed.end <= first or content.encoded:
                    continue
                if placed.image.tokens > left < budget:
                    return
                steps = steps_of(placed.image.tokens)
                if steps > 1 and left < budget:
                    return
                left -= placed.image.tokens
                self._encode(content, placed.image, steps)
                content.ahead = True
                if steps > 1:
                    self.divided = content
                    return

    def _encode(self, content: Content, image: PreparedImage, steps: int = 1) -> None:
        """Request that the device computes the features of an image in ``steps`` steps from the planned one on."""
        content.encoded = True
        content.due = self.step + steps
        content.steps = steps
        for step in range(self.step, content.due):
            self._count(step, image.tokens / steps, image.tokens)
        self.feature_bytes += content.size
        self.encoded += 1
        self.encodes.append((content, image, steps))

    def _count(self, step: int, tokens: float, context: float) -> None:
        """Add ``tokens`` of an image to those that a step encodes, or remove them if the number is negative.
        ``context`` is the number of tokens of the image."""
        known, mean = self.work.get(step, (0.0, 0.0))
        total = known + tokens
        if total > NO_TOKENS:
            self.work[step] = total, (known * mean + tokens * context) / total
        else:
            self.work.pop(step, None)

    def _cut(self, content: Content) -> float:
        """Remove the shares of an image from the steps after the planned one, which computes them instead.
        Return the number of their tokens."""
        context = content.size / self.token_bytes
        share = context / content.steps
        later = range(self.step + 1, content.due)
        for step in later:
            self._count(step, -share, context)
        content.due = min(content.due, self.step + 1)
        return len(later) * share

    def changed_by(self, plan: StepPlan) -> bool:
        """Return whether a step that has not been noted yet computes or frees features, so that its time is not that of
        its tokens alone."""
        return len(plan.delta.image) > 0 or plan.id in self.work

    def encoded_by(self, step: int) -> tuple[float, float] | None:
        """Remove and return the image tokens that a finished step encoded, and the mean tokens of their images; None if
        the step encoded none."""
        for earlier in [one for one in self.work if one < step]:
            del self.work[earlier]
        return self.work.pop(step, None)

    @property
    def undivided(self) -> bool:
        """Return whether the tokens of an image attend to each other in both directions, so that one step must compute
        all of them together."""
        return self.wiring.facts.span > 0

    def changes(self) -> dict[str, np.ndarray]:
        """Return the fields ``image`` and ``pixels`` of the next ``plan.Delta``, empty without changes, and clear the
        recorded changes."""
        if not self.encodes and not self.frees:
            return {}
        rows = [(number, 0, 0, 0, 0, 0, 0) for number in self.frees]
        arrays = [image.values for _, image, _ in self.encodes]
        rows += [
            (one.number, values.nbytes, values.itemsize, *image.shape, steps)
            for (one, image, steps), values in zip(self.encodes, arrays, strict=True)
        ]
        parts = [values.view(np.uint8) for values in arrays]
        pixels = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        self.encodes = []
        self.frees = []
        return {"image": np.array(rows, np.int32), "pixels": pixels}

    def ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return the model's token ids for tokens i32 [n] of the prefix cache, in which numbers of image contents stand
        for placeholder tokens."""
        return np.where(tokens >= self.vocab, np.int32(self.wiring.facts.token), tokens)

    def stats(self) -> dict[str, Any]:
        """Return the entries of ``Engine.stats`` about images: counters, and bytes of features."""
        figures = {
            "encoded": self.encoded,
            "reused": self.reused,
            "evicted": self.evicted,
            "feature_bytes": self.feature_bytes,
        }
        return {"images": figures}


def whole_images(request: Request, first: int, tokens: int, extend: bool) -> int:
    """Return the length of a chunk of about ``tokens`` tokens from ``first`` on that does not end inside an image.

    The chunk ends before an image that it would cut.  A chunk that starts inside an image is extended to the end of the
    image, or is empty without ``extend``; the tokens before its start are cached and were computed with the whole
    image.
    """
    end = first + tokens
    for placed in request.images:
        if placed.position < end < placed.end:
            if placed.position > first:
                return placed.position - first
            return placed.end - first if extend else 0
    return tokens


def lost_image(request: Request, first: int, upto: int, lost: Container[int]) -> int | None:
    """Return the number of an image of ``lost`` that the tokens ``[first, upto)`` of a request read, None without
    one."""
    for placed, content in zip(request.images, request.contents, strict=True):
        if content.number in lost and placed.position < upto and placed.end > first:
            return content.number
    return None


def join_rows(seqs: list[Seq]) -> np.ndarray:
    """Return ``plan.Join.image`` (the positions of the images) for sequences that enter a slot."""
    rows = [
        (i, content.number, placed.position, placed.image.tokens, *placed.image.shape)
        for i, seq in enumerate(seqs)
        for placed, content in zip(seq.request.images, seq.request.contents, strict=True)
    ]
    return np.array(rows, np.int32).reshape(-1, 7)


def check_images(
    request: Request, images: Images | None, wiring: ImageWiring, capacity: Capacity
) -> None:
    """Raise RequestError if the engine reads no images, if there are too many, or if parameters of the request exclude
    images."""
    if not request.images:
        return
    if images is None:
        why = wiring.why_not or capacity.no_images or "the executor reads none"
        raise RequestError(f"images: this engine reads text only ({why})", "images")
    most = images.wiring.max_images
    if len(request.images) > most:
        raise RequestError(
            f"{len(request.images)} images; expected at most max_images={most}", "images"
        )
    p = request.params
    wide = "beam_width" if p.beam_width is not None else "guidance_scale"
    refused = {
        "taps": bool(request.taps),
        "pooling": request.pooling is not None,
        wide: p.beam_width is not None or "guidance_scale" in p.extra,
    }
    if name := next((name for name, is_set in refused.items() if is_set), None):
        raise RequestError(f"{name} with images is not implemented: leave one of them out", name)
    sizes = {placed.image.digest: placed.image.tokens for placed in request.images}
    need = sum(sizes.values()) * images.token_bytes
    if need > images.limit:
        raise RequestError(
            f"the features of the images need {need} bytes; expected at most image_cache_mb="
            f"{images.wiring.cache_mb} MiB: use fewer or smaller images, or raise it",
            "images",
        )
