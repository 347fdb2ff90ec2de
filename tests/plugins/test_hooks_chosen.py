"""Hooks as plug-ins: refusals with their messages, the order of calls, and the built-in hooks."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch
from hook_helpers import Received, crowd, hooked
from plugin_helpers import discover, point, write_package

from minivllm.cli import main
from minivllm.config import load_config
from minivllm.config.resolve import resolve
from minivllm.errors import ConfigError, PluginError
from minivllm.plugins.hooks.options import LiveOptions, StepLogOptions
from minivllm.plugins.hooks.step_log import COLUMNS, StepLog
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.manager import NAMES, HookManager
from minivllm.testing.sim import run

package = pytest.fixture(write_package)


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


POCKET = {"model": "pocket", "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 128}


# ---------------------------------------------------------------- registration

PACKAGE = """
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.registration.spec import Spec
SPEC = Spec("acme_hooks:Mine", {api}, "for a test")
class Mine({base}):
    @hookimpl({mark})
    def {name}(self{args}):
        {body}
"""


def chosen(package, environ=None, **text):
    """Return the resolved parts with a hook plug-in of this text."""
    usual = {"api": (1, 0), "base": "Hooks", "mark": "", "name": "minivllm_step_finished", "args": "", "body": "pass"}
    package("acme_hooks", PACKAGE.format(**{**usual, **text}))
    sys.modules.pop("acme_hooks", None)
    catalog = discover(point("acme", "mine", "acme_hooks:SPEC", "hooks", "2.1"), environ=environ)
    return resolve(load_config(keywords={**POCKET, "device": "cpu", "hooks": ["mine"]}, environ={}).engine, catalog)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "minivllm_step_end"}, "there is no hook 'minivllm_step_end'. Did you mean"),
        (
            {"args": ", stats"},
            r"minivllm_step_finished: argument\(s\) {'stats'} are declared .*; its parameters are: step$",
        ),
        ({"mark": "wrapper=True", "body": "yield"}, "minivllm_step_finished cannot be wrapped: use @hookimpl without"),
        ({"mark": "hookwrapper=True", "body": "yield"}, "is an old-style wrapper: use @hookimpl"),
        ({"name": "minivllm_publish"}, r"minivllm_publish is a wrapper: use @hookimpl\(wrapper=True\) and a yield"),
        ({"body": "yield"}, r"minivllm_step_finished is a generator .*, and a call would not run it: use a plain"),
        ({"mark": "specname='minivllm_nothing'", "name": "f"}, "there is no hook 'minivllm_nothing'"),
    ],
)
def test_a_hook_that_does_not_fit_the_contract_is_refused_in_words(package, wrong, message):
    parts = chosen(package, **wrong).hooks
    with pytest.raises(PluginError, match=message) as info:
        HookManager.make(parts)
    assert str(info.value).startswith("hooks 'acme/mine' (")


def test_versions_blocks_and_base_classes_are_those_of_any_seam(package):
    with pytest.raises(
        PluginError, match=r"contract version: expected 1.2, supports 2.0  .written for a newer minivllm"
    ):
        chosen(package, api=(2, 0))
    with pytest.raises(PluginError, match="is blocked by MINIVLLM_PLUGINS"):
        chosen(package, environ={"MINIVLLM_PLUGINS": ""})
    with pytest.raises(PluginError, match=r"is not a subclass of minivllm.runtime.hooks.Hooks"):
        HookManager.make(chosen(package, base="object").hooks)


def test_an_async_hook_that_nobody_would_await_is_refused():
    class Later(Hooks):
        @hookimpl
        async def minivllm_step_finished(self, step):
            pass

    with pytest.raises(PluginError, match="minivllm_step_finished is an async function, and a call would not run it"):
        HookManager([("acme/later", Later())])


def test_a_hook_that_is_newer_may_be_optional(package):
    parts = chosen(package, mark="optionalhook=True", name="minivllm_next_year").hooks
    assert not HookManager.make(parts).listens(*NAMES)


# ---------------------------------------------------------------- first result


def test_the_first_hook_that_knows_a_model_is_believed_and_explain_says_so(package):
    body = "return 'pocket' if model == 'alias' else None"
    package(
        "acme_hooks",
        PACKAGE.format(api=(1, 0), base="Hooks", mark="", name="minivllm_resolve_model", args=", model", body=body),
    )
    catalog = discover(point("acme", "mine", "acme_hooks:SPEC", "hooks", "2.1"))
    want = load_config(keywords={**POCKET, "model": "alias", "device": "cpu", "hooks": ["mine"]}, environ={}).engine
    resolved = resolve(want, catalog)
    assert resolved.wiring.model_dir.endswith("pocket/data") or "pocket" in resolved.wiring.model_dir
    assert "alias is pocket (says acme/mine)" in resolved.explain()


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise ValueError('no net')", "failed in minivllm_resolve_model: ValueError: no net"),
     ("return 7", "minivllm_resolve_model returned a int; expected a path or an id")],
)  # fmt: skip
def test_a_first_result_hook_that_fails_is_an_error(package, body, message):
    with pytest.raises(PluginError, match=f"^hooks 'acme/mine'.*{message}"):
        chosen(package, name="minivllm_resolve_model", body=body)


READER = """
import json
from minivllm.runtime.hooks import Hooks, hookimpl
class Json(Hooks):
    @hookimpl
    def minivllm_read_config(self, path):
        return json.load(open(path)) if path.endswith(".json") else None
"""


def test_a_hook_reads_a_configuration_in_another_format(tmp_path, package):
    package("acme_json", READER)
    file = tmp_path / "exp.json"
    file.write_text(json.dumps({"model": "pocket", "seed": 5, "sampling": {"max_tokens": 3}}))
    enabled = {"hooks": ["acme_json:Json"], "allow_targets": ["acme_json"]}
    loaded = load_config([file], keywords=enabled, environ={})
    assert (loaded.engine.seed, loaded.sampling) == (5, {"max_tokens": 3}) and loaded.origins["seed"] == str(file)
    (tmp_path / "exp.ini").write_text("")
    for options, environ in (({}, {}), (enabled, {})):
        with pytest.raises(ConfigError, match=r"expected a file that ends in .toml, .yaml, .yml or .json"):
            load_config([tmp_path / "exp.ini"], keywords=options, environ=environ)
    file.write_text(json.dumps({"modle": "pocket"}))
    with pytest.raises(ConfigError, match=r"exp.json: unknown option 'modle'. Did you mean 'model'"):
        load_config([file], keywords=enabled, environ={})
    with pytest.raises(PluginError, match="is a target, and a target runs code"):
        load_config([file], environ={"MINIVLLM__HOOKS": '["acme_json:Json"]'})


# ---------------------------------------------------------------- built-ins


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_step_log_has_a_line_for_each_step_with_the_engines_figures(tmp_path, suffix):
    path = tmp_path / f"s.{suffix}"
    received = Received()
    engine = hooked(StepLog(StepLogOptions(path=str(path))), received, depth=1, blocks=20, max_len=64)
    crowd(engine)
    run(engine)
    text = path.read_text()  # before the engine stops: it can be followed
    engine.stop()
    lines = text.splitlines()
    rows = list(csv.DictReader(lines)) if suffix == "csv" else [json.loads(line) for line in lines]
    steps = received.of["minivllm_step_finished"]
    assert [int(r["step"]) for r in rows] == [s.id for s in steps] and all(tuple(r) == COLUMNS for r in rows)
    for name in ("rows", "tokens", "running", "waiting", "blocks_free", "blocks_cached", "preemptions", "evictions"):
        assert [int(r[name]) for r in rows] == [getattr(s, name) for s in steps], name
    assert sum(int(r["accepted"]) for r in rows) == engine.publisher.tokens == int(rows[-1]["generated"])
    assert all(0 < float(r["plan_ms"]) < 1e3 for r in rows)


def test_the_live_view_shows_queue_batch_cache_and_rate():
    pytest.importorskip("rich", reason='pip install "minivllm[live]"')
    from rich.console import Console

    from minivllm.plugins.hooks.live import Live

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    live = Live(LiveOptions(), console)
    engine = hooked(live, blocks=20, max_len=64)
    console.print(live.table())
    assert "waiting for the first step" in console.export_text()
    crowd(engine)
    for _ in range(12):
        engine.step()
    step = live.seen[0]
    console.print(live.table())
    text = console.export_text()
    assert f"{step.waiting} waiting" in text and f"{step.running} of 8" in text and f"{step.blocks_free} free" in text
    assert f"{step.rows} rows, {step.tokens} tokens" in text and "tokens/s" in text and live.seen[1] > 0
    engine.stop()
    assert live.display is None
    console.file.close()


def test_the_command_line_runs_hooks_and_shows_their_failures(tmp_path, package, capsys, monkeypatch):
    package(
        "acme_fails",
        "from minivllm.runtime.hooks import *\nclass F(Hooks):\n    @hookimpl\n"
        "    def minivllm_step_finished(self):\n        raise OSError('no disk')\n",
    )
    monkeypatch.chdir(tmp_path)
    options = ["--set", "hooks=['step_log', 'acme_fails:F']", "--allow-target", "acme_fails"]
    assert main(["generate", "One day", "--max-tokens", "5", *options]) == 0
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 5
    shown = capsys.readouterr().err
    assert "hooks 'local/acme_fails:F' (local -) failed in minivllm_step_finished (3 of 3): OSError: no disk" in shown
    assert "is disabled: it failed 3 times" in shown and "Traceback" not in shown
