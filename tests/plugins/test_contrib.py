"""The packages in contrib/: they import public modules only, pass the kit, and serve the model in the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packages import PUBLIC, environment, public_imports, tomllib, write_metadata

from minivllm.cli import main

ROOT = Path(__file__).resolve().parents[2]
CONTRIB = sorted(p.parent for p in (ROOT / "contrib").glob("*/pyproject.toml"))
NAMES = [p.name for p in CONTRIB]
pytestmark = pytest.mark.skipif(not CONTRIB, reason="no contrib/ in this checkout")


def run(package, tmp_path, *command, timeout=900):
    env = environment([package], tmp_path / "site") | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("package", CONTRIB, ids=NAMES)
def test_a_package_imports_nothing_of_minivllm_but_public_modules(package):
    assert not public_imports(package)
    used = re.findall(r'impl="(minivllm\.[\w.]+)', "".join(p.read_text() for p in package.rglob("spec.py")))
    assert not used, "a spec names an implementation that is not its own"


def test_a_private_import_is_found(tmp_path):
    for i, line in enumerate(
        (
            "import minivllm.core.engine.engine",
            "from minivllm.core.engine import planner",
            "from minivllm.registry import Catalog",
            "def f():\n    from minivllm.plugins.evictor.lru import Lru",
            "from minivllm import llm",
            "from minivllm.registration.spec import Spec",
            "from minivllm.core.interfaces.evictor import Evictor",
        )
    ):
        (tmp_path / "a.py").write_text(line)
        assert len(public_imports(tmp_path)) == 1, (i, line)
    fine = ("import minivllm", "from minivllm import LLM", "from minivllm.plugin import StepPlan", "import torch")
    (tmp_path / "a.py").write_text("\n".join(fine))
    assert not public_imports(tmp_path)


def test_the_documents_say_which_modules_are_public():
    text = (ROOT / "docs" / "plugins.md").read_text()
    assert all(f"`{name}`" in text for name in PUBLIC)


@pytest.mark.parametrize("package", CONTRIB, ids=NAMES)
def test_a_package_is_whole(package):
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name and project["license"] and "minivllm" in project["dependencies"][0]
    readme = (package / "README.md").read_text()
    assert f"python -m minivllm.testing {package.name}/" in readme
    assert any("Conformance" in p.read_text() for p in (package / "tests").glob("test_*.py"))


# without a compiler FlexAttention is traced anew for each length: half a minute
MARKS = {"minivllm-flex": pytest.mark.slow, "minivllm-xformers": pytest.mark.gpu}
EXAMPLES = [pytest.param(p, marks=MARKS.get(p.name, ()), id=p.name) for p in CONTRIB]


@pytest.mark.parametrize("package", EXAMPLES)
def test_its_example_runs_with_the_model_in_the_package(package, tmp_path, monkeypatch, capsys):
    write_metadata(package / "pyproject.toml", tmp_path)
    for path in (tmp_path, package / "src"):
        monkeypatch.syspath_prepend(path)
    stand_in = package / "tests" / "stand_in"  # of a library, where it is not installed
    if stand_in.is_dir():
        monkeypatch.setattr(sys, "path", [*sys.path, str(stand_in)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is small
    try:
        assert main(["run", str(package / "example.toml")]) == 0, capsys.readouterr().err
    finally:
        torch.set_num_threads(threads)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == tomllib.loads((package / "example.toml").read_text())["run"]["prompts"]
    assert all(line["outputs"][0]["finish_reason"] in ("stop", "length") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("package", CONTRIB, ids=NAMES)
def test_it_passes_the_conformance_kit_and_its_own_tests(package, tmp_path):
    out = run(package, tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", package, package / "tests")
    assert " passed" in out or re.search(r"\[100%\]", out)
