"""Names of files that no file can have: each command refuses them in one line, and no exception of the system gets
through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_helpers import run_cli

import minivllm
from minivllm import files
from minivllm.cli.models import local_models
from minivllm.errors import ConfigError

NAMES = {"long": "a" * 3000, "of an unknown user": "~nosuchuser/x", "a loop": "loop", "with a null": "a\0b"}
COMMANDS = {
    "generation_config": ["explain", "--set", "generation_config={}"],
    "download_dir": ["explain", "--model", "owner/name", "--set", "download_dir={}"],
    "model": ["explain", "--model", "{}"],
    "models": ["models", "{}"],
    "cache": ["cache", "export", "a", "b", "--path", "{}"],
    "config": ["config", "show", "{}"],
    "quantize": ["quantize", "{}", "out", "--method", "rtn"],
    "run-batch": ["run-batch", "-i", "{}", "-o", "out.jsonl"],
}
RAISES = re.compile(r"(?<!os\.path)\.(is_dir|is_file|exists|is_symlink|expanduser)\(")
# files that call these methods on entries of a directory, on files of the package, or for ``files.expanded``
EXEMPT = {"files.py", "server/replicas/weights.py", "server/response_store.py"}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_command_refuses_a_name_that_no_file_has_in_one_line(command, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    code, _, err = run_cli(capsys, *(word.replace("{}", NAMES[name]) for word in COMMANDS[command]))
    assert code in (2, 3, 5), err
    assert err.startswith("minivllm: error: ") and err.count("\n") == 1 and "(a bug" not in err, err


def test_the_path_of_a_home_directory_is_expanded_and_an_unknown_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.expanded("~/x") == tmp_path / "x"
    assert files.expanded("a/~b") == Path("a/~b")
    with pytest.raises(ConfigError, match=r"~nosuchuser/x: the home directory ~nosuchuser is not known"):
        files.expanded("~nosuchuser/x")


def test_models_of_a_folder_are_listed_beside_files_that_are_gone(tmp_path):
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nothing")
    (tmp_path / "there.gguf").write_bytes(b"GGUF")
    cache = tmp_path / "cache" / "models--a--b" / "snapshots"
    cache.mkdir(parents=True)
    (cache / "gone").symlink_to(tmp_path / "nothing")
    found = [model.name for model in local_models([str(tmp_path)], str(tmp_path / "cache"))]
    assert [name for name in found if name.startswith(str(tmp_path))] == [str(tmp_path / "there.gguf")]


def test_no_module_looks_for_a_file_with_a_method_that_raises_for_a_long_name():
    """``Path.is_dir`` and the like raise OSError for a name that is too long; ``os.path.isdir`` returns False."""
    root = Path(minivllm.__file__).parent
    sources = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    own = {name: text for name, text in sources.items() if not name.startswith(("testing/", "pocket/"))}
    assert {name for name, text in own.items() if RAISES.search(text)} == EXEMPT
