"""The engine's table of images: numbers by content, and the bytes of features."""

from types import SimpleNamespace

import numpy as np

from minivllm.core.engine import images as book
from minivllm.core.engine.image_content import digests_by_block
from minivllm.core.engine.images import Images
from minivllm.core.engine.request import Seq
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import PlacedImage, PreparedImage

BYTES = 16  # bytes of the features of a token


def images_of(tokens):
    """Return a book with room for the features of ``tokens`` tokens."""
    made = Images(ImageWiring(max_images=4, cache_mb=1), 100, BYTES)
    made.limit = tokens * BYTES
    return made


def request_of(made, *digests, tokens=5):
    """Return a request with images of ``tokens`` tokens each, one behind the other."""
    shape, values = (1, 1, 1), np.zeros(1, np.float32)
    prepared = [PreparedImage(values, shape, tokens, bytes([digest])) for digest in digests]
    placed = tuple(PlacedImage(image, i * tokens) for i, image in enumerate(prepared))
    prompt = np.zeros(len(digests) * tokens + 1, np.int32)
    request = SimpleNamespace(prompt=prompt, images=placed, contents=(), salt=("", ""))
    made.begin(request)
    return request


class Rows:
    """The columns of slots that the book reads."""

    def __init__(self, *seqs):
        self.seqs, self.computed = seqs, np.zeros(len(seqs), np.int32)
        for slot, seq in enumerate(seqs):
            seq.slot = slot

    def at(self, slot):
        return self.seqs[slot]

    def compute(self, made, slot, tokens):
        """Compute the next tokens of a row, and return the numbers and bytes of the images in the delta."""
        made.reach(self, np.array([slot]), np.array([tokens]))
        self.computed[slot] += tokens
        return [row[:2] for row in made.changes().get("image", np.empty((0, 5))).tolist()]


def seq_of(request):
    """Return a sequence of a request."""
    return Seq(0, request, 0, 0)


def sums(made):
    """Return (used, feature_bytes, idle_bytes) after a comparison with the sums over all contents."""
    contents = {one.number: one for one in made.contents.values()}
    contents |= {one.number: one for held in made.held.values() for one in held}
    assert made.used == sum(one.size for one in contents.values() if one.rows or one.encoded)
    assert made.feature_bytes == sum(one.size for one in contents.values() if one.encoded)
    idle = {one.number for one in contents.values() if one.encoded and not one.rows}
    assert idle == set(made.idle) and made.idle_bytes == sum(one.size for one in made.idle.values())
    return made.used // BYTES, made.feature_bytes // BYTES, made.idle_bytes // BYTES


def test_contents_of_live_requests_keep_their_number_and_others_are_forgotten(monkeypatch):
    monkeypatch.setattr(book, "MAX_CONTENTS", 8)
    made = images_of(10)
    waiting = request_of(made, 0)
    for digest in range(1, 60):
        made.end(request_of(made, digest))
    assert len(made.contents) <= 8
    assert request_of(made, 0).contents == waiting.contents
    # features of forgotten contents are freed, so an image of the largest size has room
    seq = seq_of(waiting)
    assert made.place(seq)
    assert Rows(seq).compute(made, 0, 6) == [[waiting.contents[0].number, 4]]
    made.leave(seq)
    assert sums(made) == (5, 5, 5)
    made.end(waiting)
    for digest in range(60, 90):
        made.end(request_of(made, digest))
    large = seq_of(request_of(made, 99, tokens=10))
    assert made.place(large) and sums(made) == (10, 0, 0)


def test_a_content_that_is_forgotten_while_a_row_reads_it_is_freed_with_the_row():
    made = images_of(10)
    request = request_of(made, 1)
    seq = seq_of(request)
    rows = Rows(seq)
    assert made.place(seq)
    rows.compute(made, 0, 2)
    made.lose([request.contents[0].number])
    again = request_of(made, 1)
    assert again.contents[0].number != request.contents[0].number
    assert rows.compute(made, 0, 2) == [[0, 0], [0, 4]]  # the features are freed, and computed again for the row
    made.leave(seq)
    assert sums(made) == (0, 0, 0) and made.frees == [0]


def test_rows_release_features_behind_their_last_image_and_the_least_recently_used_make_room():
    made = images_of(10)
    first, second, third = (seq_of(request_of(made, digest)) for digest in (1, 2, 3))
    rows = Rows(first, second, third)
    assert made.place(first) and made.place(second) and not made.place(third)
    rows.compute(made, 0, 6)
    rows.compute(made, 1, 5)
    rows.compute(made, 0, 1)  # a decode step of the first row keeps its slot
    assert second not in made.held and first not in made.held
    assert sums(made) == (10, 10, 10)
    assert made.place(third) and made.evicted == 1
    number = first.request.contents[0].number
    assert number not in made.idle and made.frees == [number]
    made.leave(first)  # a preempted row reserves again
    made.leave(third)
    assert made.place(first) and sums(made) == (10, 5, 5)


def test_branches_hold_features_only_before_the_end_of_the_last_image():
    made = images_of(10)
    request = request_of(made, 1)
    lead, early, late = (seq_of(request) for _ in range(3))
    assert made.place(lead)
    made.share(early, 4)
    made.share(late, 5)
    assert list(made.held) == [lead, early] and request.contents[0].rows == 2


def test_placing_and_counting_read_no_other_contents():
    made = images_of(10000)
    for digest in range(100):
        seq = seq_of(request_of(made, digest))
        rows = Rows(seq)
        assert made.place(seq)
        rows.compute(made, 0, 6)
        made.leave(seq)

    class Counted(type(made.contents)):
        def values(self):
            raise AssertionError("a step reads all contents")

    made.contents = Counted(made.contents)
    seq = seq_of(request_of(made, 7))
    assert made.place(seq) and made.stats()["images"]["feature_bytes"] > 0


def test_a_block_has_the_digests_of_exactly_the_images_that_overlap_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 7))
        images, at = [], 0
        for number in range(int(rng.integers(0, 5))):
            at += int(rng.integers(0, 6))
            made = PreparedImage(np.zeros(1), (1, 1, 1), int(rng.integers(1, 12)), bytes([number]) * 32)
            images.append(PlacedImage(made, at))
            at += made.tokens
        first = int(rng.integers(0, 4))
        last = first + int(rng.integers(0, 12))
        expected = {}
        for i in range(first, last):
            for one in images:
                if set(range(one.position, one.end)) & set(range(i * size, i * size + size)):
                    where = np.array([one.position - i * size, one.image.tokens], "<i4").tobytes()
                    expected[i] = expected.get(i, b"") + one.image.digest + where
        assert digests_by_block(images, size, first, last) == expected
