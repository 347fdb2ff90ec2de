"""Headers of GGUF files: every header that the package ``gguf`` writes reads back the same, and no header, however
hostile, takes more time or memory than its file has bytes."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from limited import limited

from minivllm.device.loading.gguf_file import LISTED, MOST_KEYS, MOST_STRINGS, MOST_TENSORS, read_gguf
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ModelError
from minivllm.runtime.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

TYPE, VALUE = gguf.GGMLQuantizationType, gguf.GGUFValueType
NUMBERS = {
    VALUE.UINT8: (0, 255), VALUE.INT8: (-128, 127), VALUE.UINT16: (0, 65535), VALUE.INT16: (-32768, 32767),
    VALUE.UINT32: (0, 2**32 - 1), VALUE.INT32: (-(2**31), 2**31 - 1), VALUE.UINT64: (0, 2**64 - 1),
    VALUE.INT64: (-(2**63), 2**63 - 1), VALUE.FLOAT32: None, VALUE.FLOAT64: None, VALUE.BOOL: None,
}  # fmt: skip
TEXTS = ("", "a", "▁the", "e\u0301", "🙂\n", "<|im_end|>", "x" * 300)


def number(kind, rng):
    if kind is VALUE.BOOL:
        return rng.random() < 0.5
    if kind in (VALUE.FLOAT32, VALUE.FLOAT64):
        return float(np.float32(rng.uniform(-1e3, 1e3)))
    return rng.choice([*NUMBERS[kind], rng.randint(*NUMBERS[kind])])


def random_file(path, rng, many=False):
    writer = gguf.GGUFWriter(str(path), "llama")
    for n in range(rng.randint(0, 30)):
        kind, key = rng.choice(list(NUMBERS)), f"k.{n}"
        shape = rng.choice(["text", "texts", "number", "numbers"])
        if shape == "text":
            writer.add_string(key, rng.choice(TEXTS))
        elif shape == "texts":
            writer.add_array(key, [rng.choice(TEXTS) for _ in range(rng.randint(1, 9))])
        elif shape == "number":
            writer.add_key_value(key, number(kind, rng), kind)
        else:
            values = [number(kind, rng) for _ in range(rng.randint(1, 9))]
            writer.add_key_value(key, values, VALUE.ARRAY, sub_type=kind)
    if many:
        writer.add_array("many.numbers", list(range(LISTED + 1)))
    for n in range(rng.randint(1, 6)):
        shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 2))] + [256]
        kind = rng.choice([TYPE.F32, TYPE.F16, TYPE.BF16, TYPE.Q8_0, TYPE.Q4_0])
        value = np.random.default_rng(n).random(shape, dtype=np.float32)
        writer.add_tensor(f"t.{n}", gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_values_and_tensors_are_those_that_the_package_gguf_reads(tmp_path):
    for seed in range(25):
        random_file(tmp_path / f"{seed}.gguf", random.Random(seed), many=seed == 0)
        ours, theirs = read_gguf(tmp_path / f"{seed}.gguf"), gguf.GGUFReader(str(tmp_path / f"{seed}.gguf"))
        values = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(ours.values) == list(values)
        for key, value in values.items():
            found = ours.values[key]
            found = found.tolist() if isinstance(found, np.ndarray) else found
            assert found == value and type(found) is type(value), key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for tensor in theirs.tensors:
            found = ours.tensors[tensor.name]
            assert (found.kind, list(found.shape)) == (tensor.tensor_type.name, list(reversed(tensor.shape.tolist())))
            assert found.data.dtype == tensor.data.dtype and np.array_equal(found.data, tensor.data)


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def head(tensors=0, keys=0):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


def array(kind, count, key="k"):
    return text(key) + struct.pack("<IIQ", 9, kind, count)


def entry(name="t", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 1 << 62
HOSTILE = {
    "numbers": (head(0, 1) + array(4, 1 << 30), "1073741824 numbers of 'k', but only 0 bytes follow"),
    "strings": (head(0, 1) + array(8, 1 << 20) + b"\0" * 80, "1048576 strings of 'k', but only 80 bytes follow"),
    "many strings": (head(0, 1) + array(8, HUGE), f"expected at most {MOST_STRINGS}"),
    "all bits": (head(0, 1) + array(4, 2**64 - 1), "the header announces"),
    "arrays": (head(0, 1) + array(9, 1) + struct.pack("<IQ", 9, 1) * 999, "is an array of type 9"),
    "type": (head(0, 1) + text("k") + struct.pack("<I", 77), "of type 77, which the format does not have"),
    "keys": (head(0, HUGE), f"expected at most {MOST_KEYS}"),
    "more keys than bytes": (head(0, 1000) + b"\0" * 100, "1000 keys, but only 100 bytes follow"),
    "tensors": (head(HUGE, 0), f"expected at most {MOST_TENSORS}"),
    "key": (head(0, 1) + struct.pack("<Q", HUGE) + b"\0" * 9, "MiB of text"),
    "text": (head(0, 1) + text("k") + struct.pack("<IQ", 8, 1 << 20), "1048576 bytes of k, but only 0 bytes follow"),
    "a string": (head(0, 1) + array(8, 2) + struct.pack("<QQ", 0, HUGE), f"has a length of {HUGE} bytes"),
    "not text": (head(0, 1) + text("k") + struct.pack("<I", 8) + text(b"\xff\xfe"), "k is not UTF-8"),
    "no strings": (head(0, 1) + array(8, 1) + text(b"\xff"), "string 0 of 'k' is not UTF-8"),
    "twice": (head(0, 2) + 2 * (text("k") + struct.pack("<II", 4, 1)), "key 'k' is there twice"),
    "dimensions": (head(1) + entry(dims=(1,) * 9), "has 9 dimensions; expected at most 4"),
    "large tensor": (head(1) + entry(dims=(1 << 40, 1 << 20)), "goes beyond the end of the file"),
    "kind": (head(1) + entry(kind=999), "is of type 999"),
    "no elements": (head(1) + entry(dims=(0, 1 << 63)), "expected no dimension of 0"),
    "block": (head(1) + entry(dims=(33,), kind=8), "has rows of 33; expected multiples of 32"),
    "offset": (head(1) + entry(offset=HUGE) + b"\0" * 4096, "goes beyond the end of the file"),
    "overlap": (head(2) + entry() + entry("u", offset=64) + b"\0" * 4096, "overlaps another"),
    "same tensor": (head(2) + entry() + entry(offset=128) + b"\0" * 4096, "tensor 't' is there twice"),
    "alignment": (
        head(1, 1) + text("general.alignment") + struct.pack("<II", 4, 3) + entry(),
        "expected a power of two",
    ),
    "cut": (head()[:-3], "it ends within a number"),
}


def test_a_header_that_claims_more_than_its_file_has_is_refused_at_once(tmp_path):
    for name, (content, message) in HOSTILE.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        kind, reason = limited(lambda path=path: read_gguf(path), seconds=1, megabytes=64)
        assert kind == "ModelError" and str(path) in reason and message in reason, (name, kind, reason)
        assert reason.endswith("download it again"), reason


def test_a_sparse_file_of_strings_takes_no_more_than_the_limits_allow(tmp_path):
    path = tmp_path / "sparse.gguf"
    with open(path, "wb") as file:
        file.write(head(0, 1) + array(8, MOST_STRINGS + 1))
        file.truncate(1 << 36)
    assert limited(lambda: read_gguf(path), seconds=1, megabytes=(1 << 17) + 64)[0] == "ModelError"


def test_a_file_cut_or_changed_anywhere_is_read_or_refused_and_never_more(tmp_path):
    """Cut at 60 places, and 400 files with four random bytes changed."""
    whole, rng = tmp_path / "whole.gguf", random.Random(1)
    random_file(whole, random.Random(3))
    content, path = whole.read_bytes(), tmp_path / "changed.gguf"

    def read_all():
        for n in range(460):
            changed = bytearray(content)
            if n < 60:
                changed = changed[: n * len(content) // 60]
            else:
                for _ in range(4):
                    changed[rng.randrange(min(len(content), 4000))] = rng.choice([0, 1, 8, 9, 127, 128, 255])
            path.unlink(missing_ok=True)
            path.write_bytes(changed)
            try:
                for tensor in read_gguf(path).tensors.values():
                    tensor.data.sum()
            except ModelError as e:
                assert str(path) in str(e)
        return "all"

    assert limited(read_all, seconds=20, megabytes=128) == ("done", "all")


SIZES = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
KEYS = (
    "general.architecture", "general.alignment", "split.count", *(f"A.{key}" for key in (
        "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window",
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.factor",
        "rope.scaling.type", "rope.scaling.original_context_length", "rope.scale_linear", "attn_logit_softcapping",
    )), *(f"tokenizer.ggml.{key}" for key in (
        "model", "pre", "tokens", "token_type", "merges", "scores", "bos_token_id", "eos_token_id", "eot_token_id",
        "unknown_token_id", "add_bos_token", "add_space_prefix",
    )), "tokenizer.chat_template", "tokenizer.chat_template.x",
)  # fmt: skip
STRANGE = {
    "text": struct.pack("<I", 8) + text("x"), "whole": struct.pack("<Ii", 5, -7), "zero": struct.pack("<II", 4, 0),
    "bool": struct.pack("<IB", 7, 1), "nan": struct.pack("<If", 6, float("nan")), "inf": struct.pack("<Id", 12, 1e999),
    "numbers": struct.pack("<IIQ2I", 9, 4, 2, 1, 2), "texts": struct.pack("<IIQ", 9, 8, 1) + text("</s>"),
    "none": struct.pack("<IIQ", 9, 4, 0), "many": struct.pack("<IIQ", 9, 4, LISTED + 1) + bytes(4 * (LISTED + 1)),
}  # fmt: skip


@pytest.mark.parametrize(("arch", "vocabulary"), [("llama", "gpt2"), ("gemma2", "llama")])
def test_a_key_with_a_value_of_any_other_kind_is_read_or_refused_by_the_name_of_the_file(arch, vocabulary, tmp_path):
    number = lambda n: struct.pack("<II", 4, n)  # noqa: E731
    listed = lambda *texts: struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(text, texts))  # noqa: E731
    names = {"model": vocabulary, "pre": "gpt-2"}
    usual = {"general.architecture": struct.pack("<I", 8) + text(arch)}
    usual |= {f"{arch}.{key}": number(n) for key, n in SIZES.items()}
    usual |= {"tokenizer.ggml.tokens": listed("a", "b", "ab", "</s>"), "tokenizer.ggml.merges": listed("a b")}
    usual |= {f"{arch}.attention.head_count": number(4)}
    usual |= {f"{arch}.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5)}
    usual |= {f"tokenizer.ggml.{key}": struct.pack("<I", 8) + text(name) for key, name in names.items()}
    usual["tokenizer.ggml.scores"] = struct.pack("<IIQ4f", 9, 6, 4, 0, -1, -2, -3)
    path, read = tmp_path / "one.gguf", {"model": 0, "tokenizer": 0}
    for key in (key.replace("A.", f"{arch}.", 1) if key[:2] == "A." else key for key in KEYS):
        for value in STRANGE.values():
            given = {**usual, key: value}
            content = head(1, len(given)) + b"".join(text(name) + raw for name, raw in given.items())
            content += entry("token_embd.weight", (32, 4))
            path.unlink(missing_ok=True)
            path.write_bytes(content + bytes(-len(content) % 32 + 512))
            for what, opened in (("model", open_checkpoint), ("tokenizer", load_tokenizer)):
                try:
                    opened(str(path))
                    read[what] += 1
                except ModelError as e:
                    assert str(path) in str(e)
    assert all(0 < n < len(KEYS) * len(STRANGE) for n in read.values())
