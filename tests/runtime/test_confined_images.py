"""Images of clients are prepared in processes, whose limits and failures leave other images alone."""

import asyncio
import base64
import io
import time

import numpy as np
import pytest

pytest.importorskip("PIL")

from costly_encoders import BLUE, GREEN, RED, Costly
from PIL import Image

from minivllm.core.interfaces.encoder import ImageFacts
from minivllm.core.interfaces.executor import ImageWiring
from minivllm.errors import RequestError, ResourceError
from minivllm.registration.spec import Part
from minivllm.runtime.images import confined
from minivllm.runtime.images.confined import ConfinedImages
from minivllm.runtime.images.reader import ImageReader
from minivllm.runtime.text.image_parts import BASE64, OBJECT, URL, ImageSource

CONFIG = {"image_token_id": 3, "hidden_size": 8}


def reader():
    part = Part("Costly", f"{Costly.__module__}:Costly")
    return ImageReader(ImageWiring(4, facts=ImageFacts(3)), part, ".", CONFIG, 100)


def base64_of(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def source(colour=None, seed=0):
    """Return the source of a picture of one colour, or of random pixels."""
    if colour is not None:
        return ImageSource(BASE64, base64_of(Image.new("RGB", (40, 40), colour)), "image/png")
    pixels = np.random.default_rng(seed).integers(0, 200, (30, 50, 3), np.uint8)
    return ImageSource(URL, "data:image/png;base64," + base64_of(Image.fromarray(pixels)))


async def closed(images, work):
    try:
        return await work
    finally:
        await images.close()


def test_images_of_workers_are_those_of_this_process():
    images = ConfinedImages(reader())
    sources = [source(seed=seed) for seed in range(5)]
    sources.append(ImageSource(OBJECT, np.zeros((20, 20, 3), np.uint8)))

    async def prepare():
        return await asyncio.gather(*map(images.prepare, sources + sources))

    found = asyncio.run(closed(images, prepare()))
    right = [reader().prepare(one) for one in sources]
    for a, b in zip(found, right + right, strict=True):
        assert np.array_equal(a.values, b.values) and (a.shape, a.tokens, a.digest) == (b.shape, b.tokens, b.digest)
    assert [a is b for a, b in zip(found[:6], found[6:], strict=True)] == [True] * 6, "equal images share their values"


REFUSED = {
    "data:image/png;base64,AAAA": "no picture that can be read",
    "https://example.com/cat.png": "remote and local files are not opened",
    "data:image/tiff;base64,AAAA": "media type",
    "data:image/png;base64,\udc80": "malformed",
    "data:image/png;base64," + "A" * (confined.LONGEST + 1): "more than 20 MiB",
}


def test_refusals_are_those_of_this_process():
    images = ConfinedImages(reader())

    async def run():
        for value, reason in REFUSED.items():
            with pytest.raises(RequestError, match=reason) as info:
                await images.prepare(ImageSource(URL, value))
            assert info.value.param == "images"

    asyncio.run(closed(images, run()))


def test_an_image_that_exceeds_a_limit_is_refused_and_the_event_loop_and_other_images_go_on(monkeypatch):
    monkeypatch.setattr(confined, "SECONDS", 1.0)
    monkeypatch.setattr(confined, "MEGABYTES", 400)
    images = ConfinedImages(reader())

    async def run():
        await images.prepare(source())
        ticks, late = 0, 0.0
        hanging = asyncio.gather(*(images.prepare(source(one)) for one in (RED, GREEN)), return_exceptions=True)
        while not hanging.done():
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            late = max(late, time.monotonic() - begun)
            ticks += 1
        more = [await images.prepare(source(seed=seed)) for seed in range(3)]
        return hanging.result(), ticks, more

    (red, green), ticks, more = asyncio.run(closed(images, run()))
    assert isinstance(red, RequestError) and "more than 1 s of CPU time" in str(red)
    assert isinstance(green, RequestError) and "more than 400 MiB of memory" in str(green)
    assert ticks > 20 and [one.tokens for one in more] == [16] * 3


def test_a_client_that_leaves_does_not_free_its_worker_early(monkeypatch):
    monkeypatch.setattr(confined, "SECONDS", 2.0)
    images = ConfinedImages(reader())

    async def run():
        await images.prepare(source())
        leaving = [asyncio.create_task(images.prepare(source(RED))) for _ in range(confined.AT_ONCE)]
        await asyncio.sleep(0.2)
        for task in leaving:
            task.cancel()
        return await asyncio.gather(*(images.prepare(source(seed=seed)) for seed in range(4)))

    found = asyncio.run(closed(images, run()))
    assert [one.digest for one in found] == [reader().prepare(source(seed=seed)).digest for seed in range(4)]


def test_a_decoder_that_ends_its_process_fails_its_image_alone():
    images = ConfinedImages(reader())

    async def run():
        with pytest.raises(ResourceError, match="ended twice"):
            await images.prepare(source(BLUE))
        return await images.prepare(source())

    assert asyncio.run(closed(images, run())).tokens == 16


def test_the_threads_that_hash_take_no_memory_of_an_image(monkeypatch):
    """The image needs less than the limit, and the stacks of the threads more."""
    monkeypatch.setattr(confined, "MEGABYTES", 40)
    white, images = Image.fromarray(np.full((1000, 1200, 3), 255, np.uint8)), ConfinedImages(reader())
    found = asyncio.run(closed(images, images.prepare(ImageSource(BASE64, base64_of(white), "image/png"))))
    assert found.digest == reader().prepare(white).digest
