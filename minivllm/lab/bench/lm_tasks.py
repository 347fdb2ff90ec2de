"""Tasks of lm-evaluation-harness as figures of ``compare``: cases that a seed draws, for all configurations alike."""

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

WANTED = "install it with: pip install 'minivllm[lm-eval]'"
MOST = 20_000  # documents of a task that its identity covers
LOWER = "lower_"  # begins the names of figures of which less is better
NOT_SCORES = ("alias", "name", "sample_len", "sample_count")


def check(names: Sequence[str], folder: str) -> dict[str, Any]:
    """The tasks by name, loaded, groups as their tasks.  ConfigError without the library, and of a name that is none or
    whose data cannot be had.  ``folder``: where tasks of one's own are, as YAML; "" for lm-eval's alone."""
    if folder and not os.path.isdir(folder):
        raise ConfigError(f"--lm-eval-path {shown(folder)}: no such folder; want one with tasks of lm-eval (*.yaml)")
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as exc:
        raise ConfigError(f"--lm-eval needs lm-evaluation-harness ({describe_error(exc)}); {WANTED}") from None
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
        except Exception as exc:  # its data sets come over the network, and its YAML may be wrong
            raise ConfigError(
                f"--lm-eval {','.join(names)}: cannot be loaded: {brief(describe_error(exc), 300)}"
            ) from None


def _flat(tasks: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, task in tasks.items():
        if isinstance(task, Mapping):
            yield from _flat(task)
        else:
            yield str(name), task


def identity(tasks: Mapping[str, Any]) -> dict[str, Any]:
    """What decides scores beside the engine: lm-eval's version, the tasks' configurations and documents."""
    from lm_eval import __version__

    found = {}
    for name, task in tasks.items():
        known = hashlib.sha256(json.dumps(task.dump_config(), sort_keys=True, default=str).encode())
        for document, _ in zip(task.eval_docs, range(MOST), strict=False):
            known.update(json.dumps(document, sort_keys=True, default=str).encode())
        found[name] = known.hexdigest()
    return {"lm_eval": __version__, "tasks": found}


def scores(llm: Any, tasks: Mapping[str, Any], cases: int, seed: int) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures of one run, what lm-eval said).  Of each task the seed draws ``cases`` documents, or all if there are
    fewer, and its examples (few-shot).  Of a share, of which more is better, it is (share n + 1/2) / (n + 1)."""
    from lm_eval import simple_evaluate

    from .lm_model import MinivllmLM

    drawn = {}
    for name, task in tasks.items():
        whole = len(task.eval_docs)
        drawn[name] = sorted(Random(f"{seed} {name}").sample(range(whole), min(cases, whole)))
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
    said: dict[str, Any] = {}
    for name, own in found["results"].items():
        if name not in drawn:  # the mean of a group
            continue
        n, better = len(drawn[name]), found.get("higher_is_better", {}).get(name, {})
        said[name] = {"documents": n}
        for key, value in own.items():
            metric = key.partition(",")[0]
            if metric in NOT_SCORES or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            said[name][key] = float(value)
            more = better.get(metric) is not False
            share = (float(value) * n + 0.5) / (n + 1) if more and 0 <= value <= 1 else float(value)
            figures[f"task_{'' if more else LOWER}{name}_{metric}"] = share if share > 0 else math.nan
    return figures, said


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's log and bars; what it has to say comes as an error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.ExitStack() as stack:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield
    finally:
        logging.disable(before)
