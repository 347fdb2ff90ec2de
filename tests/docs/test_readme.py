"""The commands of README's list, pasted block by block in an empty folder."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^<!-- ci: (commands|chat|serve) -->\n```bash\n(.*?)^```$", re.M | re.S)


def blocks(kind):
    return [text for name, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")) if name == kind]


@pytest.fixture
def shell(tmp_path):
    """Runs a text in bash, in an empty folder in which ``minivllm`` is a command of this tree."""
    tools, folder = tmp_path / "bin", tmp_path / "empty"
    tools.mkdir()
    folder.mkdir()
    command = tools / "minivllm"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m minivllm "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def start(text):
        words = ["bash", "-e", "-o", "pipefail", "-c", text]
        ends = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return subprocess.Popen(words, cwd=folder, env=env, text=True, **ends)

    return start


def test_readme_makes_the_files_that_its_commands_name():
    made, *commands = blocks("commands")
    there = set(re.findall(r"> ([\w.]+)", made))
    for line in "".join(commands).splitlines():
        words = line.partition("  #")[0].split()
        there |= {words[i + 1] for i, word in enumerate(words) if word in ("--record", "-o")}
        used = {word for word in words if re.fullmatch(r"[\w-]+\.(toml|json|jsonl|py)", word)}
        assert used <= there, line
    assert len(blocks("chat")) == len(blocks("serve")) == 1


@pytest.mark.slow
def test_each_command_of_readme_works_as_it_is_pasted(shell):
    made, *commands = blocks("commands")
    lines = "".join(commands).splitlines()
    assert len(lines) >= 17
    text = made + "\n".join(f"{line}\necho done {i}" for i, line in enumerate(lines))
    running = shell(text)
    try:
        out, _ = running.communicate(timeout=1200)
    finally:
        running.kill()
    assert running.returncode == 0, out[-3000:]
    assert f"done {len(lines) - 1}" in out and "only evictor differs" in out


@pytest.mark.slow
def test_chat_of_readme_ends_with_its_input(shell):
    running = shell(blocks("chat")[0])
    try:
        assert running.wait(timeout=120) == 0
    finally:
        running.kill()


@pytest.mark.slow
def test_serve_of_readme_answers(shell):
    pytest.importorskip("fastapi")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = shell("exec " + blocks("serve")[0].replace("8000", str(port)))
    try:
        end, answered = time.monotonic() + 120, False
        while not answered and time.monotonic() < end and running.poll() is None:
            time.sleep(0.5)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                    answered = reply.status == 200
            except OSError:
                pass
        assert answered
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) is not None
    finally:
        running.kill()
