"""A plug-in whose import ends the process, or fails, is named, in every way of starting an engine."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
from plugin_helpers import install, spec_text

from minivllm.core.external_calls import alone, call_foreign
from minivllm.errors import PluginError
from minivllm.plugins.evictor.fifo import Fifo
from minivllm.registration import importing
from minivllm.registration.importing import ends_process, guarded_import
from minivllm.registration.spec import Part, PluginQuery
from minivllm.registry import Catalog, build_part

ENDS = {
    "os._exit(0)": "ended the process with exit code 0",
    "os._exit(3)": "ended the process with exit code 3",
    "os.kill(os.getpid(), 9)": "killed the process: SIGKILL",
    "os.kill(os.getpid(), 15)": "killed the process: SIGTERM",
    "os.killpg(0, 9)": "killed the process: SIGKILL",
    "os.abort()": "killed the process: SIGABRT",
    "import ctypes; ctypes.string_at(0)": "killed the process: SIGSEGV",
    "os.execv('/bin/false', ['false'])": "ended the process with exit code 1",
}
GOES_ON = ["pass", "raise SystemExit(3)", "1 / 0", "print('x')", "import sys; sys.exit(0)", "os.close(1)"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(text):
        name = f"ends_{len(made)}_{os.getpid()}"
        (tmp_path / f"{name}.py").write_text(f"import os\n{text}\nclass Made: pass\n")
        made.append(name)
        return f"{name}:Made"

    yield write
    for name in made:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("text", ENDS)
def test_an_import_that_ends_the_process_is_an_error_with_the_plugins_name(module, text):
    target = module(text)
    with pytest.raises(PluginError) as e:
        guarded_import("evictor 'acme/bad' (acme 1.0)", target, "acme 1.0")
    assert e.value.exit_code == 4
    assert (
        str(e.value)
        == f"evictor 'acme/bad' (acme 1.0) could not be imported from {target!r}: importing it {ENDS[text]}"
    )


@pytest.mark.parametrize("text", GOES_ON)
def test_an_import_that_does_not_end_the_process_is_tried_without_a_trace(module, capfd, text):
    target = module(text)
    assert ends_process(target) == "" and target.partition(":")[0] not in sys.modules
    assert capfd.readouterr() == ("", "")


def test_what_dies_only_of_having_been_forked_is_taken(module):
    forked = "'pytest' in __import__('sys').modules and os.getpid() == os.getsid(0)"
    target = module(f"if {forked}: os._exit(9)")
    assert importing._forked(target) == 9 and ends_process(target) == ""
    assert guarded_import("x", target, "acme 1.0").__name__ == "Made"


def test_an_import_that_takes_long_is_not_waited_for_twice(module, monkeypatch):
    monkeypatch.setattr(importing, "PATIENCE", 0.2)
    begin = time.perf_counter()
    assert ends_process(module("__import__('time').sleep(60)")) == "" and time.perf_counter() - begin < 5


def test_built_ins_and_what_is_imported_already_are_not_tried(monkeypatch):
    monkeypatch.setattr(importing, "_forked", lambda target: 1 / 0)
    assert ends_process(f"{__name__}:module") == ""
    guarded_import("x", "minivllm.plugins.evictor.fifo:Fifo", "minivllm 1.0")


@pytest.mark.parametrize("spec", [True, False])
def test_specs_and_implementations_that_end_the_process_are_named(tmp_path, monkeypatch, spec):
    monkeypatch.syspath_prepend(tmp_path)
    bad, good = "import os\nos._exit(3)\n", spec_text(impl="ends_impl:Bad")
    install(
        tmp_path, "acme", {"minivllm.evictor": {"bad": "ends_spec:S"}}, ends_spec=bad if spec else good, ends_impl=bad
    )
    registry = Catalog.discover(environ={})["evictor"]
    with pytest.raises(PluginError, match=r"acme 1\.0.*ended the process with exit code 3"):
        registry.load(registry.select(PluginQuery(), "acme/bad").require())


COMMANDS = {
    "generate": ["generate", "--max-tokens", "2", "x"],
    "explain": ["explain", "evictor"],
    "serve": ["serve", "--port", "0"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_with_4_and_name_it(tmp_path, command):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(0)\n")
    argv = [sys.executable, "-m", "minivllm", *COMMANDS[command], "--set", "evictor.name=deadly:Evil"]
    argv += ["--allow-target", "deadly"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 4, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
    assert "deadly:Evil" in done.stderr and "ended the process with exit code 0" in done.stderr


class TimeIsUp(Exception):
    """The exception of an application's own handler of a signal."""


def leave(number, frame):
    """Restore the default, as handlers do so that a second signal ends the process, and raise SystemExit."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


class Handlers:
    def expire(self, number, *rest):
        raise TimeIsUp

    def __call__(self, *args):
        sys.exit(7)


HANDLERS = [
    (leave, SystemExit),
    (Handlers().expire, TimeIsUp),
    (Handlers(), SystemExit),
    (functools.partial(lambda code, number, frame: sys.exit(code), 3), SystemExit),
    (signal.default_int_handler, KeyboardInterrupt),
]


@pytest.fixture(params=HANDLERS, ids=["function", "method", "object", "partial", "default"])
def handled(request):
    """Install a handler of SIGUSR1 that raises an exception, and return its class."""
    before = signal.signal(signal.SIGUSR1, request.param[0])
    yield request.param[1]
    signal.signal(signal.SIGUSR1, before)


KILL = "os.kill(os.getpid(), __import__('signal').SIGUSR1)"


def test_the_exception_of_a_signal_handler_passes_through_an_import(module, monkeypatch, handled):
    monkeypatch.setattr(importing, "on", False)  # the signal would end the trial
    with pytest.raises(handled):
        guarded_import("x", module(f"def go():\n    {KILL}\n    1\n\ngo()"), "acme 1.0")


def test_the_exception_of_a_signal_handler_passes_through_the_check_of_a_spec(tmp_path, monkeypatch, handled):
    monkeypatch.syspath_prepend(tmp_path)
    check = f"import os\n\ndef check(query):\n    {KILL}\n    return []\n\n"
    text = check + spec_text().replace('"for a test"', '"for a test", check=check')
    install(
        tmp_path, "acme", {"minivllm.evictor": {"bad": f"{tmp_path.name}_spec:S"}}, **{f"{tmp_path.name}_spec": text}
    )
    with pytest.raises(handled):
        Catalog.discover(environ={})["evictor"].select(PluginQuery(), "acme/bad")


class Killed(Fifo):
    def __init__(self, *_):
        os.kill(os.getpid(), signal.SIGUSR1)


def test_the_exception_of_a_signal_handler_passes_through_a_constructor(handled):
    with pytest.raises(handled):
        build_part("evictor", Part("acme/bad", f"{__name__}:Killed"))


def test_the_exception_of_a_signal_handler_is_raised_after_a_call_of_external_code(handled):
    """Only an ``Exception`` is the result of the call itself, as any other."""

    class Engine:
        within = ""

        @alone
        def step(self):
            with contextlib.suppress(Exception):
                call_foreign(os.kill, os.getpid(), signal.SIGUSR1)

    raised = pytest.raises(handled) if handled is not TimeIsUp else contextlib.nullcontext()
    with raised:
        Engine().step()


@pytest.mark.parametrize("text", ["import sys; sys.exit(4)", "raise KeyError(os)"])
def test_what_a_module_raises_itself_is_an_error_with_the_plugins_name(module, text):
    with pytest.raises(PluginError, match=r"evictor 'acme/bad' could not be imported"):
        guarded_import("evictor 'acme/bad'", module(text), "acme 1.0")


def test_a_late_import_is_an_error_although_a_signal_ends_it(module, monkeypatch):
    monkeypatch.setenv("MINIVLLM_PLUGIN_TIMEOUT", "0.2")
    monkeypatch.setattr(importing, "on", False)
    with pytest.raises(PluginError, match="had not ended after"):
        guarded_import("x", module("__import__('time').sleep(60)"), "acme 1.0")
