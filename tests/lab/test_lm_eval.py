"""Tasks of lm-evaluation-harness in this process: scores are those of lm-eval's own model over the same weights."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from random import Random

import pytest

from minivllm import LLM
from minivllm.cli import main
from minivllm.errors import ConfigError
from minivllm.lab.bench import lm_tasks
from minivllm.pocket.tasks import plain_story

TOML = 'model = "pocket"\nmax_num_seqs = 8\nmax_num_batched_tokens = 128\nnum_kvcache_blocks = 128\n'
DATA = "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {0}/stories.jsonl\ntest_split: test\n"
CHOICE = """task: own_choice
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{ends}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""
ROLLING = """task: own_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{whole}}"
metric_list:
  - metric: word_perplexity
"""
ANSWER = """task: own_answer
output_type: generate_until
doc_to_text: "{{begin}}"
doc_to_target: "{{ends[0]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
TASKS = ("own_choice", "own_rolling", "own_answer")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return three tasks over stories of pocket's world."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rng, rows = Random(0), []
    stories = [plain_story(rng, held_out=True) for _ in range(13)]
    for story, other in itertools.pairwise(stories):
        words, wrong = story.split(), other.split()
        ends = [" ".join(words[20:26]), " ".join(wrong[20:26]), " ".join(words[40:44])]
        rows.append({"begin": " ".join(words[:20]), "ends": ends, "whole": story})
    (tmp_path / "stories.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for text in (CHOICE, ROLLING, ANSWER):
        head, _, rest = text.partition("\n")
        (tmp_path / f"{head.partition(': ')[2]}.yaml").write_text(f"{head}\n{DATA.format(tmp_path)}{rest}")
    return str(tmp_path)


def compare_with(tmp_path, *more):
    (tmp_path / "small.toml").write_text(TOML)
    sizes = ["--num-prompts", "2", "--input-len", "8", "--output-len", "2", "--quality-tokens", "0", "--warmups", "0"]
    return main(
        ["compare", str(tmp_path / "small.toml"), "--sweep", "evictor=lru,fifo", "--seeds", "1,2", *sizes, *more]
    )


def test_without_the_library_the_error_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert compare_with(tmp_path, "--lm-eval", "sums") == 2
    err = capsys.readouterr().err
    assert "--lm-eval needs lm-evaluation-harness" in err and "pip install 'minivllm[lm-eval]'" in err


def test_a_folder_of_tasks_without_a_task_or_that_is_none_is_refused(tmp_path, capsys):
    assert compare_with(tmp_path, "--lm-eval-path", str(tmp_path)) == 2
    assert "no task of it is named; add --lm-eval NAME" in capsys.readouterr().err
    assert compare_with(tmp_path, "--lm-eval", "x", "--lm-eval-path", "nowhere") == 2
    assert "no such folder" in capsys.readouterr().err
    assert compare_with(tmp_path, "--cases", "3") == 2
    assert "add --task NAME or --lm-eval NAME" in capsys.readouterr().err


@pytest.fixture
def harness():
    return pytest.importorskip("lm_eval")


@pytest.mark.slow
def test_a_task_that_is_none_is_named(harness, folder):
    with pytest.raises(ConfigError, match="lm-eval has no such task"):
        lm_tasks.check(["own_choise"], folder)


@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 96])
def test_scores_and_answers_are_those_of_lm_eval_s_own_model_over_transformers(harness, folder, length):
    """At the shorter length contexts lose their beginning and rolling windows are several."""
    pytest.importorskip("accelerate")
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import minivllm.pocket
    from minivllm.lab.bench.lm_model import MinivllmLM

    weights = str(Path(minivllm.pocket.__file__).parent / "model")
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    seen = []
    with LLM("pocket", dtype="float32", device="cpu", max_model_len=length, max_num_seqs=8) as llm:
        own = MinivllmLM(llm)
        size = own.max_length
        other = HFLM(
            model, tokenizer=AutoTokenizer.from_pretrained(weights), max_length=size, batch_size=4, device="cpu"
        )
        for one in (own, other):
            tasks = list(lm_tasks.check(TASKS, folder).values())
            seen.append(harness.simple_evaluate(model=one, tasks=tasks, bootstrap_iters=0)["samples"])
    compared = 0
    for task in TASKS:
        for ours, theirs in zip(seen[0][task], seen[1][task], strict=True):
            for a, b in zip(ours["filtered_resps"], theirs["filtered_resps"], strict=True):
                compared += 1
                if isinstance(a, str):
                    assert a == b
                elif isinstance(a, float):
                    assert a == pytest.approx(b, rel=1e-4, abs=1e-3)
                else:
                    assert a[1] == b[1] and a[0] == pytest.approx(b[0], rel=1e-4, abs=1e-3)
    assert compared == 12 * (3 + 1 + 1)


@pytest.mark.slow
def test_a_seed_draws_the_same_documents_for_all_configurations_and_scores_are_in_the_table(harness, folder, capsys):
    path = Path(folder)
    names = ["--lm-eval", ",".join(TASKS), "--lm-eval-path", folder, "--cases", "5"]
    assert compare_with(path, *names, "--output-json", str(path / "out.json")) == 0
    out = capsys.readouterr().out
    assert "scores of evictor=lru: " in out and "own_choice_acc" in out and "own_rolling_word_perplexity" in out
    assert out.count("the same in every run") >= 3
    runs = json.loads((path / "out.json").read_text())["runs_by_name"]
    first, second = (runs[f"evictor={name}"] for name in ("lru", "fifo"))
    assert [run["lm_eval"] for run in first] == [run["lm_eval"] for run in second]
    assert first[0]["lm_eval"]["own_choice"]["documents"] == 5 and first[0]["lm_eval"] != first[1]["lm_eval"]


@pytest.mark.slow
def test_what_a_task_asks_for_and_is_not_known_is_refused(harness):
    from minivllm.lab.bench.lm_model import MinivllmLM

    with LLM("pocket", device="cpu", max_model_len=128, max_num_seqs=2) as llm:
        own = MinivllmLM(llm)
        with pytest.raises(ConfigError, match="num_beams"):
            own._sampling({"until": ["."], "num_beams": 4})
        with pytest.raises(ConfigError, match="raise max_model_len"):
            own._loglikelihood_tokens([(None, [5], [6] * 200)])
