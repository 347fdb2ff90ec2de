"""Images of a frequent shape are encoded by replays, whose results are those of separate launches and stay so."""

import pytest
import torch

from minivllm.device.worker import encoder_graphs
from minivllm.device.worker.encoder_graphs import SIGHTS, EncoderGraphs

SHAPE = (1, 2, 3)


class Recorder:
    """Records no graph: a replay calls the function again, and writes its result over the result of the capture."""

    def capture(self, run):
        run()
        result = run()

        class Graph:
            def replay(self):
                result.copy_(run())

        return Graph(), result


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(encoder_graphs, "GraphRecorder", Recorder)
    return EncoderGraphs(lambda values, shape: values.view(1, -1, 1).float() * shape[2])


def test_replays_have_the_features_of_their_own_values_and_later_ones_do_not_change_them(made):
    values = [torch.arange(6, dtype=torch.uint8) + number for number in range(SIGHTS + 4)]
    found = [made(one, SHAPE) for one in values]
    assert len(made.captures) == 1
    for one, features in zip(values, found, strict=True):
        assert torch.equal(features, one.view(1, -1, 1).float() * 3)


def test_shapes_and_dtypes_have_captures_of_their_own(made):
    pixels = torch.arange(6, dtype=torch.uint8)
    for values, shape in ((pixels, SHAPE), (pixels, (1, 3, 2)), (pixels.float(), SHAPE)):
        for _ in range(SIGHTS + 1):
            assert torch.equal(made(values, shape), values.view(1, -1, 1).float() * shape[2])
    assert len(made.captures) == 3


def test_the_number_of_captures_and_the_size_of_their_images_are_bounded(made, monkeypatch):
    monkeypatch.setattr(encoder_graphs, "GRAPHS", 2)
    for count in range(1, 5):
        for _ in range(SIGHTS + 2):
            made(torch.zeros(count), SHAPE)
    assert len(made.captures) == 2
    monkeypatch.setattr(encoder_graphs, "GRAPHS", 9)
    monkeypatch.setattr(encoder_graphs, "MOST_BYTES", 4)
    for _ in range(SIGHTS + 2):
        made(torch.zeros(7), SHAPE)
    assert len(made.captures) == 2


def test_a_shape_that_cannot_be_captured_is_encoded_by_separate_launches(made, caplog):
    calls = []

    def capture(run):
        calls.append(1)
        raise RuntimeError("operation not permitted when stream is capturing")

    made.recorder.capture = capture
    for number in range(SIGHTS + 3):
        assert made(torch.full((2,), number), SHAPE)[0, 0, 0] == 3 * number
    assert len(calls) == 1 and "not permitted" in caplog.text
