"""Tasks of lm-evaluation-harness as results of ``compare``.  A seed draws the same cases for all configurations."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from minivllm.errors import ConfigError, brief, describe_error, shown

from . import Result, Row

INSTALL = "install it with: pip install 'minivllm[lm-eval]'"
MOST = 20_000  # largest number of a task's documents that the digest of ``identity`` covers
LOWER = "lower_"  # prefix of the names of results for which lower is better
NOT_SCORES = ("alias", "name", "sample_len", "sample_count")


def check(names: Sequence[str], folder: str) -> Result:
    """Load tasks and return them by name; a group is replaced by its tasks.

    ``folder`` contains the user's own tasks as YAML files; "" means none.  Raise ConfigError if the library is missing,
    a name is unknown, or the data of a task cannot be loaded.
    """
    if folder and not os.path.isdir(folder):
        raise ConfigError(
            f"--lm-eval-path {shown(folder)}: no such folder; expected one with tasks of lm-eval (*.yaml)"
        )
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as exc:
        raise ConfigError(f"--lm-eval needs lm-evaluation-harness ({describe_error(exc)}); {INSTALL}") from None
    with _quiet():
        manager = TaskManager(include_path=folder or None)
        known = set(manager.all_tasks)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"--lm-eval {shown(name)}: lm-eval has no such task; `python -m lm_eval ls tasks` lists its own, "
                    "--lm-eval-path names a folder with yours"
                )
        try:
            return dict(_flat(get_task_dict(list(names), manager)))
        except Exception as exc:  # a download can fail in many ways, and so can a wrong YAML file
            reason = brief(describe_error(exc), 300)
            raise ConfigError(f"--lm-eval {','.join(names)}: cannot be loaded: {reason}") from None


def _flat(tasks: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and tasks of nested groups."""
    for name, task in tasks.items():
        if isinstance(task, Mapping):
            yield from _flat(task)
        else:
            yield str(name), task


def identity(tasks: Row) -> Result:
    """Return lm-eval's version, and digests of the tasks and of their documents: all that the scores depend on."""
    from lm_eval import __version__

    found = {}
    for name, task in tasks.items():
        config = json.dumps(task.dump_config(), sort_keys=True, default=str)
        digest = hashlib.sha256(config.encode())
        for document, _ in zip(task.eval_docs, range(MOST), strict=False):
            digest.update(json.dumps(document, sort_keys=True, default=str).encode())
        found[name] = digest.hexdigest()
    return {"lm_eval": __version__, "tasks": found}


def scores(llm: Any, tasks: Row, cases: int, seed: int) -> tuple[dict[str, float], Result]:
    """Run tasks and return the results of a run, and lm-eval's own scores by task.

    The seed draws ``cases`` documents of each task, or all if it has fewer, and the examples in its prompts (few-shot).
    A share of n right answers becomes (n share + 1/2) / (n + 1), so that no result is 0 and ratios exist.
    """
    from lm_eval import simple_evaluate

    from .lm_model import MinivllmLM

    drawn = {}
    for name, task in tasks.items():
        whole = len(task.eval_docs)
        rng = Random(f"{seed} {name}")
        drawn[name] = sorted(rng.sample(range(whole), min(cases, whole)))
    with _quiet():
        found = simple_evaluate(
            model=MinivllmLM(llm),
            tasks=list(tasks.values()),
            samples=drawn,
            bootstrap_iters=0,
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    figures: dict[str, float] = {}
    own_scores: Result = {}
    for name, results in found["results"].items():
        if name not in drawn:  # skips the mean over a group of tasks
            continue
        n = len(drawn[name])
        higher_is_better = found.get("higher_is_better", {}).get(name, {})
        own_scores[name] = {"documents": n}
        for key, value in results.items():
            metric = key.partition(",")[0]
            if metric in NOT_SCORES or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            score = float(value)
            own_scores[name][key] = score
            prefix = LOWER
            if higher_is_better.get(metric) is not False:
                prefix = ""
                if 0 <= score <= 1:
                    score = (score * n + 0.5) / (n + 1)
            figures[f"task_{prefix}{name}_{metric}"] = score if score > 0 else math.nan
    return figures, own_scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the library's log, output and progress bars in the context; its errors are still raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
            yield
    finally:
        logging.disable(before)
