"""``minivllm compare``: measure several configurations with the same seeds and compare them with the first one.

Parsing the command imports no large package.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    IN_TURNS,
    bill_of_config,
    check_output,
    comma_list,
    count,
    non_negative,
    output_flags,
    print_result,
    progress,
    requests_by_seed,
    settings,
    watch_of,
    workload_flags,
    workload_text,
)
from minivllm.cli.common import JsonObject, add_switch, add_value, load, open_llm, report, split_at_commas
from minivllm.errors import ConfigError, MinivllmError, RequestError, brief, describe_error, shown

if TYPE_CHECKING:
    from minivllm.cli.bench_runs import RequestsBySeed
    from minivllm.config import Loaded
    from minivllm.lab.bench.quality import TextScores
    from minivllm.lab.bench.store import Store
    from minivllm.lab.bench.trials import Cell


CASES = 20  # number of cases of a task per seed, by default


def add_commands(command: Any, *parents: argparse.ArgumentParser) -> None:
    """Add the command ``compare``.

    ``command(name, ...)`` makes the parser of a command; ``parents`` have flags for it.
    """
    text = "Compare configurations over seeds: speed, memory, energy and quality, with tests against the first."
    sub = command("compare", "cli.compare:compare", text, *parents)
    sub.add_argument("file", nargs="*", help="TOML, YAML or JSON, one configuration each")
    text = "one configuration for each value, and for each combination of values of several keys"
    sub.add_argument("--sweep", nargs="+", action="extend", default=[], metavar="KEY=VALUE,VALUE", help=text)
    add_value(sub, "--seeds", comma_list(int), "N,N", "runs (default 1,2,3)", [1, 2, 3])
    text = "warm-up runs, which are not counted (default 1)"
    add_value(sub, "--warmups", non_negative, "N", text, 1)
    text = "text whose perplexity is measured (default: stories in English)"
    add_value(sub, "--text", str, "FILE", text, "")
    text = "tokens of the text to score (default 512; 0 skips the perplexity)"
    add_value(sub, "--quality-tokens", non_negative, "N", text, 512)
    text = "tokens of each piece of the text that are its prompt (default 1; 128 if a configuration has a compressor)"
    add_value(sub, "--quality-prompt", count, "N", text)
    text = "tasks for the packaged model: needle, copy, sums, json, story, echo"
    add_value(sub, "--task", comma_list(str), "NAME,NAME", text, [])
    text = "tasks of lm-evaluation-harness, in this process; needs the extra lm-eval"
    add_value(sub, "--lm-eval", comma_list(str), "NAME,NAME", text, [])
    text = "a folder with more tasks for --lm-eval (*.yaml)"
    add_value(sub, "--lm-eval-path", str, "DIR", text, "")
    text = f"cases of each --task and --lm-eval task for a seed (default {CASES})"
    add_value(sub, "--cases", count, "N", text)
    text = "a folder that keeps finished runs, each by a new engine; a run that is there is not repeated"
    add_value(sub, "--results", str, "DIR", text, "")
    add_switch(sub, "--in-turns", IN_TURNS)
    output_flags(sub)
    workload_flags(sub, seed=None)


@dataclass
class Contender:
    """A configuration to compare.

    ``bill`` is its bill of materials (versions and hashes of all parts).  ``key`` identifies its runs in the result
    store.
    """

    name: str
    args: argparse.Namespace
    loaded: Loaded
    bill: JsonObject = field(default_factory=dict)
    key: str = ""


def compare(args: argparse.Namespace) -> int:
    """Run ``minivllm compare`` and return its exit code: 1 if the engine of a configuration failed."""
    from minivllm.lab.bench import limits, lm_tasks, quality
    from minivllm.lab.bench.store import Store

    check_output(args)
    check(args)
    quality.check_tasks(args.task)
    found = contenders(args)
    if args.quality_prompt is None:
        compressed = any(contender.loaded.engine.compressor.name not in ("auto", "none") for contender in found)
        args.quality_prompt = quality.LONG_PROMPT if compressed else 1
    store = Store(args.results)
    planned = [limits.planned(contender.loaded) for contender in found]
    requests = requests_by_seed(args, limits.smallest(planned))
    lm_eval = lm_tasks.check(args.lm_eval, args.lm_eval_path) if args.lm_eval else {}
    text = quality.text_of(args.text) if args.quality_tokens else ""
    work = ContenderWork(args, requests, store, text, found[0], lm_eval)
    _identify(found, work)
    seeds = {str(seed) for seed in args.seeds}
    kept = sum(len(store.of(contender.key)["runs"].keys() & seeds) for contender in found)
    if kept:
        report(f"{kept} of {len(found) * len(args.seeds)} runs are in {args.results}")
    failed = _measure(found, work)
    finished = [contender for contender in found if contender.name not in failed]
    return _print(finished, work, failed)


def _identify(found: Sequence[Contender], work: ContenderWork) -> None:
    """Set the bill of materials and the key of each contender (configuration to compare).

    ConfigError if two are the same configuration.
    """
    by_key: dict[str, str] = {}
    for contender in found:
        contender.bill, contender.key = work.identity(contender)
        same = by_key.setdefault(contender.key, contender.name)
        if same != contender.name:
            raise ConfigError(
                f"{brief(same)} and {brief(contender.name)} are the same configuration; expected different ones"
            )


def _measure(found: Sequence[Contender], work: ContenderWork) -> dict[str, str]:
    """Make the missing runs, and return the error of each contender (configuration to compare) that failed.

    Raise the error of the first contender, because the others are compared with it.
    """
    from minivllm.lab.bench import trials

    args = work.args
    first = found[0]
    todo = [contender for contender in found if not work.done(contender)]
    if todo and args.quality_tokens and work.reference() is None and first not in todo:
        # the token distributions of the first configuration are the reference for the quality of the other ones
        todo.insert(0, first)
    by_name = {contender.name: contender for contender in found}
    # error texts instead of exceptions, because an exception would keep the memory of its engine alive
    failed: dict[str, str] = {}

    def failing(cell: Cell, exc: Exception) -> None:
        if cell.name == first.name:
            raise exc
        if isinstance(exc, MinivllmError):
            failed[cell.name] = str(exc)
        else:
            failed[cell.name] = f"{brief(cell.name)}: {describe_error(exc)}"
        report(f"{failed[cell.name]}; it is left out, and the others go on")

    def once(cell: Cell, llm: Any, seed: int) -> None:
        work.once(by_name[cell.name], llm, seed)

    def warm(cell: Cell, llm: Any) -> None:
        work.warm(by_name[cell.name], llm)

    def stored(cell: Cell, seed: int) -> bool:
        return work.complete(by_name[cell.name], seed)

    cells = []
    for contender in todo:
        cells.append(trials.Cell(contender.name, functools.partial(open_llm, contender.loaded, contender.args)))
    # with a result store, each run gets a new engine: a later call cannot continue with the state of an earlier engine
    trials.Trials(once, warm, stored, failing).measure(cells, args.seeds, args.in_turns, apart=bool(args.results))
    return failed


def _print(found: Sequence[Contender], work: ContenderWork, failed: dict[str, str]) -> int:
    """Print the table of the configurations that did not fail, and return the exit code."""
    from minivllm.frontend.record import diff
    from minivllm.lab.bench import comparing, trials

    args = work.args
    names = [contender.name for contender in found]
    table = comparing.ComparedRuns(names, work.stored(found), args.seeds, settings(args))
    bills = {contender.name: contender.bill for contender in found}
    verdicts = {name: diff.compare(bills[names[0]], bills[name], results=False).verdict for name in names[1:]}
    result = table.result(bills, verdicts)
    result["failed"] = failed
    same = trials.same_over_seeds(table.runs, args.dataset, args.temperature)
    result["seeds_change_nothing"] = same
    if same:
        report(f"warning: {same}")
    lines = table.lines(result, workload_text(args, work.requests(args.seeds[0])))
    lines += [f"failed: {text}" for text in failed.values()]
    print_result(result, args, lines)
    return 1 if failed else 0


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags without an effect or in contradiction to each other, and fill in ``--cases``."""
    if args.seed is not None:
        raise ConfigError(f"--seed {args.seed}: this command has a run for each seed of --seeds; give it there")
    if len(set(args.seeds)) < len(args.seeds):
        raise ConfigError(f"--seeds {','.join(map(str, args.seeds))}: the same seed twice; give each seed once")
    if args.text and not args.quality_tokens:
        raise ConfigError("--text has no effect with --quality-tokens 0; leave out either")
    if args.quality_prompt is not None and not args.quality_tokens:
        raise ConfigError(
            f"--quality-prompt {args.quality_prompt} has no effect with --quality-tokens 0; leave out either"
        )
    if args.cases is not None and not args.task and not args.lm_eval:
        raise ConfigError(f"--cases {args.cases}: of no task; add --task NAME or --lm-eval NAME, or leave it out")
    if args.lm_eval_path and not args.lm_eval:
        raise ConfigError(f"--lm-eval-path {args.lm_eval_path}: no task of it is named; add --lm-eval NAME")
    args.cases = args.cases or CASES


@dataclass
class ContenderWork:
    """The measurements of all compared configurations.  Each result is stored as soon as it is measured."""

    args: argparse.Namespace
    requests: RequestsBySeed
    store: Store
    text: str  # text whose perplexity is measured; "" measures none
    first: Contender  # the configuration with which the other ones are compared
    lm_eval: JsonObject = field(default_factory=dict)  # the loaded tasks of lm-eval
    scores: TextScores | None = None  # those of ``first``

    @functools.cached_property
    def lm_identity(self) -> JsonObject:
        """Return the identity of the lm-eval tasks, which is part of the key of runs."""
        from minivllm.lab.bench import lm_tasks

        return lm_tasks.identity(self.lm_eval)

    def identity(self, contender: Contender) -> tuple[JsonObject, str]:
        """Return the bill of materials of a configuration, and a digest of the bill and of the work to measure."""
        from minivllm.lab.bench.store import digest

        args = self.args
        work = {
            "asks": [[request.prompt, request.max_tokens] for request in self.requests(0)],
            "temperature": args.temperature,
            "text": self.text,
            "tokens": [args.quality_tokens, args.quality_prompt],
            "tasks": args.task,
            "cases": args.cases,
            "an_engine_each": args.in_turns or bool(args.results),
        }
        if self.lm_eval:
            work["lm_eval"] = self.lm_identity
        bill = bill_of_config(contender.loaded)
        return bill, digest(bill, work)

    def stored(self, found: Sequence[Contender]) -> list[JsonObject]:
        """Return the stored runs of each configuration, and its quality relative to the first one."""
        results = []
        for contender in found:
            stored = self.store.of(contender.key)
            results.append({"runs": stored["runs"], "quality": stored["quality"].get(self.first.key)})
        return results

    def done(self, contender: Contender) -> bool:
        """Return whether the store has all runs of a configuration, and its quality if a text is scored."""
        stored = self.store.of(contender.key)
        if any(str(seed) not in stored["runs"] for seed in self.args.seeds):
            return False
        return not self.text or self.first.key in stored["quality"]

    def reference(self) -> TextScores | None:
        """Return the token distributions of the first configuration over the text, or None before they are measured."""
        from minivllm.lab.bench.quality import TextScores

        if self.scores is None:
            path = self.store.scores(self.first.key)
            if path is not None:
                self.scores = TextScores.load(path)
        return self.scores

    def complete(self, contender: Contender, seed: int) -> bool:
        """Return whether nothing is left to measure of a configuration for a seed.

        Quality is measured with the first seed.
        """
        if str(seed) not in self.store.of(contender.key)["runs"]:
            return False
        return seed != self.args.seeds[0] or not self.text or self.scored(contender)

    def scored(self, contender: Contender) -> bool:
        """Return whether the quality of a configuration is stored.

        For the first configuration this includes its token distributions.
        """
        known = self.first.key in self.store.of(contender.key)["quality"]
        return known and (contender is not self.first or self.reference() is not None)

    def warm(self, contender: Contender, llm: Any) -> None:
        """Measure the quality of a configuration unless it is stored, then make the warm-up runs."""
        from minivllm.lab.bench import trials

        if not self.scored(contender):
            self._quality(contender, llm)
        watch = watch_of(llm.config, llm.engine.wiring.device)
        for turn in range(self.args.warmups):
            seed = -1 - turn
            trials.run(llm, self.requests(seed), self.args.temperature, seed, watch)

    def once(self, contender: Contender, llm: Any, seed: int) -> None:
        """Make and store the run of a seed on the engine of a configuration, unless the store has it."""
        from minivllm.lab.bench import lm_tasks, quality, trials

        args = self.args
        if str(seed) in self.store.of(contender.key)["runs"]:
            return
        watch = watch_of(llm.config, llm.engine.wiring.device)
        run = trials.run(llm, self.requests(seed), args.temperature, seed, watch)
        figures = run["figures"]
        if args.task:
            figures |= quality.tasks(llm, args.task, args.cases, seed)
        if self.lm_eval:
            task_figures, run["lm_eval"] = lm_tasks.scores(llm, self.lm_eval, args.cases, seed)
            figures |= task_figures
        capacity = llm.engine.capacity
        block_bytes = sum(size for size, _ in zip(capacity.block_bytes, capacity.blocks, strict=True))
        figures["weight_bytes"] = capacity.weight_bytes
        figures["kv_token_bytes"] = block_bytes / llm.engine.wiring.block
        if capacity.checkpoints is not None:
            figures["state_bytes"] = capacity.state_bytes
        self.store.keep_run(contender.key, seed, run)
        progress(f"{brief(contender.name)}, seed {seed}: {figures['output_throughput']:.1f} tokens/s")

    def _quality(self, contender: Contender, llm: Any) -> None:
        """Score the text with the engine of a configuration, and store the summary relative to the first."""
        from minivllm.lab.bench import quality

        if not self.text:
            return
        first = self.first.key
        try:
            scores = quality.score(llm, self.text, self.args.quality_tokens, self.args.quality_prompt)
        except RequestError as exc:
            self.store.keep_quality(contender.key, first, {"not_measured": brief(str(exc), 300)})
            return
        if contender is self.first:
            self.scores = scores
            path = self.store.scores(contender.key)
            if path is not None:
                scores.save(path)
        reference = self.reference()
        if reference is not None:
            summary = quality.summary(scores, reference)
        else:  # the first configuration could not be scored; a perplexity needs no reference
            summary = quality.summary(scores, scores)
            summary = {key: value for key, value in summary.items() if key not in quality.RELATIVE}
        self.store.keep_quality(contender.key, first, summary)


def contenders(args: argparse.Namespace) -> list[Contender]:
    """Return the configurations to compare, each with a unique name.

    ConfigError if there are fewer than two, or if two are equal.
    """
    found = []
    unused_of: dict[str, str] = {}
    for name, files, sets in _cases(args):
        changed = copy(args)
        changed.set = [*args.set, *sets]
        try:
            loaded = load(changed, files)
        except ConfigError as exc:
            if args.set or not sets or not str(exc).startswith("--set"):
                raise
            raise ConfigError(str(exc).replace("--set", "--sweep", 1)) from None
        if unused := unused_tables(loaded):
            unused_of[" ".join(files)] = unused
        without_run = replace(loaded, run=type(loaded.run)())  # the [run] table is for `minivllm run`
        found.append(Contender(name, changed, without_run))
    for file, unused in unused_of.items():
        reason = "requests are those of --dataset, or random ones, at --temperature"
        report(f"{unused} of {file}: not used here; {reason}")
    return found


def _cases(args: argparse.Namespace) -> list[tuple[str, list[str], list[str]]]:
    """Return (name, files, ``--set`` settings) of each configuration to compare.

    ConfigError if there are fewer than two, or if two are equal.
    """
    if args.sweep and len(args.file) > 1:
        raise ConfigError(f"--sweep: expected at most one file to begin with, not {len(args.file)}")
    if not args.sweep and len(args.file) < 2:
        raise ConfigError("expected at least two files to compare, or --sweep KEY=VALUE,VALUE")
    cases: list[tuple[str, list[str], list[str]]] = []
    if args.sweep:
        for sets in itertools.product(*map(_values, args.sweep)):
            cases.append((" ".join(sets), list(args.file), list(sets)))
    else:
        stems = [Path(file).stem for file in args.file]
        names = stems if len(set(stems)) == len(stems) else args.file
        cases = [(name, [file], []) for name, file in zip(names, args.file, strict=True)]
    names = [name for name, _, _ in cases]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"{brief(min(twice))}: the same configuration twice; give it once")
    return cases


def unused_tables(loaded: Loaded) -> str:
    """Return the names of a configuration's tables that flags replace in this command, "" if it has none."""
    names = []
    if loaded.run.prompts or loaded.run.prompts_file:
        names.append("[run]")
    if loaded.sampling:
        names.append("[sampling]")
    return " and ".join(names)


def _values(text: str) -> list[str]:
    """Return the ``key=value`` settings of a ``--sweep`` argument ``key=value,value``.  ConfigError."""
    key, equals, values = text.partition("=")
    choices = split_at_commas(values, f"--sweep {shown(text)}")
    if not equals or not key.strip() or not all(choices):
        raise ConfigError(f"--sweep {shown(text)}: expected key=value,value, for example quantizer=none,int8")
    return [f"{key.strip()}={value}" for value in choices]
