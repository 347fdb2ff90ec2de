"""Models by an id of the Hugging Face hub: a cache made by hand, and a hub on the loopback interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_helpers import COMMIT, OTHER, put_into_cache, served_hub
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from minivllm import LLM, files
from minivllm.cli import main
from minivllm.config import EngineConfig, load_config
from minivllm.config.resolve import resolve
from minivllm.device.loading.hf_config import find_model
from minivllm.device.loading.hub import DESCRIPTION, MODEL, NEVER_READ, HubOptions
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.explaining import explain
from minivllm.registry import Catalog

POCKET, DRAFT = find_model("pocket"), find_model("pocket-draft")
TINY = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 4}
NOWHERE = "http://127.0.0.1:9"  # the port of the discard service, to which nobody listens


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache without a network behind it."""
    to(monkeypatch, NOWHERE)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch):
    with served_hub() as (hub, url):
        to(monkeypatch, url)
        yield hub


def to(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def refusal(name, wanted=MODEL, error=ModelError, **options):
    with pytest.raises(error) as info:
        find_model(name, wanted, HubOptions(**options))
    assert "\n" not in str(info.value)
    return str(info.value)


def wire(**options):
    return resolve(EngineConfig(**{**TINY, **options}), Catalog.discover(environ={}))


def sharded(folder, missing=()):
    """Return a model whose index names two shards."""
    shutil.copytree(POCKET, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in missing:
        (folder / name).unlink()
    return folder


def test_of_all_folders_only_that_of_the_pooling_is_fetched():
    """Other folders have weights in other formats, or modules that are not computed here."""
    fetched = ["config.json", "model-00001-of-00002.safetensors", "1_Pooling", "1_Pooling/config.json"]
    folders = [
        "onnx", "original", "1", "10", "1_", "1_Dense", "1_P", "1_Poolin", "1_Pooling2", "1_Pooling.old", "1_pooling",
        "2_Pooling", "11_Pooling", "x1_Pooling", "1_Pooling/more", "1_Pooling/1_Pooling", "1/1_Pooling", "a/1_Pooling",
    ]  # fmt: skip
    left_out = [f"{folder}/config.json" for folder in folders] + ["consolidated.safetensors"]
    found = filter_repo_objects([*fetched, *left_out], allow_patterns=["*"], ignore_patterns=list(NEVER_READ))
    assert list(found) == fetched


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [False, True])
def test_a_cached_model_is_found_at_each_of_its_revisions_without_a_network(cache, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    main = put_into_cache(cache, "some/model", POCKET, refs=("main", "refs/pr/1"))
    other = put_into_cache(cache, "some/model", POCKET, OTHER, refs=("v2",))
    found = {rev: find_model("some/model", hub=HubOptions(rev)) for rev in (None, "main", "refs/pr/1", COMMIT)}
    assert set(found.values()) == {main}
    assert find_model("some/model", hub=HubOptions("v2")) == find_model("some/model", hub=HubOptions(OTHER)) == other


def test_a_cached_model_is_not_asked_for(cache, hub):
    put_into_cache(cache, "some/model", POCKET)
    hub.served["some/model"] = (DRAFT, {"main": OTHER})  # a newer one is there
    assert find_model("some/model").name == COMMIT and hub.requested == []


def test_a_download_dir_is_the_cache_that_is_used(cache, tmp_path, monkeypatch):
    put_into_cache(tmp_path / "mine", "some/model", POCKET)
    (tmp_path / "a.toml").write_text('model = "some/model"\ndownload_dir = "mine"\n')
    monkeypatch.chdir("/")  # the directory is relative to the file
    loaded = load_config([tmp_path / "a.toml"], keywords=TINY, environ={})
    found = resolve(loaded.engine, Catalog.discover(environ={})).wiring.model_dir
    assert found.startswith(str(tmp_path / "mine"))
    assert f"not in the Hugging Face cache {cache}" in refusal("some/model")


def test_the_path_of_a_snapshot_says_its_id_and_its_commit(cache):
    assert files.snapshot_of(put_into_cache(cache, "some/model", POCKET)) == ("some/model", COMMIT)
    assert files.snapshot_of(put_into_cache(cache, "gpt2", POCKET)) == ("gpt2", COMMIT)
    for other in (POCKET, "/", "x", f"/models--a--b/snapshots/{COMMIT[1:]}", f"/datasets--a--b/snapshots/{COMMIT}"):
        assert files.snapshot_of(other) is None


# ---- downloads -------------------------------------------------------------------------------------------------------


def test_a_download_is_of_safetensors_configuration_and_tokenizer_only(cache, hub, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(POCKET, source)
    (source / "original").mkdir()
    bad = (
        "modeling_x.py",
        "pytorch_model.bin",
        "x.pt",
        "consolidated.safetensors",
        "original/model.safetensors",
        "a.gguf",
    )
    for name in (*bad, "vocab.txt", "spiece.model", "chat_template.jinja"):
        (source / name).write_bytes(b"x")
    hub.served["some/model"] = (source, {"main": COMMIT})
    folder = find_model("some/model")
    there = {p.name for p in POCKET.iterdir()} - {"README.md"}
    assert {p.name for p in folder.iterdir()} == there | {"vocab.txt", "spiece.model", "chat_template.jinja"}
    assert (folder / "model.safetensors").read_bytes() == (POCKET / "model.safetensors").read_bytes()
    assert not any(path.endswith(bad) for path in hub.requested)
    requested = len(hub.requested)
    assert find_model("some/model") == folder and len(hub.requested) == requested  # from now on it is in the cache
    assert files.snapshot_of(folder) == ("some/model", COMMIT)


def test_what_a_cached_snapshot_lacks_is_fetched(cache, hub, tmp_path):
    whole = sharded(tmp_path / "whole")
    put_into_cache(cache, "some/model", whole, without=["model-00002-of-00002.safetensors"])
    hub.served["some/model"] = (whole, {"main": COMMIT})
    folder = find_model("some/model")
    assert (folder / "model-00002-of-00002.safetensors").is_file()
    assert not any(path.endswith("model-00001-of-00002.safetensors") for path in hub.requested)


def test_no_weights_are_fetched_to_explain_or_for_dummies(cache, hub):
    hub.served["some/model"] = (POCKET, {"main": COMMIT})
    assert f"some/model at {COMMIT}" in str(explain("some/model", device="cpu"))
    assert wire(model="some/model", load_format="dummy").tokenizer_dir
    assert not any(path.endswith(".safetensors") for path in hub.requested)
    wire(model="some/model")
    assert any(path.endswith(".safetensors") for path in hub.requested)


def test_a_download_shows_no_bars_but_on_a_terminal(cache, hub, capfd):
    hub.served["some/model"] = (POCKET, {"main": COMMIT})
    find_model("some/model")
    assert capfd.readouterr() == ("", "")


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_id_that_is_nowhere_is_refused_with_where_it_was_looked_for(cache, monkeypatch):
    end = "give a directory, or try `--model pocket`"
    reported = f"some/model: no such directory, not in the Hugging Face cache {cache}, and"
    assert refusal("some/model") == f"{reported} the hub ({NOWHERE}) cannot be reached; {end}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal("some/model") == f"{reported} HF_HUB_OFFLINE is set; {end}"


def test_a_revision_that_is_not_cached_is_refused_with_those_that_are(cache):
    put_into_cache(cache, "some/model", POCKET, refs=("main", "v1"))
    assert refusal("some/model", revision="v2") == (
        f"some/model (revision=v2): not in the Hugging Face cache {cache}, which has main, v1, {COMMIT} of it, "
        f"and the hub ({NOWHERE}) cannot be reached"
    )


@pytest.mark.parametrize("offline", [False, True])
def test_an_incomplete_snapshot_is_refused_by_the_name_of_what_is_missing(cache, tmp_path, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    whole = sharded(tmp_path / "whole")
    folder = put_into_cache(cache, "some/model", whole, without=["model-00002-of-00002.safetensors"])
    why = "HF_HUB_OFFLINE is set" if offline else f"the hub ({NOWHERE}) cannot be reached, or has no such file"
    text = "some/model: the cached snapshot {} lacks {}, and {}; run `hf download some/model` where there is a network"
    assert refusal("some/model") == text.format(folder, "model-00002-of-00002.safetensors", why)
    assert find_model("some/model", DESCRIPTION) == folder
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../blobs/gone")  # an interrupted clean-up
    assert refusal("some/model", DESCRIPTION) == text.format(folder, "config.json", why)


def test_a_download_that_was_interrupted_is_known_by_the_list_that_it_left(cache, hub, tmp_path, monkeypatch):
    hub.served["some/model"] = (POCKET, {"main": COMMIT})
    folder = find_model("some/model")
    if not (folder.parents[1] / "trees").is_dir():
        pytest.skip("this huggingface_hub keeps no list of a snapshot's files")
    (folder / "tokenizer_config.json").unlink()
    assert find_model("some/model") == folder and (folder / "tokenizer_config.json").is_file()
    (folder / "tokenizer_config.json").unlink()
    to(monkeypatch, NOWHERE)
    reported = refusal("some/model")
    assert reported.startswith(
        f"some/model: the cached snapshot {folder} is not whole, and the hub ({NOWHERE}) cannot be"
    )


def test_what_the_hub_refuses_is_told_with_what_to_do(cache, hub, tmp_path):
    url = constants.ENDPOINT
    hub.served["some/model"] = hub.served["shut/model"] = (POCKET, {"main": COMMIT})
    hub.refuses["shut/model"] = "GatedRepo"
    token = "set HF_TOKEN, or run `hf auth login`"
    assert refusal("no/model") == (
        f"no/model: no such directory, and the hub ({url}) has no such model, or a private one; expected a directory, "
        f"or an id with the hub's spelling; for a private one {token}"
    )
    assert refusal("some/model", revision="v3") == (
        f"some/model: the hub ({url}) has no revision 'v3' of it; expected a branch, a tag or a commit"
    )
    assert refusal("shut/model") == f"shut/model: is gated; request access at {url}/shut/model, then {token}"


@pytest.mark.parametrize("status", [403, 418, 500])
def test_a_hub_that_fails_is_told_apart_from_one_that_is_not_there(cache, hub, status):
    hub.broken = status
    reported = refusal("some/model")
    assert f"not in the Hugging Face cache {cache}, and the hub ({constants.ENDPOINT}) answers {status};" in reported


def test_a_repository_without_safetensors_is_refused(cache, hub, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(POCKET, source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    hub.served["some/model"] = (source, {"main": COMMIT})
    assert refusal("some/model") == (
        "some/model: the repository on the hub has no model.safetensors; if it has weights of torch.save (*.bin), "
        "load_format='pt' fetches and reads them, and runs nothing of them"
    )


def test_pickled_weights_are_fetched_where_they_are_asked_for(cache, hub, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(POCKET, source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    hub.served["some/model"] = (source, {"main": COMMIT})
    folder = wire(model="some/model", load_format="pt").wiring.model_dir
    assert (Path(folder) / "pytorch_model.bin").exists()


@pytest.mark.parametrize("revision", ["../../x", "/etc/passwd", "a b", "x" * 300, "a\n", "..", "-x\0"])
def test_a_revision_that_is_no_name_of_one_is_refused(cache, revision):
    reported = refusal("some/model", error=ConfigError, revision=revision)
    assert reported.startswith("revision=") and reported.endswith(": expected a branch, a tag or a commit")


@pytest.mark.parametrize(
    ("place", "says"),
    [("~no-such-user/x", "the home directory ~no-such-user is not known"), ("a\0b", "cache cannot be read: embedded")],
)
def test_a_cache_that_can_be_none_is_refused(monkeypatch, place, says):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert says in refusal("owner/model", download_dir=place)


def test_a_cache_whose_ref_is_no_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ref = tmp_path / "models--owner--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_bytes(b"\xff\xfe")
    assert "cache cannot be read: 'utf-8' codec" in refusal("owner/model", download_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["pocket", str(POCKET)])
def test_a_revision_of_what_is_no_id_is_refused(name):
    for option in ("revision", "tokenizer_revision"):
        with pytest.raises(ConfigError) as info:
            wire(model=name, **{option: "v1"})
        assert str(info.value).startswith(f"{option}='v1': ") and f"leave {option} out" in str(info.value)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_where_it_is_named_at_its_own_revision(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    main = str(put_into_cache(cache, "some/model", POCKET))
    other = str(put_into_cache(cache, "some/model", POCKET, OTHER, refs=("v2",)))
    words = str(put_into_cache(cache, "some/words", POCKET, without=["config.json", "model.safetensors"]))
    for options, want in (
        ({}, main),
        ({"revision": "v2"}, other),
        ({"revision": "v2", "tokenizer_revision": "main"}, main),
        ({"tokenizer_revision": OTHER}, other),
        ({"revision": "v2", "tokenizer": "some/model"}, other),
        ({"revision": "v2", "tokenizer": "some/words"}, words),
        ({"tokenizer": str(POCKET)}, str(POCKET)),
        ({"tokenizer": "pocket"}, str(POCKET)),
        ({"skip_tokenizer_init": True}, None),
    ):
        assert wire(model="some/model", **options).tokenizer_dir == want, options
    with pytest.raises(ModelError, match=r"^the tokenizer no/words: no such directory, not in the Hugging Face cache"):
        wire(model="pocket", tokenizer="no/words")


def test_a_tokenizer_that_a_cached_model_lacks_is_fetched_at_its_commit(cache, hub):
    tokenizer = [p.name for p in POCKET.iterdir() if p.name.startswith("tokenizer")]
    folder = put_into_cache(cache, "some/model", POCKET, without=tokenizer)
    hub.served["some/model"] = (POCKET, {"main": OTHER, COMMIT: COMMIT})
    assert wire(model="some/model").tokenizer_dir == str(folder)
    assert (folder / "tokenizer.json").is_file() and not any(path.endswith(".safetensors") for path in hub.requested)


# ---- engines ---------------------------------------------------------------------------------------------------------


def test_a_model_by_its_id_answers_as_its_directory_does_with_a_draft_model_by_its_id(cache):
    put_into_cache(cache, "some/model", POCKET)
    put_into_cache(cache, "some/draft", DRAFT, OTHER, refs=("small",))
    drafter = {"name": "model", "options": {"model": "some/draft", "revision": "small"}}
    found = []
    for options in ({"model": "pocket"}, {"model": "some/model", "drafter": drafter, "speculate": "always"}):
        with LLM(**TINY, **options) as llm:
            found.append(llm.generate("Once upon a time", {"max_tokens": 8, "temperature": 0}, use_tqdm=False)[0])
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    assert llm.config.model == "some/model"
    beside = llm.engine.wiring.speculation.draft_model
    assert files.snapshot_of(beside.model_dir) == ("some/draft", OTHER)


def test_a_draft_model_at_a_revision_that_is_not_there_is_refused(cache):
    put_into_cache(cache, "some/draft", DRAFT)
    drafter = {"name": "model", "options": {"model": "some/draft", "revision": "small"}}
    with pytest.raises(ModelError, match=r"some/draft \(revision of minivllm/model=small\): not in the Hugging Face"):
        wire(model="pocket", drafter=drafter)


def test_a_model_by_its_id_is_compared_with_transformers(cache, capsys):
    put_into_cache(cache, "some/model", POCKET)
    command = ["compare-hf", "some/model", "--prompt", "Once upon a time", "--max-tokens", "2", "--set", "device=cpu"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("some/model on cpu (model minivllm/qwen3, ")


def test_the_command_line_fetches_from_the_hub_that_the_environment_names(tmp_path):
    with served_hub() as (hub, url):
        hub.served["some/model"] = (POCKET, {"main": COMMIT})
        environ = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        environ.pop("HF_HUB_CACHE", None)
        command = [sys.executable, "-m", "minivllm", "generate", "Once", "--model", "some/model", "--max-tokens", "2"]
        command += ["--temperature", "0", "--set", "device=cpu", "--set", "dtype=float32", "--record", "run.json"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    model = json.loads((tmp_path / "run.json").read_text())["model"]
    assert (model["name"], model["repository"], model["commit"]) == ("some/model", "some/model", COMMIT)
    assert Path(model["folder"]).is_relative_to(tmp_path / "home" / "hub")
