"""Taps on their way to the engine's process and back: vectors that are added, and pooled values that are read."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc

import numpy as np

from minivllm import LLM, SamplingParams, Tap
from minivllm.config import load_config
from minivllm.core.engine.request import Request, Seq
from minivllm.core.engine.tap_values import Growing, RequestTaps, TapValues
from minivllm.frontend.tap_values import values_of
from minivllm.server.link import frames
from minivllm.server.link.client import LocalClient
from minivllm.server.link.engine_loop import FRAME
from minivllm.server.link.process_client import ProcessClient
from minivllm.server.link.taps import PooledTaps, PooledValues, pooled, read_values

TALE = "Once upon a time"
POINT = "layers.3.residual"


def test_taps_are_the_same_on_both_ends_of_the_link():
    adds = (Tap("a", add=[1.0, 2.0], scale=3.0), Tap("b", add=[4.0]), Tap("a", add=[5.0, 6.0]))
    requested = PooledTaps(adds, (("c", "mean"), ("a", "last"), ("c", "last")))
    frame = frames.decode(frames.encode("add", requested.header(), requested.columns())[4:])
    made = PooledTaps.of(**frame.header, **frame.columns)
    assert made.reads == requested.reads
    assert [(t.point, t.scale, t.add.tolist()) for t in made.adds] == [(t.point, t.scale, t.add.tolist()) for t in adds]
    assert [(t.point, t.read) for t in made.taps] == [
        ("a", False),
        ("b", False),
        ("a", False),
        ("c", True),
        ("a", True),
    ]


def test_values_are_the_same_on_both_ends_of_the_link():
    found = PooledValues(
        [(7, 0, 2), (7, 1, 0), (9, 0, 1)], [np.array([1, 2], "f4"), np.empty(0, "f4"), np.array([3], "f4")]
    )
    frame = frames.decode(frames.encode("frame", {}, found.columns())[4:])
    rows = [(number, sample, part.tolist()) for number, sample, part in read_values(frame.columns)]
    assert rows == [(7, 0, [1.0, 2.0]), (7, 1, []), (9, 0, [3.0])]
    assert list(read_values({})) == [] and PooledValues().columns() == {}


def growing(rows, kind=np.ndarray):
    """Return a point's values f32 [n, width] as arrays of this kind."""
    made = Growing(rows.shape[1], len(rows))
    made.add(rows)
    made.memory = made.memory.view(kind)
    return made


class Shared(np.ndarray):
    """Counts how often it is summed."""

    sums = 0

    def sum(self, *args, **more):
        Shared.sums += 1
        return super().sum(*args, **more)


def test_what_branches_share_is_summed_once_and_never_copied():
    """8 MiB of a prompt's values, and 32 branches with a few of their own."""
    rng = np.random.default_rng(0)
    prompt = rng.normal(size=(8192, 256)).astype("f4")
    params = SamplingParams.make(n=32, max_tokens=9)
    request = Request("r", np.ones(8192, np.int32), params, 0.0)
    request.tapped, request.taps = RequestTaps({0: ("a", 256)}, {}, 1), (Tap("a", read=True),)
    request.sequences = [Seq(i, request, i, 0) for i in range(32)]
    for i, seq in enumerate(request.sequences):
        own = rng.normal(size=(i % 4, 256)).astype("f4")
        values = growing(own) if i else growing(np.concatenate([prompt, own]), Shared)
        seq.tap_values = TapValues(8192 if i else 0, 0, parts={0: values})
        seq.finish_reason, seq.emitted = "stop", len(own) + 1
    wanted = [np.asarray(values_of(seq, seq.emitted)["a"]) for seq in request.sequences]
    Shared.sums = 0
    tracemalloc.start()
    try:
        found = list(pooled(request, (("a", "mean"), ("a", "last"))))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert Shared.sums == 2  # the first sequence's own, and once for all others
    assert [sample for sample, _ in found] == [i // 2 for i in range(64)]
    for i, values in enumerate(wanted):
        np.testing.assert_allclose(found[2 * i][1], values.mean(0, dtype="f8"), rtol=1e-4, atol=1e-6)
        assert found[2 * i][1].dtype == np.float32 and (found[2 * i + 1][1] == values[-1]).all()


def test_a_last_value_is_that_of_the_last_position_whatever_a_step_leaves_empty():
    """Steps of a prompt's first tokens leave no logits of drawn tokens, and a branch may have none of its own."""
    request = Request("r", np.ones(5, np.int32), SamplingParams.make(max_tokens=1), 0.0)
    request.tapped = RequestTaps({1: ("logits", 2)}, {}, 1)
    (seq,) = request.sequences = [Seq(0, request, 0, 0, finish_reason="length", emitted=1)]
    empty = np.empty((0, 2), np.float32)
    seq.tap_values = TapValues(0, 5, parts={1: growing(empty)}, scored=[np.array([[1, 2], [3, 6]], "f4"), empty])
    found = [part.tolist() for _, part in pooled(request, (("logits", "mean"), ("logits", "last")))]
    assert found == [[2, 4], [3, 6]]


def test_values_of_many_branches_travel_in_frames_of_bounded_size():
    sizes = []

    class Watched(LocalClient):
        def send(self, header, columns):
            sizes.append(len(columns.get("tap_values", ())))
            super().send(header, columns)

    async def main():
        client = Watched(load_config(keywords={"model": "pocket", "max_num_seqs": 32, "num_kvcache_blocks": 256}))
        await client.open()
        try:
            reads = (("logits", "mean"), ("logits", "last"))
            params = SamplingParams(max_tokens=3, n=32, ignore_eos=True)
            stream = await client.stream([1, 2, 3], params, "many", taps=PooledTaps((), reads))
            async for _ in stream:
                pass
            return client.info, stream
        finally:
            await client.close()

    info, stream = asyncio.run(main())
    width = info.tap_points["logits"]
    assert {s: [len(part) for part in parts] for s, parts in stream.tapped.items()} == dict.fromkeys(
        range(32), [width] * 2
    )
    assert sum(sizes) == 64 * width > FRAME and max(sizes) < FRAME + width


def test_taps_of_a_process_read_and_steer_as_those_of_generate_do():
    """The other requests are one without taps and an aborted one, which receives no values."""
    options = {"model": "pocket", "max_num_seqs": 8, "num_kvcache_blocks": 128, "batch_invariant": True}
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(**options) as llm:
        vector = np.resize([1.0, -2.0, 0.5, 0.0], llm.tap_points()[POINT])
        steering = Tap(POINT, add=vector, scale=40.0)
        taps = [steering, Tap("norm", read=True), Tap("layers.0.q", read=True)]
        want, plain = llm.generate([TALE] * 2, params, use_tqdm=False, taps=[taps, []])
        ids = want.prompt_token_ids
    requested = PooledTaps((steering,), (("norm", "mean"), ("layers.0.q", "last")))

    async def main():
        client = ProcessClient(load_config(keywords=options))
        await client.open()
        try:
            stream = await client.stream(ids, dataclasses.replace(params, n=2), "tapped", taps=requested)
            gone = await client.stream(ids, dataclasses.replace(params, max_tokens=500), "gone", taps=requested)
            alone = await client.stream(ids, params, "alone")
            await client.abort("gone")
            for one in (stream, gone, alone):
                async for _ in one:
                    pass
            return stream, gone, alone
        finally:
            await client.close()

    stream, gone, alone = asyncio.run(main())
    assert [text.token_ids for text in stream.texts] == [want.tokens] * 2
    assert alone.texts[0].token_ids == plain.tokens != want.tokens
    assert gone.tapped == alone.tapped == {}
    for sample in (0, 1):
        mean, last = stream.tapped[sample]
        np.testing.assert_allclose(mean, want.taps["norm"].mean(0), atol=1e-5)
        np.testing.assert_allclose(last, want.taps["layers.0.q"][-1], atol=1e-5)
