"""Numbers of thousands of digits, keys of thousands of dots, half characters and endless values: refused by name, and
no message is longer than a reader has patience."""

import dataclasses
import io
import json
import sys

import pytest
import yaml

from minivllm import validation as plain
from minivllm.cli import main
from minivllm.cli.commands import read_stdin
from minivllm.config import EngineConfig, load_config
from minivllm.config.server import ServerConfig
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import ConfigError, MinivllmError, RequestError, brief, shown
from minivllm.files import parse_json

DIGITS = "9" * 5000
DOTS = ".".join(["a"] * 5000)
MOST = 1000  # characters of a message


def reported(*args, **more):
    with pytest.raises(ConfigError) as info:
        load_config(*args, **{"environ": {}, **more})
    assert len(str(info.value)) < MOST
    return str(info.value)


FLAWED = {
    "digits": DIGITS, "negative digits": "-" + DIGITS, "hexadecimal": "0x" + "f" * 5000,
    "a list of digits": f"[{DIGITS}]",
    "nested lists": "[" * 200 + "]" * 200, "endless lists": "[" * 5000 + "]" * 5000,
    "nested tables": "{a=" * 200 + "1" + "}" * 200, "dots": f"{{{DOTS}=1}}", "half a character": "\udcff",
    "a list of halves": '["\udcff"]',
}  # fmt: skip
PLACES = ("seed", "model", "max_num_seqs", "dtype", "attention.name", "attention.options.x", "sampling.stop",
          "sampling.seed", "sampling.extra.x", "run.prompts", "server.host", "server.served_model_name",
          "requires.plugins", "processors", "nobody")  # fmt: skip


@pytest.mark.parametrize("flaw", FLAWED)
@pytest.mark.parametrize("place", PLACES)
def test_a_value_that_nothing_can_hold_is_refused_wherever_it_is_given(tmp_path, place, flaw):
    text = FLAWED[flaw]
    reported(sets=[f"{place}={text}"])
    reported(environ={"MINIVLLM__" + place.upper().replace(".", "__"): text})
    if plain.is_text(text):
        (tmp_path / "a.toml").write_text(f"{place} = {text}\n")
        assert "a.toml" in reported([tmp_path / "a.toml"])


YAML = {
    "digits": DIGITS, "hexadecimal": "0x" + "f" * 5000, "octal": "0o" + "7" * 5000, "half a character": '"\\udcff"',
    "nested": "[" * 200 + "]" * 200,
}  # fmt: skip


@pytest.mark.parametrize("flaw", YAML)
@pytest.mark.parametrize("key", ["seed", "model", "sampling", "run"])
def test_of_yaml_and_a_record_too(tmp_path, key, flaw):
    (tmp_path / "a.yaml").write_text(f"{key}: {YAML[flaw]}\n")
    assert "a.yaml" in reported([tmp_path / "a.yaml"])
    assert "a.yaml" in reported([tmp_path / "a.yaml"], sets=["seed=1"])


@pytest.mark.parametrize("value", [10**5000, 1 << 20000, "\ud800", {"\ud800": 1}, ["\udfff"]], ids=range(5))
@pytest.mark.parametrize("name", ["seed", "model", "attention", "processors", "sampling", "server", "nobody"])
def test_of_keywords_too(name, value):
    reported(keywords={name: value})


@pytest.mark.parametrize(
    "key", [DOTS, "sampling." + DOTS, "attention.options." + DOTS, "x" * 100_000, "\udcff", "a..b"]
)
def test_a_key_that_nobody_has_is_refused(key):
    reported(sets=[f"{key}=1"])


def test_dotted_keys_of_toml_are_bounded_before_they_are_read(tmp_path):
    for text in (
        f"{DOTS} = 1",
        f"[{DOTS}]",
        f"[[{DOTS}]]",
        f"a = {{ {DOTS} = 1 }}",
        f"sampling.{DOTS} = 1",
        ".".join(["'a b'"] * 100_000) + " = 1",
    ):
        (tmp_path / "a.toml").write_text(text)
        assert "more than 128 parts" in reported([tmp_path / "a.toml"])


def test_a_number_of_thousands_of_digits_is_refused_with_the_accepted_length(tmp_path):
    said = "a whole number has thousands of digits; expected at most 40"
    assert reported(sets=[f"seed={DIGITS}"]).endswith(said)
    for name, text in (("a.toml", f"seed = {DIGITS}"), ("a.yaml", f"seed: {DIGITS}")):
        (tmp_path / name).write_text(text)
        assert reported([tmp_path / name]) == f"{tmp_path / name}: {said}"


def test_half_a_character_in_json_is_refused_with_the_name_of_the_file_once(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"model": "\\ud800"}')
    assert reported([path]).count(str(path)) == 1


def test_long_names_of_variables_are_refused():
    reported(environ={"MINIVLLM__" + "A__" * 5000 + "A": "1"})
    reported(environ={"MINIVLLM__ATTENTION__OPTIONS__" + "A" * 5000: "1"})


# ---------------------------------------------------------------- messages

LONG = "x" * 100_000
FIELDS = [*EngineConfig.model_fields, *(f"server.{name}" for name in ServerConfig.model_fields), "run.chat",
          "run.nobody",
          "requires.plugins", "nobody", "attention.nobody", "sampling.nobody", "config_version"]  # fmt: skip


@pytest.mark.parametrize("value", [LONG, [LONG] * 50, {LONG: LONG}, {LONG: {LONG: [LONG]}}], ids=range(4))
@pytest.mark.parametrize("name", FIELDS)
def test_no_message_about_an_option_is_long(name, value):
    table, _, inner = name.rpartition(".")
    keywords = {table: {inner: value}} if table else {name: value}
    try:
        load_config(keywords=keywords, environ={})
    except MinivllmError as exc:
        assert len(str(exc)) < 4000, str(exc)[:500]


@pytest.mark.parametrize("value", [LONG, [LONG] * 50, {LONG: LONG}, int(1e300), -(10**39), LONG.encode(), {1, 2}],
                         ids=range(7))  # fmt: skip
@pytest.mark.parametrize("name", [*(f.name for f in dataclasses.fields(SamplingParams)), LONG])
def test_no_message_about_a_parameter_is_long(name, value):
    try:
        SamplingParams.make(**{name: value})
    except RequestError as exc:
        assert len(str(exc)) < MOST


TEXTS = ("stop", "bad_words", "cache_salt", "tenant", "trace_headers", "extra", "structured_outputs")


@pytest.mark.parametrize("name", TEXTS)
def test_half_a_character_in_a_parameter_is_refused_by_its_name(name):
    half = "\ud800"
    for value in (half, [half], {"a": half}, {half: "a"}, {"regex": half}, {"choice": [half]}):
        with pytest.raises(RequestError) as info:
            SamplingParams.make(**{name: value})
        assert info.value.param == name and len(str(info.value)) < MOST


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "hi", "--max-tokens", DIGITS], ["generate", "hi", "--temperature", LONG],
        ["generate", "hi", "--model", LONG], ["generate", "hi", "--model", "~" + LONG], ["generate", "\udcff"],
        ["generate", "hi", "--set", f"seed={DIGITS}"], ["generate", "hi", "--set", LONG],
        ["generate", "hi", "--config", LONG], ["generate", "hi", "--config", "a\0.toml"],
        ["generate", "hi", "--stop", "\udcff"],
        ["generate", "hi", "--json-schema", LONG], ["generate", "hi", "--regex", "\udcff"], ["run", LONG + ".toml"],
        ["run", "\udcff.toml"], [LONG], ["serve", "--port", DIGITS], ["serve", "--api-key-file", LONG],
        ["replay", LONG], ["replay", "synthetic:" + LONG], ["replay", f"synthetic:seed={DIGITS}"],
        ["replay", "synthetic:depth=2147483647"], ["replay", "synthetic:requests=3", "--requests", LONG],
        ["plugins", LONG], ["explain", LONG], ["diff", LONG, LONG], ["schema", "-o", LONG],
        ["eval", "pocket", "--task", LONG],
        ["bench", "profile", "--batch-size", DIGITS], ["config", "show", LONG + ".yaml"],
    ],
    ids=lambda args: " ".join(a[:24] for a in args).encode("ascii", "replace").decode().replace("\0", "0"),
)  # fmt: skip
def test_an_argument_that_nobody_can_use_is_refused_in_a_short_line(args, capsys):
    try:
        code = main(args)
    except SystemExit as exc:
        code = exc.code
    err = capsys.readouterr().err
    assert code in (2, 3, 4) and "a bug" not in err and "Traceback" not in err and err.count("\n") == 1
    assert len(err) < MOST, err[:300]


# ---------------------------------------------------------------- the helpers


def test_halves_are_found_as_json_pairs_them():
    halves = [r"\ud800", r"\udfff", r"\ud800\ud800", r"a\udc00\ud800", r"\ud83d\ude00\ude00", r"\\\ud800", r"\uD800x"]
    wholes = [
        r"\ud83d\ude00",
        r"\\ud800",
        r"\\\\udc00",
        r"\u0041",
        r"\uFFFF",
        "é",
        r"\ud83d\ude00\ud83d\ude00",
        r"\ue000",
    ]
    for text in (*halves, *wholes):
        value = json.loads(f'"{text}"')
        assert plain.lone_escape(f'["{text}"]') is (not plain.is_text(value)) is (text in halves)
    assert plain.lone_escape('"\ud800"') and not plain.lone_escape('"\U0001f600"')


def test_what_is_quoted_is_short_and_printable():
    for value in (
        "x" * 10**6,
        "\n" * 1000,
        [["y" * 1000] * 1000] * 1000,
        {"k" * 999: "v" * 999},
        10**4000,
        1 << 20000,
        b"z" * 9999,
        "\ud800" * 500,
        {i: dict.fromkeys(range(99), "w" * 99) for i in range(99)},
    ):
        text = shown(value)
        assert 0 < len(text) <= 300 and text.isprintable()
    assert shown("it's") == repr("it's") and shown([1, "a"]) == repr([1, "a"]) and brief("name") == "name"
    assert brief("a\x00b\u202e") == "a\\x00b\\u202e" and len(brief("n" * 1000)) == 120


def test_json_of_any_kind_ends_in_a_value_or_in_an_error_of_the_caller():
    for text in ("[" * 100_000, DIGITS, f"[-{DIGITS}]", '"\\ud800"', "{", "", "\x00", '{"a":}', "nope"):
        with pytest.raises(ConfigError, match=r"^here") as info:
            parse_json(text, "here")
        assert len(str(info.value)) < 300
    assert parse_json('{"a": [1, -2.5e3, "\\ud83d\\ude00"]}', "here") == {"a": [1, -2500.0, "\U0001f600"]}
    assert yaml.safe_load("1") == parse_json("1", "here")


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"a\xed\xa0\x80b", b"x" * ((1 << 24) + 2)], ids=["bytes", "half", "endless"]
)
def test_standard_input_that_is_no_prompt_is_refused(command, data, monkeypatch):
    for errors in ("strict", "surrogateescape"):  # as the locale has it
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", errors))
        with pytest.raises(ConfigError, match="standard input: "):
            read_stdin(sys.stdin.read if command == "generate" else sys.stdin.readline)


def test_variables_that_are_no_text_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("MINIVLLM__MODEL", "\udcff")
    assert main(["config", "show"]) == 2
    assert "MINIVLLM__MODEL" in capsys.readouterr().err
