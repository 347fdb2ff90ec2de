"""What a build leaves with a compiler, without one, and where it was told to: in a folder, in a wheel, in an sdist."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from native_helpers import HOOK, ROOT, build_hook, clean, compiler, small_tree

LIBRARY, REASON = "_cpu.so", "_why_not.txt"
X86_LINUX = build_hook().platform_tag() == build_hook().PLATFORM
on_x86_linux = pytest.mark.skipif(not X86_LINUX, reason="the library is made for x86-64 Linux")


@pytest.fixture
def tree(tmp_path):
    return small_tree(tmp_path / "tree")


def left_in(folder):
    return {path.name for path in folder.iterdir()} & {LIBRARY, REASON}


# ---------------------------------------------------------------- in a folder


SYMBOL_VERSION = re.compile(rb"GLIBCXX_\d")  # of libstdc++; GCC 16 also has GLIBCXX_TUNABLES, a variable


@on_x86_linux
def test_a_library_is_compiled_for_each_instruction_set_and_stands_alone(tree, tmp_path):
    made = build_hook(tree).build(tmp_path, {"PATH": os.environ["PATH"], "CXX": f"{compiler()} -DNDEBUG"})
    library = ctypes.CDLL(str(made))
    assert library.minivllm_lanes() == 8 + 16 and library.minivllm_digits(123) == 3
    assert left_in(tmp_path) == {LIBRARY} and not list(tmp_path.glob(".build-*"))
    assert not SYMBOL_VERSION.search(made.read_bytes()), "it needs no libstdc++ where it is loaded"


@on_x86_linux
def test_the_library_exports_its_own_functions_only(tree, tmp_path):
    compiler()
    made = build_hook(tree).build(tmp_path, clean())
    listed = subprocess.run(["nm", "-D", "--defined-only", made], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert names == {"minivllm_abi", "minivllm_isa", "minivllm_lanes", "minivllm_digits"}


@on_x86_linux
def test_where_there_are_no_static_libraries_it_is_linked_without(tree, tmp_path):
    refuses = tmp_path / "refuses"
    refuses.write_text(f'#!/bin/sh\ncase "$*" in *-static-*) exit 1;; esac\nexec {compiler()} "$@"\n')
    refuses.chmod(0o755)
    made = build_hook(tree).build(tmp_path, {"CXX": str(refuses)})
    assert made.name == LIBRARY and SYMBOL_VERSION.search(made.read_bytes())


@on_x86_linux
@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"PATH": "/nowhere"}, "no C++ compiler was found ($CXX, c++, g++, clang++): install one and reinstall"),
        ({"CXX": "/bin/false"}, "the C++ compiler /bin/false failed with status 1: it says nothing"),
        ({"CXX": "/nowhere/c++"}, "the C++ compiler did not run: "),
        ({"MINIVLLM_NATIVE": "0"}, "it was built with MINIVLLM_NATIVE=0: reinstall without"),
    ],
)
def test_what_cannot_be_compiled_leaves_the_reason_in_place_of_an_older_library(tree, tmp_path, environ, reason):
    (tmp_path / LIBRARY).write_bytes(b"an older one")
    hook = build_hook(tree)
    made = hook.build(tmp_path, environ)
    assert left_in(tmp_path) == {REASON} and made.name == REASON
    assert made.read_text().startswith(reason) and made.read_text().count("\n") == 1
    if environ.get("MINIVLLM_NATIVE") != "0":
        with pytest.raises(hook.NotBuilt) as info:
            hook.build(tmp_path, {**environ, "MINIVLLM_NATIVE": "1"})
        assert str(info.value).startswith(reason)


@on_x86_linux
def test_the_reason_has_the_compilers_first_error(tree, tmp_path):
    (tree / "minivllm" / "device" / "native" / "kernels.cpp").write_text(
        "int f() { return 1; }\nint g() { return nothing; }\n"
    )
    reason = build_hook(tree).build(tmp_path, {"CXX": compiler()}).read_text()
    assert "failed with status 1: kernels.cpp:2:" in reason and "nothing" in reason


def test_another_machine_gets_a_reason_and_no_library(tree, tmp_path, monkeypatch):
    hook = build_hook(tree)
    monkeypatch.setattr(hook, "platform_tag", lambda: "linux_aarch64")
    reason = hook.build(tmp_path, clean()).read_text()
    assert reason == "it is made for linux_x86_64 only, and this Python is one of linux_aarch64\n"


def test_an_unknown_value_of_the_switch_is_refused(tree, tmp_path):
    hook = build_hook(tree)
    with pytest.raises(hook.NotBuilt, match="MINIVLLM_NATIVE='yes': expected 0"):
        hook.build(tmp_path, {"MINIVLLM_NATIVE": "yes"})
    assert not left_in(tmp_path)


@on_x86_linux
def test_run_directly_it_compiles_in_place_and_only_what_is_old(tree):
    native = tree / "minivllm" / "device" / "native"

    def run(**environ):
        command = [sys.executable, HOOK]
        done = subprocess.run(command, cwd=tree, env=clean(**environ), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    compiler()
    first, second = run(), run()
    assert first[0] == 0 and "written in" in first[1] and left_in(native) == {LIBRARY}
    assert second[0] == 0 and "is newer than its sources" in second[1]
    os.utime(native / LIBRARY, (0, 0))
    assert "written in" in run()[1]
    assert run(CXX="/bin/false") == (
        1,
        "not built: the C++ compiler /bin/false failed with status 1: it says nothing\n",
    )
    assert left_in(native) == {REASON}
    assert run(MINIVLLM_NATIVE="0")[0] == 0


# ---------------------------------------------------------------- what is shipped


def hatchling(tree, call, **environ):
    """Return the path of hatchling's build in ``tree/made``, or its output if it failed."""
    pytest.importorskip("hatchling", reason='pip install "minivllm[test]"')
    code = f"import hatchling.build as b; print(b.{call}('made'))"
    (tree / "made").mkdir(exist_ok=True)
    env = clean(**environ)
    if os.environ.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.environ["PYTHONPATH"]  # hatchling may be there
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True)
    return tree / "made" / done.stdout.split()[-1] if done.returncode == 0 else done.stdout + done.stderr


def tags_and_native(wheel):
    with zipfile.ZipFile(wheel) as file:
        (about,) = (name for name in file.namelist() if name.endswith(".dist-info/WHEEL"))
        text = file.read(about).decode()
        native = {name.rpartition("/")[2] for name in file.namelist() if name.startswith("minivllm/device/native/")}
    assert f"Tag: {wheel.stem.split('-', 2)[2]}\n" in text
    return (
        wheel.name.split("-", 2)[2],
        f"Root-Is-Purelib: {'true' if 'any' in wheel.name else 'false'}\n" in text,
        native,
    )


@on_x86_linux
def test_a_wheel_with_the_library_is_one_for_all_pythons_of_a_platform(tree):
    compiler()
    tag, reason, native = tags_and_native(hatchling(tree, "build_wheel"))
    assert tag == "py3-none-linux_x86_64.whl" and reason
    sources = {"kernels.cpp", "parts.cpp", "program.cpp", "recurrent.cpp", "rings.cpp", "sizes.h"}
    assert native == {"__init__.py", "library.py", *sources, LIBRARY}
    assert not left_in(tree / "minivllm" / "device" / "native")  # the sources are as they were


def test_a_wheel_without_a_compiler_is_one_for_all_machines_and_says_why(tree):
    (tree / "minivllm" / "device" / "native" / LIBRARY).write_bytes(b"of an editable install")
    tag, reason, native = tags_and_native(hatchling(tree, "build_wheel", CXX="/bin/false"))
    assert tag == "py3-none-any.whl" and reason
    assert REASON in native and LIBRARY not in native


def test_a_build_that_wants_the_library_fails_without_a_compiler(tree):
    reason = hatchling(tree, "build_wheel", CXX="/bin/false", MINIVLLM_NATIVE="1")
    assert isinstance(reason, str) and reason.count("status 1") == 1 and "Traceback" not in reason
    assert not list((tree / "made").iterdir())


@on_x86_linux
def test_an_editable_install_has_the_library_beside_its_sources(tree):
    pytest.importorskip("editables", reason='pip install "minivllm[test]"')
    compiler()
    native = tree / "minivllm" / "device" / "native"
    made = hatchling(tree, "build_editable")
    assert left_in(native) == {LIBRARY} and "native" not in str(zipfile.ZipFile(made).namelist())
    hatchling(tree, "build_editable", CXX="/bin/false")
    assert left_in(native) == {REASON}


def test_an_sdist_has_all_sources_and_nothing_that_was_built(tree):
    native = tree / "minivllm" / "device" / "native"
    for path in (ROOT / "minivllm" / "device" / "native").iterdir():
        if path.suffix in (".cpp", ".h"):
            (native / path.name).write_bytes(path.read_bytes())
    (native / LIBRARY).write_bytes(b"built")
    (native / REASON).write_text("built")
    with tarfile.open(hatchling(tree, "build_sdist")) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {HOOK, "pyproject.toml", ".gitignore", "minivllm/device/native/library.py"} <= names
    assert {f"minivllm/device/native/{name}" for name in sources_of(native)} <= names
    assert not names & {f"minivllm/device/native/{LIBRARY}", f"minivllm/device/native/{REASON}"}


def sources_of(native: Path):
    return {path.name for path in native.iterdir() if path.suffix in (".cpp", ".h")}
