"""``minivllm zygote``: commands in forks of a process that has imported torch already."""

from __future__ import annotations

import gc
import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest

from minivllm.cli import main
from minivllm.errors import ResourceError
from minivllm.runtime.processes import zygote

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
GENERATE = ("generate", "--quiet", "--max-tokens", "4", "--temperature", "0")


class User:
    """A user with one zygote, whose socket is in a folder of its own."""

    def __init__(self, folder: str) -> None:
        self.folder, self.environ = folder, {**os.environ, "XDG_RUNTIME_DIR": folder}

    def open(self, *words: str, **options) -> subprocess.Popen:
        command = [sys.executable, "-m", "minivllm", "zygote", *words]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(command, **{"env": self.environ, "text": True, **pipes, **options})

    def call(self, *words: str, text: str = "", **options) -> tuple[int, str, str]:
        process = self.open(*words, **options)
        out, err = process.communicate(text, timeout=120)
        return process.returncode, out, err

    def waiting(self) -> subprocess.Popen:
        """Return a command that has started and waits for its standard input."""
        before = int(self.call("status")[1].split(" commands")[0].split()[-1])
        process = self.open("run", "generate")
        while f" {before + 1} commands" not in self.call("status")[1]:
            time.sleep(0.1)
        time.sleep(1)
        return process

    def until_idle(self) -> None:
        """Wait until no command runs."""
        deadline = time.monotonic() + 60
        while " 0 running" not in self.call("status")[1]:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.fixture(scope="module")
def user():
    with tempfile.TemporaryDirectory() as folder:
        user = User(folder)
        code, _, err = user.call("run", "version")
        assert code == 5 and "no zygote is running; `minivllm zygote start` starts one" in err
        assert user.call("start") == (0, "", "")
        yield user
        pid = int(user.call("status")[1].split()[1].rstrip(","))
        assert user.call("stop")[0] == 0
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}").exists() and not list(Path(folder).rglob("zygote-*[0-9a-f]"))
        assert user.call("status")[0] == 1


def test_a_command_prints_what_it_prints_without_a_zygote(user, capsys):
    assert main([*GENERATE, "Once upon a time"]) == 0
    want = capsys.readouterr().out
    code, out, err = user.call("run", *GENERATE, "Once upon a time")
    assert (code, out) == (0, want) and "4 tokens" in err
    assert user.call("run", *GENERATE, text="Once upon a time\n")[:2] == (0, want)


def test_the_exit_code_of_a_command_is_that_of_the_client(user):
    code, out, err = user.call("run", "generate", "--nope")
    assert code == 2 and out == "" and "--nope" in err
    assert user.call("run", "version")[0] == 0


def test_a_command_runs_in_the_folder_of_the_client(user, tmp_path):
    (tmp_path / "here.toml").write_text('model = "nowhere"\n')
    code, _, err = user.call("run", *GENERATE, "--config", "here.toml", "x", cwd=tmp_path)
    assert code == 3 and "nowhere" in err


def test_ctrl_c_interrupts_the_command_and_a_signal_that_ends_it_ends_the_client(user):
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
        process = user.waiting()
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == code
    user.until_idle()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_ctrl_z_stops_the_command_and_sigcont_continues_it(user):
    process = user.waiting()
    (attending,) = children_of(int(user.call("status")[1].split()[1].rstrip(",")))
    (command,) = children_of(attending)
    for number, state in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
        process.send_signal(number)
        deadline = time.monotonic() + 30
        while (state_of(command), state_of(process.pid)) != (state, state):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    process.terminate()
    process.communicate(timeout=60)
    user.until_idle()


def test_a_command_ends_when_its_client_is_killed(user):
    process = user.waiting()
    process.kill()
    process.wait()
    user.until_idle()


def test_a_variable_that_libraries_read_when_they_are_imported_must_be_as_at_the_start(user):
    other = {**user.environ, "OMP_NUM_THREADS": "7"}
    code, _, err = user.call("run", "version", env=other)
    assert code == 5 and "OMP_NUM_THREADS is '7' here" in err and "stop" in err


def test_only_the_user_may_connect(user):
    (path,) = [path for path in Path(user.folder).rglob("zygote-*") if path.is_socket()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_second_start_keeps_the_first_zygote(user):
    pid = user.call("status")[1].split()[1]
    code, _, err = user.call("start")
    assert code == 0 and f"process {pid.rstrip(',')}" in err and user.call("status")[1].split()[1] == pid


def test_words_that_no_zygote_can_run_are_refused(user):
    for words in (("run",), ("run", "zygote", "start"), ("stop", "now"), ("start", "--idle", "0")):
        code = user.call(*words)[0]
        assert code == 2, words


def test_a_folder_that_others_may_enter_is_refused(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 bytes, and ``tmp_path`` may be long
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        zygote.socket_path()
        Path(short, f"minivllm-{os.getuid()}").chmod(0o755)
        with pytest.raises(ResourceError, match="mode 0700"):
            zygote.socket_path()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ResourceError, match="at most 107 bytes"):
        zygote.socket_path()


SCRIPT = """
import json, os, sys
from minivllm.runtime.processes import zygote
zygote.become(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
mask = os.umask(0)
found = [sys.stdin.readline(), os.getcwd(), mask, os.environ.get("HERE"), os.environ.get("HOME"), sys.stdout.isatty()]
print(json.dumps(found))
print("to the terminal", file=sys.stderr)
"""


def test_a_fork_gets_streams_terminal_folder_mask_and_environment_of_the_client(tmp_path):
    controller, terminal = pty.openpty()
    read, write = os.pipe()
    os.write(write, b"a line\n")
    message = {"folder": str(tmp_path), "umask": 0o027, "environ": {"HERE": "yes", "PATH": os.environ["PATH"]}}
    descriptors = [read, terminal, os.dup(terminal)]
    arguments = [json.dumps(message), json.dumps(descriptors)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], pass_fds=descriptors, check=True)
    lines = os.read(controller, 4096).decode().splitlines()
    assert done.returncode == 0 and lines[1] == "to the terminal"
    assert json.loads(lines[0]) == ["a line\n", str(tmp_path), 0o027, "yes", None, True]
    for descriptor in (controller, write, *descriptors):
        os.close(descriptor)


@pytest.fixture
def idle_zygote(tmp_path):
    """Return a zygote in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        lock = os.open(tmp_path / "lock", os.O_CREAT)
        yield zygote.Zygote(listening, path, 0.1, {}, lock)
        os.close(lock)
    gc.unfreeze()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_zygote_ends_after_its_idle_time(idle_zygote):
    assert idle_zygote.path.exists()
    idle_zygote.serve()
    assert not idle_zygote.path.exists() and idle_zygote.words is None


def test_a_changed_source_file_ends_the_zygote(idle_zygote, tmp_path, monkeypatch):
    module = ModuleType("changing")
    module.__file__ = str(tmp_path / "changing.py")
    Path(module.__file__).write_text("1")
    monkeypatch.setitem(sys.modules, "changing", module)
    idle_zygote.sources = zygote.sources()
    message = {"environ": {}}
    assert idle_zygote._refusal(message) == "" and idle_zygote.running
    Path(module.__file__).write_text("12")
    assert "changing.py has changed" in idle_zygote._refusal(message) and not idle_zygote.running
