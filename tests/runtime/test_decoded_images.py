"""Images of clients are decoded to the pixels that a viewer shows, or refused."""

import io
import struct
import threading

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.errors import RequestError
from minivllm.runtime.images.decode import decoded
from minivllm.runtime.images.placing import check_placeholders

GRAY = Image.fromarray((np.arange(200 * 200) % 251).astype(np.uint8).reshape(200, 200))


def file_of(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(source):
    image = decoded(source)
    assert image.mode == "RGB"
    return np.asarray(image)


def test_sixteen_bits_of_gray_become_eight():
    ramp = Image.fromarray((np.arange(256).reshape(16, 16) * 257).astype(np.uint16))
    assert pixels(file_of(ramp))[..., 0].ravel().tolist() == list(range(256))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_of_a_range_that_is_not_known_are_refused(mode):
    with pytest.raises(RequestError, match=f"PIL mode {mode}"):
        decoded(Image.new(mode, (4, 4)))


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    palette = Image.new("P", (4, 4))
    palette.putpalette([0, 0, 0, 255, 0, 0])
    for source in (clear, file_of(clear), file_of(palette, transparency=0), file_of(clear.convert("LA"))):
        assert (pixels(source) == 255).all()
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert set(pixels(half).ravel().tolist()) == {127}


def test_photos_are_turned_as_their_exif_data_say():
    exif = Image.Exif()
    exif[0x112] = 6
    data = file_of(Image.new("RGB", (20, 10)), "JPEG", exif=exif)
    assert decoded(data).size == decoded(Image.open(io.BytesIO(data))).size == (10, 20)


def test_threads_share_an_image_whose_file_is_not_read_yet():
    data = file_of(GRAY.resize((1500, 1500)).convert("P"))
    for _ in range(3):
        image, found = Image.open(io.BytesIO(data)), []

        def read(image=image, found=found):
            found.append(pixels(image).sum())

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [pixels(data).sum()] * 4


def test_a_broken_file_behind_a_pil_image_is_refused():
    with pytest.raises(RequestError, match="the PIL image cannot be read"):
        decoded(Image.open(io.BytesIO(file_of(GRAY)[:-500])))


def test_an_animation_is_refused_after_its_second_frame(monkeypatch):
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    from PIL.GifImagePlugin import GifImageFile

    sought, real = [], GifImageFile._seek
    monkeypatch.setattr(GifImageFile, "_seek", lambda file, n, *more: sought.append(n) or real(file, n, *more))
    with pytest.raises(RequestError, match="an animation"):
        decoded(head + frame * 1000 + b"\x3b")
    assert max(sought) <= 1


def test_a_prompt_has_one_placeholder_for_each_image():
    ids = np.array([1, 7, 7, 2], np.int32)
    check_placeholders(ids, 2, ImageFacts(7))
    for count in (0, 1, 3):
        with pytest.raises(RequestError, match=f"has 2 placeholders of images .token id 7. and {count} images"):
            check_placeholders(ids, count, ImageFacts(7))
