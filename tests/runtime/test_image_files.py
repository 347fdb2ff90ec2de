"""Files of images of ``LLM`` and ``AsyncLLM`` are decoded in processes with limits, to the same pixels."""

import asyncio
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.runtime.images import confined, files
from minivllm.runtime.images.decode import MAX_BYTES, decoded
from minivllm.runtime.images.files import FileDecoder
from minivllm.testing.encoder import image_checkpoint

pytestmark = pytest.mark.skipif(not files.CONFINES, reason="processes have no limits here")
ONE = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture
def decoder():
    made = FileDecoder()
    yield made
    made.close()


def pixels(width=60, height=40, seed=0, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def file_of(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def opened(data, **draft):
    """Return a PIL image whose file is not read yet."""
    image = Image.open(io.BytesIO(data))
    if draft:
        image.draft(**draft)
    return image


def sources():
    exif = Image.Exif()
    exif[0x112] = 6
    photo, clear = Image.fromarray(pixels()), Image.fromarray(pixels(channels=4), "RGBA")
    data = [file_of(photo), file_of(photo, "JPEG", exif=exif), file_of(photo.convert("P"), "GIF"), file_of(clear)]
    data.append(file_of(photo, "WEBP"))
    read = opened(data[1])
    read.load()
    frames = opened(file_of(photo, "TIFF"))
    gray = opened(file_of(Image.fromarray(pixels(400, 300)), "JPEG"), mode="L", size=(100, 80))
    return [*data, *map(opened, data), read, frames, gray, pixels(), photo, clear]


def test_pixels_are_those_of_this_process_from_several_threads(decoder):
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(decoder.decode, sources() + sources()))
    for a, b in zip(found, sources() + sources(), strict=True):
        right = decoded(b)
        assert a.mode == "RGB" and a.size == right.size and a.tobytes() == right.tobytes()


def test_the_unread_file_of_a_pil_image_is_not_read_in_this_process(decoder, monkeypatch):
    image = opened(file_of(Image.fromarray(pixels()), "JPEG"))
    at = image.fp.tell()
    monkeypatch.setattr(files, "decoded", None)
    assert decoder.decode(image).size == (60, 40)
    assert image.tile and image.fp.tell() == at


def huge(width, height):
    """Return a PNG that claims a size and has the pixels of one row."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(3 * width + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def animation():
    frames = [Image.fromarray(pixels(seed=seed)).convert("P") for seed in range(3)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


REFUSED = {
    "100 megapixels": (huge(10_000, 10_000), "10000 x 10000 pixels"),
    "bomb": (huge(100_000, 100_000), "pixels"),
    "animation": (animation(), "an animation"),
    "no picture": (b"no picture", "no picture that can be read"),
    "cut": (file_of(Image.fromarray(pixels()))[:900], "no picture that can be read"),
    "bytes": (bytes(MAX_BYTES + 1), "expected at most"),
}


def test_a_pil_image_of_a_large_file_is_read_as_its_pixels(decoder):
    """The limit of 20 MiB is for files that a client sends; the pixels of this image are allowed."""
    file = io.BytesIO()
    Image.new("RGB", (3000, 2400), (9, 8, 7)).save(file, "BMP")
    assert len(file.getvalue()) > MAX_BYTES
    assert np.asarray(decoder.decode(Image.open(file)))[5, 7].tolist() == [9, 8, 7]
    with pytest.raises(RequestError, match="expected at most"):
        decoder.decode(file.getvalue())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_those_of_this_process(decoder, name):
    data, reason = REFUSED[name]
    with pytest.raises(RequestError, match=reason) as info:
        decoder.decode(data)
    assert info.value.param == "images"
    if name in ("animation", "100 megapixels"):
        with pytest.raises(RequestError, match=reason):
            decoder.decode(opened(data))
    with pytest.raises(RequestError, match=reason):
        decoded(data)


def test_a_loaded_frame_of_an_animation_is_refused_and_its_copy_is_read(decoder):
    image = opened(animation())
    image.load()
    with pytest.raises(RequestError, match="as copy"):
        decoder.decode(image)
    assert decoder.decode(image.copy()).size == (60, 40)


LIMITS = [("SECONDS", 0.02, "CPU time"), ("MEGABYTES", 4, "of memory")]


@pytest.mark.parametrize(("limit", "value", "reason"), LIMITS, ids=["seconds", "megabytes"])
def test_a_file_beyond_a_limit_is_refused_and_others_are_read(decoder, monkeypatch, limit, value, reason):
    large = file_of(Image.fromarray(pixels(2000, 2000)))
    small = file_of(Image.fromarray(pixels()))
    assert decoder.decode(small).size == (60, 40)
    with monkeypatch.context() as context:
        context.setattr(confined, limit, value)
        for source in (large, opened(large)):
            with pytest.raises(RequestError, match=reason):
                decoder.decode(source)
    assert decoder.decode(small).size == (60, 40) and decoder.decode(large).size == (2000, 2000)


def prompt(picture):
    return {"prompt_token_ids": [5, 17, 317, 319, 316, 9], "multi_modal_data": {"image": picture}}


def test_engines_decode_files_there_and_end_the_processes():
    options = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "num_kvcache_blocks": 60}
    folder, array = str(image_checkpoint("qwen3_vl")), pixels(64, 64)
    data = file_of(Image.fromarray(array))

    async def stream(llm, picture):
        return [token async for piece in llm.generate(prompt(picture), ONE) for token in piece.token_ids]

    async def both(llm):
        return [await stream(llm, picture) for picture in (array, data, opened(data))]

    with LLM(folder, max_model_len=96, **options) as llm:
        outputs = llm.generate([prompt(one) for one in (array, data, opened(data))], ONE, use_tqdm=False)
        found = [output.outputs[0].token_ids for output in outputs]
        process = llm._files._confined._process
        assert process.poll() is None and llm.stats()["images"]["encoded"] == 1
        with pytest.raises(RequestError, match="pixels"):
            llm.generate(prompt(huge(10_000, 10_000)), ONE, use_tqdm=False)
    assert process.poll() is not None and found[0] == found[1] == found[2]
    llm = AsyncLLM(folder, max_model_len=96, **options)
    try:
        assert asyncio.run(both(llm)) == found
        process = llm._files._confined._process
    finally:
        llm.close()
    assert process.poll() is not None
