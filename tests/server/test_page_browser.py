"""The page in a real browser: ``tests/browser/run.py`` as .ci/full runs it."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ci_runs_the_browser_and_the_cases_are_those_of_the_issue():
    """Every case that the page must withstand is there, and the script of .ci/full is the one beside it."""
    source = (ROOT / "tests" / "browser" / "page.mjs").read_text(encoding="utf-8")
    cases = {plain or quoted for plain, quoted in re.findall(r"^  async (?:(\w+)|\"([\w ]+)\")\(\)", source, re.M)}
    assert {"stream", "stop", "edit", "reload", "hostile", "hostile answers"} <= cases
    assert {"policy", "restart", "many", "axe", "paint"} <= cases
    if (ROOT / ".ci" / "full").exists():
        assert "python tests/browser/run.py" in (ROOT / ".ci" / "full").read_text(encoding="utf-8")


def test_without_a_browser_the_cases_are_skipped(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "browser" / "run.py")]
    done = subprocess.run(command, env={"PATH": str(tmp_path), "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 77 and "skipped" in done.stdout, done.stderr
