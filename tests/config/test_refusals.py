"""Own parts, and misspelt names or names of another kind: what is found, and the advice of a refusal."""

from __future__ import annotations

import importlib
import sys

import pytest
from cli_helpers import run_cli

from minivllm.cli.common import find_modules
from minivllm.config import load_config
from minivllm.errors import ConfigError, from_file


def test_a_module_that_may_be_named_is_found_beside_the_configuration_and_in_the_current_folder(tmp_path, monkeypatch):
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder, name in ((beside, "own_beside"), (here, "own_here"), (here, "json")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text("")
    (here / "own_package").mkdir()
    (here / "own_package" / "__init__.py").write_text("")
    monkeypatch.chdir(here)
    before = [path for path in sys.path if path]
    for allowed, added in (
        (["own_beside"], [beside]),
        (["own_here:Evictor"], [here]),
        (["own_package.parts"], [here]),
        (["own_nowhere", "json", "__main__", "./own_here.py"], []),
        ([], []),
    ):
        monkeypatch.setattr(sys, "path", list(before))
        find_modules(allowed, [str(beside / "a.toml")])
        assert sys.path == [*before, *map(str, added)]


def test_commands_that_read_several_configurations_find_modules_too(capsys, tmp_path, monkeypatch):
    (tmp_path / "own_replayed.py").write_text(
        "from minivllm.plugins.evictor.lru import Lru\n\n\nclass Own(Lru):\n    pass\n"
    )
    (tmp_path / "a.toml").write_text('evictor = "own_replayed:Own"\n')
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    args = ["synthetic:requests=8", "--blocks", "50%", "--config", str(tmp_path / "a.toml")]
    code, out, err = run_cli(capsys, "replay", *args, "--allow-target", "own_replayed")
    assert code == 0 and "own_replayed:Own" in out, err


@pytest.mark.parametrize("path", ["./mine.py:Own", "mine.py:Own", "parts/mine.py:Own"])
def test_a_path_in_the_place_of_a_module_is_refused_with_the_module_to_name(capsys, path):
    code, _, err = run_cli(capsys, "explain", "evictor", "--set", f"evictor={path}")
    assert code == 4 and "is a path" in err and "expected 'mine:Own' and --allow-target mine" in err


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["compare", "--sedes", "1"], "Did you mean '--seeds'? (see minivllm compare --help)"),
        (
            ["bench", "throughput", "--num-promts=3"],
            "Did you mean '--num-prompts'? (see minivllm bench throughput --help)",
        ),
        (["run", "a.toml", "b.toml"], "unrecognized arguments: b.toml (see minivllm run --help)"),
        (["compare", "--sweep", "evicter=lru,fifo"], "--sweep: unknown option 'evicter'. Did you mean 'evictor'?"),
    ],
)
def test_what_is_misspelt_is_refused_with_the_nearest_that_there_is(capsys, args, hint):
    code, _, err = run_cli(capsys, *args)
    assert code == 2 and hint in err


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (["diff", "{}", "{}"], "a file that --record (or LLM.record) wrote"),
        (
            ["report", "{}", "-o", "x.html"],
            "a file that bench, ablate, compare, replay or simulate wrote (--output-json FILE)",
        ),
        (["simulate", "--trace", "sample:azure", "--costs", "{}"], "expected a file that `minivllm calibrate` wrote"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_makes_the_right_one(capsys, tmp_path, args, want):
    for text in ("[run]\n", "[]"):
        (tmp_path / "other").write_text(text)
        code, _, err = run_cli(capsys, *(word.format(tmp_path / "other") for word in args))
        assert code == 2 and want in err


MOONCAKE = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
TRACE_GOES = "a trace (times and lengths) goes to `minivllm simulate --trace` and `minivllm replay`"
PROMPTS_GO = "lines with a prompt to --dataset of bench, compare and ablate"


@pytest.mark.parametrize(
    ("args", "name", "text"),
    [  # --dataset of bench, compare and ablate takes both
        (["bench", "serve", "--trace"], "m.jsonl", MOONCAKE),
        (["bench", "profile", "--trace"], "m.jsonl", MOONCAKE),
        (["replay", "--blocks", "9"], "p.jsonl", '{"prompt": "a"}\n'),
        (["replay", "--blocks", "9"], "p.jsonl", '"a text alone"\n'),
        (["replay", "sample:azure", "--dataset"], "p.jsonl", '{"prompt": "a"}\n'),
    ],
)
def test_a_trace_in_the_place_of_prompts_or_the_reverse_is_refused_with_the_option_that_takes_it(
    capsys, tmp_path, monkeypatch, args, name, text
):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = run_cli(capsys, *args, name)
    assert code == 2 and TRACE_GOES in err and PROMPTS_GO in err
    assert text is None or (tmp_path / name).read_text() == text


def test_a_message_names_the_file_of_a_part_that_is_not_of_this_package(tmp_path, monkeypatch):
    (tmp_path / "own_part.py").write_text("class Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_part")
    assert from_file(own.Own()) == f" (of {tmp_path / 'own_part.py'})"
    assert not from_file(ConfigError("x")) and not from_file(type("Made", (), {"__module__": "own_part"})())


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ('allowed_origins=["a.example"]', "expected an origin as browsers send it"),
        ('allowed_origins=["https://a.example/"]', "expected an origin as browsers send it"),
        ('allowed_origins=["https://A.example"]', "expected an origin as browsers send it"),
        ('allowed_origins=[""]', "expected an origin as browsers send it"),
        ("root_path=llm", "expected a path that begins with / and does not end with it"),
        ("root_path=/llm/", "expected a path that begins with / and does not end with it"),
        ('served_model_name=[""]', "expected a name of 1 to 256 printable characters"),
        ('served_model_name=["a", "b\\n"]', "expected a name of 1 to 256 printable characters"),
    ],
)
def test_a_setting_of_the_server_that_no_request_can_match_is_refused(setting, wanted):
    with pytest.raises(ConfigError, match=f"server.{setting.partition('=')[0]}: .*{wanted}"):
        load_config(sets=[f"server.{setting}"], environ={})


def test_origins_of_browsers_and_paths_of_proxies_are_accepted():
    origins = ["*", "null", "https://a.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc"]
    server = {"allowed_origins": origins, "root_path": "/a/b", "served_model_name": ["org/model é"]}
    assert load_config(keywords={"server": server}, environ={}).server.allowed_origins == origins
