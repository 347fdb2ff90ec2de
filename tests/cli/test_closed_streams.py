"""A command whose standard streams are closed says what it can, and ends with an exit code, never a traceback."""

import json
import os
import subprocess
import sys

import pytest

from minivllm.cli import streams

COMMANDS = {
    "plugins": ("plugins",), "version": ("--version",), "help": ("--help",),
    "explain": ("explain", "--model", "pocket"), "wrong": ("plugins", "--no-such"), "doctor help": ("doctor", "--help"),
}  # fmt: skip
WAYS = {"0": "<&-", "1": ">&-", "2": "2>&-", "all": "<&- >&- 2>&-", "full": ">/dev/full"}


def run(command, way):
    line = f"exec {sys.executable} -m minivllm {' '.join(command)} {way}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("way", ["1", "all"])
def test_a_command_whose_streams_are_closed_ends_with_its_exit_code(name, way):
    done = run(COMMANDS[name], WAYS[way])
    assert done.returncode == (2 if name == "wrong" else 5), done.stderr
    assert "Traceback" not in done.stderr and "a bug" not in done.stderr
    assert way != "1" or "standard output is closed" in done.stderr or name == "wrong"


@pytest.mark.parametrize("way", ["0", "2", "full"])
def test_streams_that_are_no_result_may_be_closed(way):
    done = run(COMMANDS["plugins"], WAYS[way])
    assert done.returncode == (5 if way == "full" else 0) and "Traceback" not in done.stderr


def test_a_closed_stream_keeps_its_number(tmp_path):
    """Else the next file that is opened gets it, and with it all that is printed."""
    script = (
        "import os, sys; from minivllm.cli import streams; lost = streams.open_closed_streams(); "
        "print('x'); print('y', file=sys.stderr);"
        f"fd = os.open({str(tmp_path / 'f')!r}, os.O_CREAT | os.O_WRONLY); os.write(fd, b'%d %d' % (fd, lost.written));"
        "assert sys.stdin.read() == ''"
    )
    done = subprocess.run(["bash", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', script], timeout=60)
    number, lost = (tmp_path / "f").read_text().split()
    assert done.returncode == 0 and int(number) > 2 and lost == "1"
    assert streams.open_closed_streams() is None and os.fstat(1)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_standard_output_lacks_are_escaped_as_in_json(tmp_path, encoding):
    (tmp_path / "exp.toml").write_text('[run]\nprompts = ["é 猫🙂"]\n', encoding="utf-8")
    command = [sys.executable, "-m", "minivllm", "config", "show", str(tmp_path / "exp.toml"), "--format", "json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode(encoding))["run"]["prompts"] == ["é 猫🙂"]
