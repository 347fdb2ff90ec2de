"""Files from others: each reader ends within limits of time and memory, with an error that names the file."""

from __future__ import annotations

import json
import os
import struct

import pytest
from limited import limited
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minivllm.cli import main
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.tensor_files import checkpoint_headers, checkpoint_tensors
from minivllm.errors import ModelError, RequestError
from minivllm.lab.traces.read import read_trace
from minivllm.runtime.text.converted import convert
from minivllm.runtime.text.growth import MOST_GROWTH, MOST_TOKEN
from minivllm.runtime.text.tokenizer import configured_eos, load_tokenizer
from minivllm.runtime.text.tokenizer_files import NAMED


def folder_of(path, tokenizer=None, **parts):
    """Return a directory with a tokenizer that has these parts."""
    made = tokenizer or Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    for name, part in parts.items():
        setattr(made, name, part)
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    return path


MANY = "a" * 100_000
AMPLIFIERS = {
    "decoder": [
        decoders.Sequence([decoders.Replace("a", MANY), decoders.Replace("a", MANY)]),
        decoders.Sequence([decoders.Replace("a", "a" * 50)] * 2),
        decoders.Sequence([decoders.Sequence([decoders.Replace(Regex("x?"), "a" * 12)] * 2), decoders.Fuse()]),
        decoders.WordPiece(prefix="#" * 1000),
        decoders.Sequence([decoders.Fuse()] * 500),
    ],
    "normalizer": [
        normalizers.Replace("a", MANY),
        normalizers.Sequence([normalizers.Replace(Regex("a"), "aaa"), normalizers.Replace("a", "a" * 60)]),
        normalizers.Prepend(MANY),
        normalizers.Sequence([normalizers.ByteLevel()] * 20),
        normalizers.Sequence([normalizers.Lowercase()] * 10_000),
    ],
    "pre_tokenizer": [pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(use_regex=False)] * 20)],
    "post_processor": [processors.TemplateProcessing(single=["$A"] * 5000, special_tokens=[])],
}  # fmt: skip


def test_a_tokenizer_whose_steps_multiply_a_text_is_refused_before_it_sees_one(tmp_path):
    for name, parts in AMPLIFIERS.items():
        for n, part in enumerate(parts):
            folder = folder_of(tmp_path / f"{name}{n}", **{name: part})
            kind, reported = limited(lambda folder=folder: load_tokenizer(folder).decode([0, 0, 0]))
            assert (
                kind == "ModelError"
                and reported.startswith(f"{folder}: ")
                and name in reported
                and "expected" in reported
            ), reported


def test_a_token_as_long_as_a_book_is_refused(tmp_path):
    long = folder_of(tmp_path / "v", Tokenizer(models.BPE({"a": 0, "b" * (MOST_TOKEN + 1): 1}, [])))
    added = Tokenizer(models.BPE({"a": 0}, []))
    added.add_tokens([AddedToken("c" * 10**6)])
    of_words = models.BPE({"a": 0}, [], end_of_word_suffix="w" * 1000)
    for folder in (long, folder_of(tmp_path / "added", added), folder_of(tmp_path / "w", Tokenizer(of_words))):
        kind, reported = limited(lambda folder=folder: load_tokenizer(folder))
        assert kind == "ModelError" and reported.startswith(f"{folder}: ") and "expected at most" in reported


def test_steps_that_published_tokenizers_have_are_accepted(tmp_path):
    """ALBERT, T5, SeamlessM4T, GLM, Llama, GPT-NeoX and Falcon have chains of these kinds."""
    replace = normalizers.Replace
    kept = {
        "normalizer": [
            normalizers.Sequence([replace("``", '"'), replace("''", '"'), normalizers.NFKD(), normalizers.Lowercase()]),
            normalizers.Sequence([replace(Regex(r"[\n\t]"), " "), normalizers.NFKC(), replace(Regex(" {2,}"), "_")]),
            normalizers.Sequence([replace("\n", "<n>"), replace("\t", "<|tab|>"), replace(" " * 8, "<|blank_8|>")]),
            normalizers.Sequence([normalizers.Prepend("\u2581"), replace(" ", "\u2581")]),
        ],
        "pre_tokenizer": [
            pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(), pre_tokenizers.Digits()])
        ],
        "decoder": [
            decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
            decoders.WordPiece(),
            decoders.BPEDecoder(),
            decoders.Metaspace(),
            decoders.CTC(),
            decoders.ByteLevel(),
        ],
    }
    for name, parts in kept.items():
        for n, part in enumerate(parts):
            assert load_tokenizer(folder_of(tmp_path / f"{name}{n}", **{name: part})).vocab_size == 2


def test_a_pattern_that_backtracks_for_ever_fails_the_prompt_and_nothing_else(tmp_path):
    splits = pre_tokenizers.Split(Regex("(b+)+$"), "isolated")
    tokenizer = load_tokenizer(folder_of(tmp_path / "t", pre_tokenizer=splits))
    kind, reported = limited(lambda: tokenizer.encode("b" * 40 + "a"))
    assert kind == "RequestError" and "retry-limit" in reported
    assert tokenizer.encode("ab") == [0, 1]
    again = load_tokenizer(folder_of(tmp_path / "d", decoder=decoders.Replace(Regex("(b+)+$"), "x")))
    with pytest.raises(RequestError, match="retry-limit"):
        again.backend.add_tokens([AddedToken("b" * 40 + "a")])
        again.decode([2])


def test_added_tokens_that_are_none_are_refused_with_the_name_of_their_file(tmp_path):
    folder = folder_of(tmp_path / "t")
    wrong = [
        {"added_tokens_decoder": {"x": {"content": "c"}}}, {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"1": {"content": [1]}}}, {"additional_special_tokens": 7},
        {"eos_token": {"content": {"a": 1}}}, {"added_tokens_decoder": {"9" * 5000: {"content": "c"}}},
    ]  # fmt: skip
    for config in wrong:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        kind, reported = limited(lambda: load_tokenizer(folder))
        assert (kind, reported.split(":")[0]) == ("ModelError", str(folder / "tokenizer_config.json")), (
            config,
            kind,
            reported,
        )


@pytest.mark.slow
def test_a_vocabulary_that_takes_hours_to_convert_is_refused_in_time(tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    for piece, kind in (("<unk>", 2), ("<s>", 3), ("</s>", 3), ("a", 1), ("a" * 3_000_000, 1)):
        proto.pieces.add(piece=piece, score=0.0, type=kind)
    proto.trainer_spec.model_type = 2
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ModelError, match=r"takes more than 10 s of CPU time"):
        convert(tmp_path, NAMED, seconds=10)
    for content in (b"\xff" * 1000, b"\x0a\xff\xff\xff\xff\x7f", b""):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"transformers (cannot load its tokenizer|finds no vocabulary)"):
            load_tokenizer(tmp_path)


def shard(header, data=b"", size=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + data


def tensor(*offsets, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


SHARDS = {
    "huge header": shard(b"{}", size=1 << 62),
    "a header of 90 MB": shard(b"{}", size=90 << 20),
    "overlap": shard({"a": tensor(0, 16), "b": tensor(8, 24)}, b"\0" * 24),
    "same bytes": shard({"a": tensor(0, 16), "b": tensor(0, 16)}, b"\0" * 16),
    "backwards": shard({"a": tensor(16, 0)}, b"\0" * 16),
    "negative": shard({"a": tensor(-16, 0)}, b"\0" * 16),
    "beyond": shard({"a": tensor(0, 1 << 40, shape=(1 << 38,))}, b"\0" * 16),
    "wraps": shard({"a": tensor(0, 16, shape=(1 << 33, 1 << 33))}, b"\0" * 16),
    "deep": shard(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "no dtype": shard({"a": tensor(0, 16, dtype="X9")}, b"\0" * 16),
    "no JSON": shard(b"\xff" * 64),
    "cut": shard({"a": tensor(0, 16)}, b"\0" * 15),
    "empty": b"",
}


def test_a_shard_whose_header_lies_is_refused_by_name(tmp_path):
    for name, content in SHARDS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        for read in (checkpoint_headers, lambda folder: list(checkpoint_tensors(folder))):
            kind, reported = limited(lambda folder=folder, read=read: read(folder), seconds=2)
            assert kind == "ModelError" and str(folder / "model.safetensors") in reported, (name, kind, reported)


def test_an_index_leads_to_no_file_outside_and_to_no_device(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with open(tmp_path / "sparse.safetensors", "wb") as file:
        file.truncate(1 << 26)
    index = tmp_path / "model.safetensors.index.json"
    names = (
        "../x.safetensors",
        "/dev/zero",
        "a/b.safetensors",
        "x.bin",
        7,
        None,
        ["a"],
        "no.safetensors",
        "\0.safetensors",
    )
    for name in (*names, "pipe.safetensors", "zero.safetensors", "loop.safetensors", "sparse.safetensors"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        kind, reported = limited(lambda: checkpoint_headers(tmp_path), seconds=2)
        assert kind == "ModelError" and str(tmp_path) in reported, (name, kind, reported)
    for text in ("[]", "{}", '{"weight_map": 7}', "[" * 100_000, '{"weight_map": {"w"', '{"weight_map": null}'):
        index.write_text(text)
        kind, reported = limited(lambda: checkpoint_headers(tmp_path), seconds=2)
        assert kind == "ModelError" and str(index) in reported, (text[:30], kind, reported)


def test_a_configuration_of_no_size_or_depth_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    base = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    texts = [
        "[" * 300_000,
        '{"a":' * 50_000 + "1" + "}" * 50_000,
        "1" * 1_000_000,
        '{"a": ' + "9" * 5000 + "}",
        "\x00",
        "nan",
        json.dumps({**base, "num_hidden_layers": 10**12}),
        json.dumps({**base, "hidden_size": 10**30}),
        json.dumps({**base, "vocab_size": -1}),
        json.dumps({**base, "rope_scaling": {"factor": 1e300}}),
        json.dumps({**base, "eos_token_id": [-1]}),
        json.dumps({**base, "quantization_config": [1]}),
    ]
    for text in texts:
        path.write_text(text)
        kind, reported = limited(lambda: open_checkpoint(str(tmp_path)).hf_config(), seconds=5)
        assert kind == "ModelError" and str(path) in reported and len(reported) < 1000, (text[:30], kind, reported)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    assert limited(lambda: open_checkpoint(str(tmp_path)), seconds=2)[0] == "ModelError"


def test_a_trace_that_claims_a_request_of_billions_of_tokens_is_refused_with_its_line(tmp_path):
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,30,5\n2023-11-16 18:15:47,{},{}\n"
    burst = "Timestamp,Request tokens,Response tokens\n0,30,5\n1,{},{}\n"
    row = {"timestamp": 0, "input_length": 5, "hash_ids": [1]}
    hashed = "".join(json.dumps({**row, "output_length": n}) + "\n" for n in (1, 10**9))
    texts = {"hashed.jsonl": hashed}
    for name, text in (("azure", azure), ("burst", burst)):
        texts |= {
            f"{name}{n}.csv": text.format(*sizes) for n, sizes in enumerate([(2 * 10**9, 5), (30, 10**8), (-9, 1)])
        }
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        kind, reported = limited(lambda path=path: read_trace(str(path)).tokens(1).size, seconds=2)
        assert kind == "ConfigError" and f"{path}:{2 if name == 'hashed.jsonl' else 3}: " in reported, (
            name,
            kind,
            reported,
        )


def test_ids_that_end_an_answer_are_few_and_fit_the_device(tmp_path):
    path = tmp_path / "generation_config.json"
    for wrong in ([-1], 1 << 31, 10**30, list(range(33)), True, "2", [None], [[2]], 1.5, {"a": 1}):
        path.write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ModelError) as found:
            configured_eos(tmp_path)
        assert str(found.value).startswith(f"{path}: eos_token_id=") and len(str(found.value)) < 400
    path.write_text(json.dumps({"eos_token_id": list(range(32))}))
    assert configured_eos(tmp_path) == list(range(32))


def test_the_command_names_the_file_in_one_line(tmp_path, capsys):
    folder = folder_of(tmp_path / "m", decoder=AMPLIFIERS["decoder"][0])
    (folder / "config.json").write_text(open_checkpoint("pocket").folder.joinpath("config.json").read_text())
    code = main(["generate", "--model", str(folder), "--set", "load_format=dummy", "--set", "device=cpu", "a"])
    reported = capsys.readouterr().err
    assert (
        code == 3
        and reported.count("\n") == 1
        and str(folder) in reported
        and f"expected at most {MOST_GROWTH}" in reported
    ), reported
