"""Files of images that come again are not decoded again, within a limit of bytes and for one client."""

import io

import numpy as np
import pytest

pytest.importorskip("PIL.Image")

from PIL import Image

from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.core.interfaces.images import SEGMENT, PreparedImage, digest_of
from minivllm.errors import RequestError
from minivllm.frontend.prompts import read_prompt
from minivllm.runtime.images import decode
from minivllm.runtime.images.kept import KeptImages, key_of
from minivllm.runtime.images.reader import ImageReader


class Pixels:
    """An encoder whose values are the pixels."""

    def prepare_pixels(self, pixels):
        return None

    def prepare(self, image):
        return np.array(image), (1, image.height, image.width), 3


def reader(decoded):
    """Return a reader of images, and append each decoded file to ``decoded``."""

    def count(source):
        decoded.append(source)
        return decode.decoded(source)

    made = ImageReader(ImageWiring(max_images=4), None, ".", {}, 100, decode=count)
    made._encoder = Pixels()
    return made


def png(seed):
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 7, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def test_a_file_that_comes_again_is_not_decoded_and_gives_the_same_image():
    decoded = []
    made = reader(decoded)
    first, other, again = (made.prepare(png(seed)) for seed in (1, 2, 1))
    assert again is first and other.digest != first.digest and len(decoded) == 2
    assert made.prepare(png(1), "another client").digest == first.digest and len(decoded) == 3


def test_pixels_of_an_image_object_are_read_each_time():
    """The program may change the object between two requests."""
    decoded = []
    made, image = reader(decoded), Image.new("RGB", (5, 4))
    first = made.prepare(image).digest
    image.putpixel((1, 1), (9, 9, 9))
    assert made.prepare(image).digest != first and len(decoded) == 2


def test_kept_images_stay_below_their_limit_and_the_least_recently_used_goes_first():
    def image(number, size):
        return PreparedImage(np.zeros(size, np.uint8), (1, 1, 1), 1, bytes([number]))

    kept = KeptImages(limit=100)
    for number in range(3):
        kept.put(bytes([number]), image(number, 30))
    assert kept.get(b"\0") is not None
    kept.put(b"\3", image(3, 30))
    assert [kept.get(bytes([n])) is None for n in range(4)] == [False, True, False, False]
    kept.put(b"\3", image(3, 90))
    assert kept.bytes == 90 and kept.get(b"\3") is not None and kept.get(b"\0") is None
    kept.put(b"\4", image(4, 101))
    assert kept.get(b"\4") is None and kept.bytes == 90


def test_keys_depend_on_each_part_and_on_their_borders():
    parts = [("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), ("a", b"bd")]
    assert len({key_of(*one) for one in parts}) == len(parts)
    assert key_of("a", "bc") == key_of("a", b"bc")


def test_each_byte_of_a_large_array_and_its_shape_change_the_digest():
    values = np.random.default_rng(0).integers(0, 256, 2 * SEGMENT + 5, np.uint8)
    shape = (1, 1, len(values))
    found = {digest_of(values, shape), digest_of(values, (1, len(values), 1)), digest_of(values[:-1], shape)}
    for at in (0, SEGMENT - 1, SEGMENT, 2 * SEGMENT + 4):
        other = values.copy()
        other[at] ^= 1
        found.add(digest_of(other, shape))
    segments = [values[SEGMENT:], values[:SEGMENT]]
    found.add(digest_of(np.concatenate(segments), shape))
    assert len(found) == 8 and digest_of(values.copy(), shape) in found


def test_pixels_that_take_too_much_memory_are_refused():
    """A processor whose file of settings has a wrong size may allocate without bound."""

    class Endless(Pixels):
        def prepare(self, image):
            raise MemoryError

    made = ImageReader(ImageWiring(max_images=4, facts=ImageFacts(3)), None, ".", {}, 100)
    made._encoder = Endless()
    prompt = {"prompt_token_ids": [5, 3, 6], "multi_modal_data": {"image": np.zeros((4, 4, 3), np.uint8)}}
    with pytest.raises(
        RequestError, match="image: there is no memory to prepare it; expected a smaller image"
    ) as caught:
        read_prompt(prompt, None, made)
    assert caught.value.param == "images"
    made._encoder = Pixels()
    assert len(read_prompt(prompt, None, made).images) == 1
