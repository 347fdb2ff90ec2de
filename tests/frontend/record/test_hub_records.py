"""Records of models by ids of the Hugging Face hub: which commit ran, and whether it would be that model again."""

from __future__ import annotations

import copy
import json

import pytest
from hub_helpers import COMMIT, OTHER, put_into_cache
from huggingface_hub import constants
from record_helpers import bills, changed, lines, one_thread

from minivllm.device.loading.hf_config import find_model
from minivllm.errors import ConfigError
from minivllm.frontend.record import replay
from minivllm.frontend.record.diff import NOTHING, compare
from minivllm.frontend.record.nodes import fingerprint
from minivllm.testing.tiny import tiny_dir

single = pytest.fixture(autouse=True)(one_thread)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two directories with other weights."""
    found = [tmp_path_factory.mktemp("qwen3") for _ in range(2)]
    for seed, folder in enumerate(found):
        tiny_dir(folder, "qwen3", seed=seed)
    return found


@pytest.fixture
def model(models):
    return models[0]


made = pytest.fixture(bills)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_a_bill_names_the_id_as_it_was_given_and_the_commit_that_was_there(made, cache, models):
    folder = put_into_cache(cache, "some/model", models[0])
    bill = made(model="some/model")
    found = {key: bill["model"][key] for key in ("name", "repository", "commit", "folder")}
    assert found == {"name": "some/model", "repository": "some/model", "commit": COMMIT, "folder": str(folder)}
    assert "commit" not in made()["model"]
    put_into_cache(cache, "some/words", find_model("pocket"), OTHER)
    words = made(tokenizer="some/words", skip_tokenizer_init=False)["model"]["tokenizer"]
    assert (words["repository"], words["commit"]) == ("some/words", OTHER)


def test_a_model_is_its_files_wherever_they_lie(made, cache, models):
    put_into_cache(cache, "some/model", models[0], refs=("main", "v1"))
    put_into_cache(cache, "some/model", models[0], OTHER, refs=("v2",))  # the change there was in no file of a model
    directory, main = made(), made(model="some/model")
    for other in (
        directory,
        made(model="some/model", revision="v1"),
        made(model="some/model", download_dir=str(cache)),
    ):
        assert compare(main, other).verdict == NOTHING and main["fingerprint"] == other["fingerprint"]
    later = made(model="some/model", revision="v2")
    assert compare(main, later).verdict == NOTHING
    note = f"  commit of model  some/model at {COMMIT} -> some/model at {OTHER}   (not counted)"
    assert note in lines(main, later)


def test_a_run_is_not_started_again_with_what_the_branch_holds_now(made, cache, models):
    put_into_cache(cache, "some/model", models[0])
    before = made(model="some/model")
    put_into_cache(cache, "some/model", models[1], OTHER)
    with pytest.raises(ConfigError) as info:
        replay.check(before, made(model="some/model"), "run.json")
    one, other = before["model"]["hash"][:12], made(model="some/model")["model"]["hash"][:12]
    reported = f"model was some/model at {COMMIT} ({one}) and is some/model at {OTHER} ({other})"
    assert str(info.value).startswith(f"run.json: this would not be the recorded run: {reported}. ")
    assert replay.check(before, made(model="some/model", revision=COMMIT), "run.json") == []
    notes = replay.check(before, made(model="some/model", revision=OTHER), "run.json")
    assert notes == ["changed from run.json: model"]


def test_another_draft_model_behind_the_same_name_is_a_difference(made, cache, models):
    drafter = {"name": "model", "options": {"model": "some/draft"}}
    put_into_cache(cache, "some/draft", models[0])
    put_into_cache(cache, "other/draft", models[1])
    before = made(drafter=drafter)
    assert before["model"]["beside"]["drafter"]["commit"] == COMMIT
    put_into_cache(cache, "some/draft", models[1], OTHER)
    after = made(drafter=drafter)
    assert compare(before, after).verdict == "only model of drafter differs"
    with pytest.raises(ConfigError, match=f"model of drafter was some/draft at {COMMIT} "):
        replay.check(before, after, "run.json")
    assert after["fingerprint"] != before["fingerprint"]
    renamed = made(drafter={"name": "model", "options": {"model": "other/draft"}})
    assert compare(before, renamed).verdict == "only drafter.options.model differs"
    assert compare(before, made()).subjects[0] == "drafter"


def test_a_record_from_before_there_were_revisions_is_compared_all_the_same(made):
    now = made()
    old = copy.deepcopy(now)
    for name in ("revision", "tokenizer_revision", "download_dir"):
        del old["config"]["values"][name]
    del old["model"]["beside"]
    assert compare(changed(old), now).verdict == NOTHING and fingerprint(old) == now["fingerprint"]


def test_a_record_means_the_same_cache_from_any_folder(made, cache, models, monkeypatch, tmp_path):
    put_into_cache(tmp_path / "mine", "some/model", models[0])
    monkeypatch.chdir(tmp_path)
    bill = made(model="some/model", download_dir="mine")
    assert json.loads(json.dumps(replay.as_config(bill)))["download_dir"] == str(tmp_path / "mine")
