"""The effects of installed packages on minivllm, with real metadata in a folder on the path, most of it hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_helpers import install, spec_text

from minivllm.cli import main
from minivllm.errors import PluginError
from minivllm.registry import Catalog, PluginQuery

ROOT = Path(__file__).parents[2]
GOOD = {"minivllm.attention": {"flash": "good_spec:S"}}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def catalog(**environ):
    return Catalog.discover(environ=environ)


def faults(**environ):
    return [str(f) for f in catalog(**environ).faults]


def labels(kind="attention", **environ):
    return [e.label for e in catalog(**environ)[kind].entries if not e.builtin and not e.blocked]


# ---------------------------------------------------------------- what cannot be used is told, and breaks nothing


def test_a_package_offers_what_its_metadata_says(path):
    install(path, "Acme_Attn", GOOD, version="2.1")
    (entry,) = [e for e in catalog()["attention"].entries if not e.builtin]
    assert (entry.label, entry.version, entry.target) == ("acme-attn/flash", "2.1", "good_spec:S")
    assert str(entry) == "attention 'acme-attn/flash' (acme-attn 2.1, entry point 'good_spec:S')"


@pytest.mark.parametrize(
    "text, why",
    [
        ("[console_scripts]\njust a line", "TypeError: "),
        ("[minivllm.attention]\nx = \udcff", "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_package_whose_entry_points_cannot_be_read_hides_no_other(path, text, why):
    install(path, "good", GOOD)
    install(path, "broke", "")
    (path / "broke-1.0.dist-info" / "entry_points.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert labels() == ["good/flash"]
    (fault,) = faults()
    assert fault.startswith(f"broke 1.0: its entry points cannot be read: {why}")


@pytest.mark.parametrize("metadata", [None, b"", b"\xff\xfe", b"Metadata-Version: 2.1\n\nName: in the readme\n"])
def test_a_package_without_a_name_offers_nothing(path, metadata):
    install(path, "nameless", GOOD)
    file = path / "nameless-1.0.dist-info" / "METADATA"
    file.unlink() if metadata is None else file.write_bytes(metadata)
    assert labels() == []
    assert faults() == ["unknown -: minivllm.attention: 'flash' is of a package whose metadata has no name"]


@pytest.mark.parametrize(
    "group, received",
    [
        ("minivllm.evictors", "'minivllm.evictors', and there is no such seam. Did you mean 'minivllm.evictor'?"),
        ("minivllm_evictor", "'minivllm_evictor', and there is no such seam. Did you mean 'minivllm.evictor'?"),
        ("minivllm.kv_format", "'minivllm.kv_format', and there is no such seam. Did you mean 'minivllm.kvformat'?"),
        ("minivllm", "'minivllm', and there is no such seam."),
        ("minivllm.telepathy", "'minivllm.telepathy', and there is no such seam."),
    ],
)
def test_a_misspelt_group_is_told_with_the_nearest_seam(path, capsys, group, received):
    install(path, "acme", {group: {"arc": "acme_spec:S"}})
    assert faults() == [f"acme 1.0: 'arc' is in the entry-point group {received}"]
    assert main(["plugins"]) == 0
    assert f"not used: acme 1.0: 'arc' is in the entry-point group {received}\n" in capsys.readouterr().out


def test_a_group_of_somebody_else_is_no_concern(path):
    install(path, "acme", {"minivllmextra": {"x": "a:S"}, "vllm.general_plugins": {"y": "a:S"}})
    assert faults() == []


def test_names_and_targets_that_no_config_could_use_are_told(path):
    text = "[minivllm.attention]\nauto = a:S\ny/z = b:S\nm:C = c:S\nq = a b c\nr = acme_spec\n"
    install(path, "acme", text)
    name = "is not a name for a plug-in: expected letters, digits, '_', '-' and '.', and not 'auto'"
    target = "expected 'package.module:SPEC'"
    assert labels() == []
    assert faults() == [
        f"acme 1.0: minivllm.attention: 'auto' {name}",
        f"acme 1.0: minivllm.attention: 'y/z' {name}",
        f"acme 1.0: minivllm.attention: 'm:C' {name}",
        f"acme 1.0: minivllm.attention: 'q' is 'a b c': {target}",
        f"acme 1.0: minivllm.attention: 'r' is 'acme_spec': {target}",
    ]


def test_a_package_that_calls_itself_minivllm_adds_nothing(path):
    install(path, "minivllm", {"minivllm.attention": {"evil": "evil:S", "sdpa": "evil:S"}}, version="9")
    assert "evil" not in [e.name for e in catalog()["attention"].entries]
    assert faults() == [
        f"minivllm 9: minivllm.attention: '{name}' is in a package called minivllm, whose plug-ins are not declared by "
        "entry points"
        for name in ("evil", "sdpa")
    ]


def test_a_package_cannot_pass_for_what_a_user_named_directly(path):
    install(path, "local", {"minivllm.attention": {"mine": "evil:S"}})
    assert labels() == []
    assert faults() == [
        "local 1.0: minivllm.attention: 'mine' is in a package called 'local', a name that is reserved for targets of "
        "the user"
    ]


def test_a_package_that_offers_one_name_twice_is_told(path):
    install(path, "acme", "[minivllm.attention]\nx = a:S\nx = b:S\nx = a:S\n")
    assert faults() == ["acme 1.0: minivllm.attention: 'x' is offered twice, as 'a:S' and as 'b:S': the first is used"]
    assert catalog()["attention"].find("x").target == "a:S"


def test_a_package_further_down_the_path_is_not_seen(path):
    install(path / "front", "acme", {"minivllm.attention": {"new": "a:S"}}, version="2.0")
    install(path / "back", "acme", {"minivllm.attention": {"old": "a:S"}}, version="1.0")
    for broken in (False, True):  # both ways of reading
        if broken:
            install(path / "back", "broke", "[x]\ny\n")
        sys.path[:0] = [str(path / "front"), str(path / "back")]
        assert labels() == ["acme/new"]
        del sys.path[:2]


# ---------------------------------------------------------------- strict


def test_strict_makes_what_cannot_be_used_an_error(path):
    install(path, "acme", {"minivllm.evictors": {"arc": "acme_spec:S"}})
    assert catalog(MINIVLLM_STRICT_PLUGINS="0").faults and catalog(MINIVLLM_STRICT_PLUGINS="").faults
    with pytest.raises(PluginError) as info:
        catalog(MINIVLLM_STRICT_PLUGINS="1")
    assert str(info.value) == (
        "MINIVLLM_STRICT_PLUGINS=1 and there are faults:\n  acme 1.0: 'arc' is in the entry-point group "
        "'minivllm.evictors', and there is no such seam. Did you mean 'minivllm.evictor'?"
    )
    assert catalog(MINIVLLM_STRICT_PLUGINS="1", MINIVLLM_PLUGINS="-acme").faults == ()  # shut out, so no concern
    with pytest.raises(PluginError, match=r"^MINIVLLM_STRICT_PLUGINS='yes': expected 0 or 1$"):
        catalog(MINIVLLM_STRICT_PLUGINS="yes")


def test_strict_makes_a_broken_plugin_that_nobody_asked_for_an_error(path, capsys, monkeypatch):
    install(path, "acme", {"minivllm.evictor": {"arc": "acme_arc_spec:S"}}, acme_arc_spec="1 / 0")
    text = "evictor 'acme/arc' (acme 1.0, entry point 'acme_arc_spec:S') could not be imported: ZeroDivisionError: "
    want = PluginQuery(features=frozenset({"something new"}))  # so that no built-in serves
    reasons = catalog()["evictor"].select(want).candidates[-1].reasons
    assert len(reasons) == 1 and str(reasons[0]).startswith(text)
    strict = catalog(MINIVLLM_STRICT_PLUGINS="1")["evictor"]
    with pytest.raises(PluginError, match=r"because of MINIVLLM_STRICT_PLUGINS=1") as info:
        strict.select(want)
    assert str(info.value).startswith(text)
    assert strict.select(PluginQuery()).require().entry.label == "minivllm/lru"  # nobody looks at it
    monkeypatch.setenv("MINIVLLM_STRICT_PLUGINS", "1")
    assert main(["plugins", "evictor"]) == 0 and main(["plugins", "evictor", "--specs"]) == 4
    assert text in capsys.readouterr().err


# ---------------------------------------------------------------- what is read, and when


def test_the_metadata_is_asked_again_after_an_installation(path):
    assert labels() == []
    install(path, "acme", GOOD)
    assert labels() == ["acme/flash"]
    install(path, "zeta", {"minivllm.attention": {"z": "z:S"}})
    assert labels() == ["acme/flash", "zeta/z"]


def test_what_a_failed_package_requires_is_part_of_the_error(path):
    spec = "from minivllm.registration.spec import LimitOfNextYear\n"
    requires = "Requires-Dist: numpy\nRequires-Dist: minivllm[test]>=7,<8\n"
    install(path, "acme", {"minivllm.evictor": {"arc": "acme_new_spec:S"}}, metadata=requires, acme_new_spec=spec)
    with pytest.raises(PluginError) as info:
        catalog()["evictor"].select(PluginQuery(), "arc")
    import minivllm

    assert str(info.value).startswith(
        "evictor 'acme/arc' (acme 1.0, entry point 'acme_new_spec:S') could not be imported: ImportError: cannot import"
    )
    assert str(info.value).endswith(f"(acme 1.0 requires minivllm<8,>=7, and this is {minivllm.__version__})")


def test_a_panic_when_a_spec_is_imported_does_not_end_the_engine(path):
    text = "class PanicException(BaseException): pass\nraise PanicException('in Rust')\n"  # as PyO3 raises it
    install(path, "acme", {"minivllm.evictor": {"arc": "acme_panic_spec:S"}}, acme_panic_spec=text)
    with pytest.raises(PluginError, match="PanicException: in Rust"):
        catalog()["evictor"].select(PluginQuery(), "arc")


def run(folder, *args, **environ):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), **environ}
    code = (
        f"import sys\nfrom minivllm.cli import main\ntry: main({args!r})\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith(('acme', 'torch', 'transformers', 'numpy', 'pydantic'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    *lines, modules = done.stdout.splitlines()
    return lines, modules


def test_a_hundred_packages_are_listed_without_a_module_of_theirs(tmp_path):
    for i in range(100):
        kind = ("attention", "evictor", "scheduler", "hookz")[i % 4]
        install(tmp_path, f"acme_{i}", {f"minivllm.{kind}": {f"x{i}": f"acme_{i}_spec:S"}})
        (tmp_path / f"acme_{i}_spec.py").write_text("raise SystemExit('imported')\n")
    lines, modules = run(tmp_path, "plugins")
    assert modules == "[]"
    assert sum("(--specs imports acme_" in line for line in lines) == 75
    assert sum(line.startswith("not used: acme-") for line in lines) == 25
    lines, modules = run(tmp_path, "--help")
    assert modules == "[]" and any("plugins" in line for line in lines)
    lines, modules = run(tmp_path, "plugins", "show", "lru")
    assert modules == "[]" and lines[0].startswith("evictor 'minivllm/lru' (minivllm ")


def test_where_another_library_fails_on_broken_metadata_the_package_is_named(tmp_path):
    install(tmp_path, "broke", "[x]\njust a line", version="2.1")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    argv = [sys.executable, "-m", "minivllm", "explain"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and not done.stdout
    assert done.stderr.startswith("minivllm: error: broke 2.1: its entry points cannot be read: ")
    assert done.stderr.endswith(". Other libraries read that too, and fail: reinstall the package or remove it\n")


def test_plugins_shows_summaries_of_others_if_asked(path, capsys):
    install(path, "acme", {"minivllm.evictor": {"arc": "acme_ok_spec:S"}}, acme_ok_spec=spec_text())
    assert main(["plugins", "evictor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split(maxsplit=4)[4] == "(--specs imports acme_ok_spec:S)"
    assert "acme_ok_spec" not in sys.modules
    assert main(["plugins", "evictor", "--specs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    arc = {"seam": "evictor", "name": "arc", "dist": "acme", "version": "1.0", "summary": "for a test"}
    assert found["plugins"][-1] == arc and found["faults"] == []
