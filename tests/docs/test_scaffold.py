"""``minivllm plugins new``: the written package installs, works and passes the kit, and impossible requests are
refused.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packages import environment, public_imports, tomllib, write_metadata

from minivllm import __version__
from minivllm.cli import main
from minivllm.errors import ConfigError, PluginError
from minivllm.plugins.specs import BUILTINS
from minivllm.registration.spec import KINDS
from minivllm.registry import Catalog
from minivllm.testing.scaffold import check_name, files, write

QUICK = {"strategy", "hooks"}  # seams whose kit takes a few seconds
ALL = [seam if seam in QUICK else pytest.param(seam, marks=pytest.mark.slow) for seam in KINDS]


@pytest.mark.parametrize("seam", KINDS)
def test_a_package_is_complete_and_names_nothing_of_the_template(seam, tmp_path):
    folder = write("acme-part", seam, tmp_path)
    for path in folder.rglob("*"):
        text = path.read_text() if path.is_file() else ""
        assert not any(word in f"{path} {text}" for word in ("my_plugin", "my-plugin", "MyPlugin", "MY_PLUGIN")), path
        assert not any(word in text for word in ("SUMMARY", "SEAM", "BEFORE")), path
        if path.suffix == ".py":
            ast.parse(text)
    have = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert have >= {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        "src/acme_part/__init__.py",
        "src/acme_part/spec.py",
        "src/acme_part/plugin.py",
        "tests/test_conformance.py",
    }
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][f"minivllm.{seam}"] == {"acme-part": "acme_part.spec:ACME_PART"}
    major, minor = map(int, __version__.split(".")[:2])
    assert f"minivllm>={major}.{minor},<{major}.{minor + 1}" in project["dependencies"]
    assert "license" not in project, "that is the author's choice"


@pytest.mark.parametrize("seam", KINDS)
def test_a_package_imports_public_modules_only(seam, tmp_path):
    assert not public_imports(write("acme-part", seam, tmp_path))


@pytest.mark.parametrize("seam", KINDS)
def test_a_spec_serves_the_current_contract_and_its_options_have_a_default(seam, tmp_path, monkeypatch):
    folder = write(f"acme-{seam}-spec", seam, tmp_path)
    write_metadata(folder / "pyproject.toml", tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(folder / "src")
    registry = Catalog.discover(environ={})[seam]
    spec = registry.spec(registry.find(f"acme-{seam}-spec"))
    assert spec.api == KINDS[seam].api and set(KINDS[seam].facts) <= set(spec.limits)


@pytest.mark.parametrize("seam", ALL)
def test_a_fresh_package_passes_the_conformance_kit_and_its_own_tests(seam, tmp_path):
    folder = write(f"acme-{seam}-part", seam, tmp_path)
    env = environment([folder], tmp_path / "site") | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder / "tests"]
    done = subprocess.run(list(map(str, command)), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_pip_installs_it_and_the_command_finds_it(tmp_path):
    """Without a network: into a folder of its own, with the build back end that is here."""
    pytest.importorskip("hatchling")
    folder, site = write("acme-evictor-part", "evictor", tmp_path), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, folder]
    subprocess.run(list(map(str, pip)), check=True, timeout=300)
    env = environment([], site) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "minivllm.testing", "acme-evictor-part"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "conforms" in done.stdout, done.stdout + done.stderr


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_writes_the_package_and_says_what_is_next(tmp_path, capsys):
    assert main(["plugins", "new", "my-attn", "--seam", "attention", "--dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "my-attn" / "pyproject.toml") in out and "python -m minivllm.testing my-attn/my-attn" in out
    assert f"  pytest {tmp_path / 'my-attn'} " in out
    assert {p for p, _ in files("my-attn", "attention")} == {
        p.relative_to(tmp_path / "my-attn").as_posix() for p in (tmp_path / "my-attn").rglob("*") if p.is_file()
    }
    assert main(["plugins", "new", "my-attn", "--seam", "attention", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["plugins", "new", "my-attn", "--seam", "atention", "--dir", str(tmp_path)]) == 4
    assert "Did you mean 'attention'?" in capsys.readouterr().err


def test_a_seam_may_be_named_as_its_option_is(tmp_path):
    assert (write("acme-part", "kv_format", tmp_path) / "src" / "acme_part" / "plugin.py").is_file()


@pytest.mark.parametrize(
    "name, words",
    [
        ("My_Attn", "'my-attn'"),
        ("my--attn", "'my-attn'"),
        ("-x", "no name for a package"),
        ("a b", "no name for a package"),
        ("", "no name for a package"),
        ("../up", "no name for a package"),
        ("größe", "no name for a package"),
        ("3d", "start with a letter"),
        ("class", "no Python package"),
        ("sdpa", "built-in attention"),
        ("logit-bias", "no such refusal"),
        ("csv", "'csv' exists already"),
        ("torch", "'torch' exists already"),
        ("minivllm", "'minivllm' exists already"),
        ("attention", "name of a seam"),
    ],
)
def test_names_that_cannot_be_are_refused_with_a_reason(name, words, tmp_path):
    if words == "no such refusal":
        check_name(name)
        return
    with pytest.raises(PluginError, match=words):
        write(name, "attention", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_builtin_name_can_be_taken():
    for _, name, _ in BUILTINS:
        with pytest.raises(PluginError):
            check_name(name)


def test_nothing_is_overwritten(tmp_path):
    for make in (Path.mkdir, Path.touch, lambda p: p.symlink_to("nowhere")):
        make(tmp_path / "my-part")
        with pytest.raises(ConfigError, match="exists already"):
            write("my-part", "evictor", tmp_path)
        path = tmp_path / "my-part"
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        write("my-part", "evictor", tmp_path / "file")
