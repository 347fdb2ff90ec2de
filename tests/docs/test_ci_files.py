"""The files of CI and of pre-commit agree with .ci/run, and a release has all files and no other."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
pytestmark = pytest.mark.skipif(not FORMS or not (ROOT / ".git").exists(), reason="an sdist is no checkout")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_hooks_before_a_commit_check_the_files_that_ci_checks():
    hooks = {
        hook["id"]: hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]
    }
    assert {hook["language"] for hook in hooks.values()} == {"system"}
    files = re.search(r"^ruff format --check (.+)$", read(".ci/run"), re.M)[1]
    assert hooks["ruff-format"]["entry"] == f"bash -c 'ruff format {files}'"
    for name in ("ruff-check", "budgets"):
        assert f"\n{hooks[name]['entry']}\n" in read(".ci/run")


def test_the_workflow_runs_ci_on_versions_of_python_that_are_allowed():
    job = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["run"]
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    versions = job["strategy"]["matrix"]["python"]
    oldest, end = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', read("pyproject.toml")).groups()
    assert versions[0] == f"3.{oldest}"
    assert all(int(oldest) <= int(version.removeprefix("3.")) < int(end) for version in versions)


def test_no_file_in_git_is_one_that_git_ignores():
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr


def test_test_files_that_ci_names_are_there():
    scripts = [path for path in (ROOT / ".ci").iterdir() if path.is_file()]
    named = {name for path in scripts for name in re.findall(r"tests/[\w/]+\.py", path.read_text(encoding="utf-8"))}
    assert len(named) >= 10
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_an_issue_form_has_what_its_host_wants(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= set(form)
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields and all(part["type"] in ("input", "textarea") and part["attributes"]["label"] for part in fields)
    names = [part["id"] for part in fields]
    assert len(set(names)) == len(names)


def test_a_release_lacks_no_file_of_the_package_and_has_no_other():
    faults_of = runpy.run_path(str(ROOT / ".ci" / "release_contents.py"))["faults_of"]
    page = "server/page/static"
    names = "py.typed", "pocket/model/model.safetensors", "x/native/kernels.cpp", f"{page}/index.html"
    package = {f"minivllm/{name}" for name in (*names, f"{page}/licences.txt")}
    built = "minivllm/x/native/_cpu.so"
    assert faults_of(package | {"LICENSE"}, {"the license": "LICENSE"}, package) == []
    assert faults_of(package | {built}, {}, package, re.escape(built)) == []
    assert faults_of(package, {"the license": "LICENSE"}, package) == ["lacks the license (LICENSE)"]
    assert faults_of(package | {built}, {}, package) == [f"has {built}, which is not in git"]
    for name in package:
        assert f"lacks {name}" in faults_of(package - {name}, {}, package)
