"""A plug-in from the user's file that raises or returns a wrong value.

The message names the plug-in and its file, and the line of an exception.
"""

from __future__ import annotations

import signal
import sys

import pytest
from cli_helpers import run_cli

from minivllm import errors
from minivllm.errors import PluginError, describe_error, external_part, part_fault, raised_at, start_fault
from minivllm.registration.spec import Part

BASES = {
    "scheduler": "scheduler.fcfs:Fcfs",
    "sampler": "sampler.default:DefaultSampler",
    "quantizer": "quantizer.none:Unquantized",
    "attention": "attention.sdpa:Sdpa",
    "model_arch": "model.qwen3:Qwen3",
    "evictor": "evictor.lru:Lru",
}
PART = """from minivllm.plugins.{module} import {base}


class Own({base}):
    def {method}(self, *given, **named):
        {body}
"""
LINE = 6  # where ``body`` stands


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a module with a plug-in whose method has ``body``, and returns its path."""
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own_fault", None)

    def write(seam, method, body):
        module, _, base = BASES[seam].partition(":")
        path = tmp_path / "own_fault.py"
        path.write_text(PART.format(module=module, base=base, method=method, body=body))
        return path

    yield write
    sys.modules.pop("own_fault", None)


def run(capsys, seam, *more):
    flags = ["--set", "device=cpu", "--set", f"{seam}=own_fault:Own", "--allow-target", "own_fault"]
    return run_cli(capsys, "generate", "Once", "--max-tokens", "2", *flags, *more)


RAISES = [
    ("scheduler", "key", "scheduler Own failed on this request: ", 2),
    ("scheduler", "shape", "planning failed (Own): ", 7),
    ("sampler", "bind", "local/own_fault:Own failed on this request: ", 2),
    ("sampler", "draw", "local/own_fault:Own: ", 1),
    ("quantizer", "scheme", "quantizer local/own_fault:Own failed: ", 4),
    ("attention", "layout", "attention local/own_fault:Own failed: ", 4),
    ("attention", "forward", "the step failed: attention local/own_fault:Own: ", 1),
    ("model_arch", "attention", "model local/own_fault:Own failed: ", 4),
    ("model_arch", "weights", "model local/own_fault:Own failed: ", 4),
    ("evictor", "add", "evictor Own failed in add: ", 7),
]


@pytest.mark.parametrize(("seam", "method", "names", "code"), RAISES)
def test_what_an_own_part_raises_is_told_with_the_part_its_file_and_the_line(own, capsys, seam, method, names, code):
    path = own(seam, method, 'raise KeyError("lost")')
    ended, _, err = run(capsys, seam)
    assert f"{names}KeyError: 'lost' (at {path}:{LINE})" in err and ended == code


NO_HIDDEN = "type('M', (), {'__call__': lambda *step: None, 'logits': m.logits})()"
GIVES = [
    ("scheduler", "key", "return None", "key() gave None; expected numbers"),
    ("scheduler", "shape", "return None", "shape() gave None; expected a StepShape"),
    ("sampler", "bind", "return 3", "bind returned 3; expected a Row or None"),
    (
        "sampler",
        "columns",
        "return 5",
        "the engine did not start: TypeError: 'int' object is not iterable; parts that are",
    ),
    ("quantizer", "scheme", "return 3", "scheme() gave 3 for embed; expected a WeightScheme, or None"),
    ("attention", "layout", "return None", "layout() gave None; expected a KVLayout"),
    ("model_arch", "attention", "return [None]", "attention() gave [None]; expected an AttnSpec for each layer"),
    ("model_arch", "build", "return None", "build() gave None; expected a Model, which is called and has logits()"),
    (
        "model_arch",
        "build",
        f"m = super().build(*given); return {NO_HIDDEN}",
        "parts that are not minivllm's own: model",
    ),
]


@pytest.mark.parametrize(("seam", "method", "body", "wanted"), GIVES)
def test_what_an_own_part_gives_wrongly_is_told_with_its_file(own, capsys, seam, method, body, wanted):
    path = own(seam, method, body)
    ended, _, err = run(capsys, seam)
    assert ended and wanted in err and f"(of {path})" in err and "Own" in err and "a bug" not in err


def test_a_fault_in_a_process_of_its_own_is_told_as_one_in_this_is(own, capsys):
    path = own("quantizer", "scheme", "return {}[given]")
    ended, _, err = run(capsys, "quantizer", "--set", "executor=process")
    assert ended == 4 and "quantizer local/own_fault:Own failed: KeyError" in err and f"(at {path}:{LINE})" in err


def test_of_several_parts_of_a_package_the_one_is_named_whose_method_an_exception_came_through(monkeypatch):
    monkeypatch.setattr(errors, "_external", {})
    here: dict = {"__name__": "acme.parts"}
    exec("class A:\n    def f(self): g()\n\nclass B(A): ...\n\ndef g(): raise ValueError('x')", here)
    errors.note_part("evictor acme/a", here["A"])
    for call, name in ((here["A"]().f, "evictor acme/a"), (here["g"], "evictor acme/a")):
        with pytest.raises(ValueError, match="x") as caught:
            call()
        assert external_part(caught.value) == name and raised_at(caught.value) == " (at <string>:6)"
    errors.note_part("scheduler acme/b", here["B"])
    for call, name in ((here["B"]().f, "scheduler acme/b"), (here["g"], "a part of acme")):
        with pytest.raises(ValueError, match="x") as caught:
            call()
        assert external_part(caught.value) == name
    wrapped = RuntimeError("in between")
    wrapped.__cause__ = caught.value
    assert describe_error(wrapped) == "RuntimeError: in between (at <string>:6)"
    assert describe_error(RuntimeError(describe_error(caught.value))).count("(at ") == 1
    assert str(part_fault(caught.value)) == "a part of acme failed: ValueError: x (at <string>:6)"


def test_what_was_raised_on_purpose_or_elsewhere_is_no_fault_of_a_part():
    assert part_fault(PluginError("told already")) is None
    with pytest.raises(KeyError) as caught:
        {}["a"]
    assert part_fault(caught.value) is None and describe_error(caught.value) == "KeyError: 'a'"


def test_the_exception_of_a_signal_handler_in_external_code_is_no_fault_of_a_part(monkeypatch):
    def expire(number, frame):
        raise TimeoutError("the application's")

    monkeypatch.setattr(errors, "_external", {})
    here: dict = {"__name__": "acme.parts"}
    exec("import signal\n\nclass A:\n    def f(self): signal.raise_signal(signal.SIGUSR1)", here)
    errors.note_part("evictor acme/a", here["A"])
    parts = {"evictor": Part("acme/a", "acme.parts:A")}
    before = signal.signal(signal.SIGUSR1, expire)
    try:
        with pytest.raises(TimeoutError, match="the application's") as caught:
            here["A"]().f()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert external_part(caught.value) == "evictor acme/a"
    assert part_fault(caught.value) is None and start_fault(caught.value, parts) is None
    assert start_fault(TimeoutError("of a part"), parts) is not None
