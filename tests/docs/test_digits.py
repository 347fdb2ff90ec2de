"""The example that trains a model to read drawn digits: new digits are read, together and from files of a client."""

import importlib.util
import io
import random
from pathlib import Path

import pytest

from minivllm import LLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.slow
def test_a_model_that_was_trained_here_reads_digits_that_it_has_not_seen(tmp_path):
    pytest.importorskip("PIL")
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLE)
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    assert digits.train(tmp_path, steps=300) > 0.8
    rng = random.Random(5)
    requested = [rng.randrange(10) for _ in range(60)]
    pictures = [digits.draw(digit, rng) for digit in requested]
    files = []
    for picture in pictures:
        out = io.BytesIO()
        picture.save(out, "PNG")
        files.append(out.getvalue())
    with LLM(str(tmp_path), encoder=digits.DigitEncoder, device="cpu", dtype="float32") as llm:
        found = digits.read(llm, pictures)
        assert sum(a == b for a, b in zip(found, requested, strict=True)) > 48
        assert digits.read(llm, files) == found
        assert llm.stats()["images"]["encoded"] == len(pictures)
