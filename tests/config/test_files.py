"""Files that a user names: each is a regular file of bounded size, or refused by name before anybody waits for it."""

import codecs
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import threading
import time

import pytest

from minivllm import files
from minivllm.cli.commands import read_prompts
from minivllm.config import load_config
from minivllm.device.loading.hf_config import find_model, open_checkpoint
from minivllm.device.loading.tensor_files import checkpoint_headers
from minivllm.errors import ConfigError, MinivllmError, ModelError
from minivllm.frontend.record import bill
from minivllm.lab.traces.read import read_trace
from minivllm.runtime.text.tokenizer import load_tokenizer
from minivllm.server.batch import lines_of
from minivllm.server.http.auth import read_keys
from minivllm.testing.cli import _known as known_failures

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
TIB = 1 << 40


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Fail if code waits for a FIFO forever.  FIFOs that a test names are allowed for a while."""
    monkeypatch.setattr(files, "PATIENCE", 0.2)

    def late(*_):
        raise AssertionError("it waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def fifo(path):
    os.mkfifo(path)


def linked(target):
    def make(path):
        if target == "fifo":
            os.mkfifo(f"{path}.real")
            target_path = f"{path}.real"
        else:
            target_path = target
        os.symlink(target_path, path)

    return make


def sparse(path):
    with open(path, "wb") as file:
        try:
            file.truncate(TIB)
        except OSError:
            file.truncate(12 << 30)


def listening(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "a FIFO": (fifo, "is a FIFO"),
    "a link to a FIFO": (linked("fifo"), "is a FIFO"),
    "/dev/zero": (linked("/dev/zero"), "is a device"),
    "a device that waits": (linked("/dev/tty"), "is a device"),
    "a directory": (os.mkdir, "is a directory"),
    "a socket": (listening, "is a socket"),
    "a link to itself": (lambda path: os.symlink(path, path), "symbolic links"),
    "a link to nothing": (linked("/no/such/file"), "no such file"),
    "a terabyte": (sparse, "bytes: expected a file of at most"),
    "a pointer": (lambda path: path.write_text(POINTER), "run `git lfs pull`"),
    "no UTF-8": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8"),
}
READERS = {
    "a.toml": lambda path: load_config([path], environ={}),
    "a.yaml": lambda path: load_config([path], environ={}),
    "a.json": lambda path: load_config([path], environ={}),
    "a.ini": lambda path: load_config([path], environ={}),
    "keys.txt": lambda path: read_keys(str(path)),
    "prompts.txt": lambda path: read_prompts(str(path)),
    "prompts.jsonl": lambda path: read_prompts(str(path)),
    "run.json": bill.read,
    "trace.csv": lambda path: read_trace(str(path)),
    "trace.jsonl": lambda path: read_trace(str(path)),
    "known.txt": lambda path: known_failures(str(path)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name, kind):
    make, word = KINDS[kind]
    path = tmp_path / name
    make(path)
    if (name, kind) == ("a.ini", "no UTF-8"):
        word = "expected a file that ends in .toml"  # a hook may read other endings
    with pytest.raises(ConfigError) as info:
        READERS[name](path)
    assert word in str(info.value) and name in str(info.value) and len(str(info.value)) < 1000


def test_a_schema_of_another_kind_is_refused_on_the_command_line(tmp_path, capsys):
    from minivllm.cli import main

    for path in (tmp_path, "/dev/zero", "/proc/self/mem"):
        assert main(["generate", "hi", "--json-schema", str(path)]) == 2
        assert "--json-schema" in (reported := capsys.readouterr().err) and "bug" not in reported
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 200_000)
    assert main(["chat", "--url", "http://127.0.0.1:9", "--json-schema", str(deep)]) == 2
    assert "fewer levels" in (reported := capsys.readouterr().err) and "bug" not in reported


@contextlib.contextmanager
def piped(data, ends=True):
    """The name of a pipe, as a shell makes it of <(command), to which ``data`` is written by and by."""
    ours, theirs = os.pipe()
    stop = threading.Event()

    def write():
        with contextlib.suppress(OSError):
            for part in data:
                time.sleep(0.01)
                os.write(theirs, part)
        if not ends:
            stop.wait(30)
        os.close(theirs)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield f"/dev/fd/{ours}"
    finally:
        stop.set()
        os.close(ours)
        thread.join(30)


def test_a_pipe_that_is_named_on_purpose_is_read_to_its_end():
    text = ['{"type": ', '"object", "title": "\u00e9"', "}" + " " * 200_000]
    with piped([one.encode() for one in text]) as path:
        assert files.read_given(path) == "".join(text)
    with piped([b"# keys\n", b"sk-1\nsk", b"-2\n"]) as path:
        assert read_keys(path) == ["sk-1", "sk-2"]
    with piped([]) as path:
        assert files.read_given(path) == ""


def test_a_pipe_is_bounded_in_size_and_time_and_refused_by_name(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "nobody")
    with pytest.raises(ConfigError, match=r"nobody: is a FIFO that sent nothing for 0\.2 s"):
        files.read_given(tmp_path / "nobody")
    with piped([b"{"], ends=False) as path, pytest.raises(ConfigError, match="schema: is a FIFO that sent nothing"):
        files.read_given(path, name="schema")
    with (
        piped([b"x" * 4096] * 50) as path,
        pytest.raises(ConfigError, match="schema: more: expected a file of at most"),
    ):
        files.read_given(path, most=files.MIB // 8, name="schema")
    with piped([b"\xff"]) as path, pytest.raises(ConfigError, match="schema: not UTF-8"):
        files.read_given(path, name="schema")
    monkeypatch.setattr(files, "SLOWEST", 0.3)
    with piped([b"x"] * 200) as path, pytest.raises(ConfigError, match="FIFO that sent nothing"):
        files.read_given(path)


MODEL_FILES = {
    "config.json": open_checkpoint,
    "model.safetensors": lambda folder: checkpoint_headers(find_model(folder)),
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
    "special_tokens_map.json": load_tokenizer,
    "generation_config.json": load_tokenizer,
    "chat_template.jinja": load_tokenizer,
    "chat_template.json": load_tokenizer,
    "model.safetensors.index.json": lambda folder: checkpoint_headers(find_model(folder)),
    "model-00001-of-00001.safetensors": lambda folder: checkpoint_headers(find_model(folder)),
}


@pytest.fixture(scope="module")
def pocket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for file in find_model("pocket").iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "a link to nothing"])
@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_model_file_of_another_kind_is_refused_by_name(pocket, tmp_path, name, kind):
    make, word = KINDS[kind]
    for file in pocket.iterdir():
        if file.name != name and not (file.name == "model.safetensors" and "model" in name):
            os.link(file, tmp_path / file.name)
    if name == "model-00001-of-00001.safetensors":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    if name == "chat_template.json":
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    make(tmp_path / name)
    if kind in ("a terabyte", "no UTF-8") and name.endswith(".safetensors"):
        word = "not a whole safetensors file"  # mapped, not read
    if kind == "no UTF-8" and name == "tokenizer.json":
        word = "not a tokenizer"
    with pytest.raises(ModelError) as info:
        MODEL_FILES[name](str(tmp_path))
    assert word in str(info.value) and name in str(info.value)


def test_of_a_tokenizer_that_transformers_reads_every_file_is_looked_at(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    os.mkfifo(tmp_path / "merges.txt")
    with pytest.raises(ModelError, match=r"merges.txt: is a FIFO"):
        load_tokenizer(tmp_path)


def test_pickles_beside_weights_and_pointers_that_nobody_reads_are_left_alone(pocket, tmp_path):
    for file in pocket.iterdir():
        os.link(file, tmp_path / file.name)
    (tmp_path / "consolidated.safetensors").write_text(POINTER)
    os.mkfifo(tmp_path / "notes.txt")
    assert checkpoint_headers(tmp_path) and load_tokenizer(tmp_path) and open_checkpoint(str(tmp_path))


# ---------------------------------------------------------------- where something is written

OUTPUTS = {"a FIFO": "is a FIFO", "a link to a FIFO": "is a FIFO", "a directory": "directory", "a socket": "socket"}


def step_log(path):
    from minivllm.plugins.hooks.options import StepLogOptions
    from minivllm.plugins.hooks.step_log import StepLog

    StepLog(StepLogOptions(path=str(path))).minivllm_engine_started(None)


def chrome(path):
    from minivllm.core.timing import StepClock

    StepClock().chrome_trace(path)


WRITERS = {
    "out.jsonl": files.check_output,
    "log.csv": step_log,
    "run.json": bill.check_writable,
    "trace.json": chrome,
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_goes_to_a_regular_file(tmp_path, name, kind):
    KINDS[kind][0](tmp_path / name)
    with pytest.raises(MinivllmError) as info:
        WRITERS[name](tmp_path / name)
    assert name in str(info.value) and (OUTPUTS[kind] in str(info.value) or "regular file" in str(info.value))


def test_null_takes_everything_and_what_is_there_stays(tmp_path):
    files.check_output("/dev/null")
    (tmp_path / "a").write_text("there")
    files.check_output(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "there"


def test_where_nothing_is_a_look_leaves_nothing(tmp_path):
    files.check_output(tmp_path / "new.json")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- names

NAMES = ["a\0b", "\ud800", "x" * 5000, "~nosuchuser-at-all/x", ""]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_name_that_no_file_has_is_refused(name):
    lines = lambda name: list(files.read_lines(name))  # noqa: E731
    for read in (files.read_bytes, files.read_text, files.read_json, files.check_output, lines):
        with pytest.raises(ConfigError) as info:
            read(name)
        assert len(str(info.value)) < 1000
    with pytest.raises(ModelError) as info:
        find_model(name or "./no")
    assert len(str(info.value)) < 1000


def test_a_line_without_an_end_is_refused_while_it_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"a\n" + b"x" * (files.LONGEST + 1))
    with pytest.raises(ConfigError, match=r"a.jsonl:2: a line of more than 16 MiB"):
        list(files.read_lines(tmp_path / "a.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    for name, text in (("prompts.txt", "one\r\n\ufefftwo\r\n"), ("prompts.jsonl", '"one"\r\n"\ufefftwo"\r\n')):
        path = tmp_path / name
        path.write_bytes(codecs.BOM_UTF8 + text.encode())
        assert read_prompts(str(path)) == ["one", "\ufefftwo"]
    numbered = lines_of(io.BytesIO(codecs.BOM_UTF8 + b"\r\n" + codecs.BOM_UTF8 + b"{}\r\n"))
    assert list(numbered) == [(2, codecs.BOM_UTF8 + b"{}\r\n")]


def test_a_file_of_proc_that_says_it_is_empty_is_bounded_too():
    assert files.read_bytes("/proc/self/maps")
    with pytest.raises(ConfigError, match="more: expected a file of at most 0 MiB"):
        files.read_bytes("/proc/self/maps", 10)


# ---------------------------------------------------------------- extends


def test_files_that_several_extend_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "a0.toml").write_text("seed = 7\n")
    for i in range(1, 60):
        (tmp_path / f"a{i}.toml").write_text(f"extends = ['a{i - 1}.toml', './a{i - 1}.toml']\n")
    read, real = [], files.read_text
    monkeypatch.setattr(files, "read_text", lambda path, *a, **k: (read.append(path), real(path, *a, **k))[1])
    loaded = load_config([tmp_path / "a59.toml"], environ={})
    assert len(read) == len(set(read)) == 60 == len(loaded.files) and loaded.engine.seed == 7


def test_a_chain_without_an_end_and_a_long_one_are_named(tmp_path):
    for i in range(100):
        (tmp_path / f"a{i}.toml").write_text(f"extends = 'a{(i + 1) % 100}.toml'\n")
    with pytest.raises(ConfigError, match="more than 64 files in a chain of extends"):
        load_config([tmp_path / "a0.toml"], environ={})
    for i in range(40):
        (tmp_path / f"a{i}.toml").write_text(f"extends = ['a{(i + 1) % 40}.toml', 'a{(i + 1) % 40}.toml']\n")
    with pytest.raises(ConfigError, match=r"cannot extend itself: a0.toml -> .*\.\.\. .*-> a0.toml") as info:
        load_config([tmp_path / "a0.toml"], environ={})
    assert len(str(info.value)) < 600


def test_broken_json_says_what_is_wanted_only_where_somebody_knows_it(tmp_path):
    (tmp_path / "a.json").write_text("[run]")
    for want, end in (("", "Expecting value"), ("a record", "Expecting value; expected a record")):
        with pytest.raises(ConfigError) as failed:
            files.read_json(tmp_path / "a.json", expected=want)
        assert str(failed.value).endswith(end)
