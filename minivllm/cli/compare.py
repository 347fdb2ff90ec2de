"""``minivllm compare``: configurations side by side over seeds.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli.bench_runs import (
    IN_TURNS,
    asks_of,
    checked,
    count,
    none_or_more,
    progress,
    settings,
    several,
    tell,
    watch_of,
    workload_flags,
    workload_text,
)
from minivllm.cli.common import at_commas, load, open_llm
from minivllm.errors import ConfigError, MinivllmError, RequestError, brief, describe_error, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.quality import TextScores
    from minivllm.lab.bench.store import Store
    from minivllm.lab.bench.workload import BenchAsk


CASES = 20  # of each task and seed


def add_commands(command: Any, *parents: argparse.ArgumentParser) -> None:
    """Add ``compare``.  ``command`` and the ``parents`` of its flags are of ``minivllm.cli``."""
    text = "Configurations side by side over seeds: speed, memory, energy, quality, with tests against the first."
    sub = command("compare", "cli.compare:compare", text, *parents)
    sub.add_argument("file", nargs="*", help="TOML, YAML or JSON, one configuration each")
    text = "one configuration for each value, for each combination of several keys"
    sub.add_argument("--sweep", nargs="+", action="extend", default=[], metavar="KEY=VALUE,VALUE", help=text)
    sub.add_argument("--seeds", type=several(int), default=[1, 2, 3], metavar="N,N", help="runs (default 1,2,3)")
    text = "runs before them that are not counted (default 1)"
    sub.add_argument("--warmups", type=none_or_more, default=1, metavar="N", help=text)
    text = "a text whose perplexity is measured (default: stories in English)"
    sub.add_argument("--text", default="", metavar="FILE", help=text)
    text = "tokens of it that are scored (default 512; 0: no quality of a text)"
    sub.add_argument("--quality-tokens", type=none_or_more, default=512, metavar="N", help=text)
    text = "of the model in the package: needle, copy, sums, json, story, echo"
    sub.add_argument("--task", type=several(str), default=[], metavar="NAME,NAME", help=text)
    text = "tasks of lm-evaluation-harness, in this process; needs the extra lm-eval"
    sub.add_argument("--lm-eval", type=several(str), default=[], metavar="NAME,NAME", help=text)
    text = "a folder with tasks of your own for --lm-eval (*.yaml)"
    sub.add_argument("--lm-eval-path", default="", metavar="DIR", help=text)
    text = f"of each task and seed, of --task and --lm-eval (default {CASES})"
    sub.add_argument("--cases", type=count, metavar="N", help=text)
    text = "a folder in which runs are kept, each by an engine made anew: what is there is not run again"
    sub.add_argument("--results", default="", metavar="DIR", help=text)
    sub.add_argument("--in-turns", action="store_true", help=IN_TURNS)
    sub.add_argument("--output-json", default="", metavar="FILE", help="write the whole result, with every run")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    workload_flags(sub, seed=None)


@dataclass
class Contender:
    """One configuration of the table."""

    name: str
    args: argparse.Namespace
    loaded: Loaded
    bill: dict[str, Any] = field(default_factory=dict)
    key: str = ""


def compare(args: argparse.Namespace) -> int:
    from minivllm.frontend.record import diff
    from minivllm.lab.bench import comparing, limits, lm_tasks, quality, trials
    from minivllm.lab.bench.store import Store

    check(checked(args))
    quality.check_tasks(args.task)
    found, store = contenders(args), Store(args.results)
    asks = asks_of(args, limits.smallest([limits.planned(one.loaded) for one in found]))
    lm_eval = lm_tasks.check(args.lm_eval, args.lm_eval_path) if args.lm_eval else {}
    work = Work(args, asks, store, quality.text_of(args.text) if args.quality_tokens else "", found[0], lm_eval)
    for one in found:
        one.bill, one.key = work.identity(one)
        if same := next((other.name for other in found if other is not one and other.key == one.key), None):
            raise ConfigError(f"{brief(same)} and {brief(one.name)} are the same configuration: want different ones")
    by_name = {one.name: one for one in found}
    todo = [one for one in found if not work.done(one)]
    if todo and args.quality_tokens and work.reference() is None and found[0] not in todo:
        todo.insert(0, found[0])  # the others are measured against its distributions
    kept = sum(len(store.of(one.key)["runs"].keys() & set(map(str, args.seeds))) for one in found)
    if kept:
        print(f"minivllm: {kept} of {len(found) * len(args.seeds)} runs are in {args.results}", file=sys.stderr)
    failed: dict[str, str] = {}  # texts alone: an exception would keep what its engine had of the device

    def failing(cell: trials.Cell, exc: Exception) -> None:
        if cell.name == found[0].name:
            raise exc  # the others are compared with it
        failed[cell.name] = str(exc) if isinstance(exc, MinivllmError) else f"{brief(cell.name)}: {describe_error(exc)}"
        print(f"minivllm: {failed[cell.name]}; it is left out, and the others go on", file=sys.stderr)

    cells = [trials.Cell(one.name, functools.partial(open_llm, one.loaded, one.args)) for one in todo]
    doing = trials.Trials(
        lambda cell, llm, seed: work.once(by_name[cell.name], llm, seed),
        lambda cell, llm: work.warm(by_name[cell.name], llm),
        lambda cell, seed: work.there(by_name[cell.name], seed),
        failing,
    )
    # what an engine has become in its runs, those of another call would not find
    doing.measure(cells, args.seeds, args.in_turns, apart=bool(args.results))
    found = [one for one in found if one.name not in failed]
    table = comparing.ComparedRuns([one.name for one in found], work.stored(found), args.seeds, settings(args))
    verdicts = {one.name: diff.compare(found[0].bill, one.bill, results=False).verdict for one in found[1:]}
    whole = table.result({one.name: one.bill for one in found}, verdicts)
    whole["failed"] = failed
    whole["seeds_change_nothing"] = same = trials.same_over_seeds(table.runs, args.dataset, args.temperature)
    if same:
        print(f"minivllm: warning: {same}", file=sys.stderr)
    lines = table.lines(whole, workload_text(args, asks(args.seeds[0])))
    lines += [f"failed: {text}" for text in failed.values()]
    return tell(whole, args, "\n".join(lines)) or int(bool(failed))


def check(args: argparse.Namespace) -> None:
    """ConfigError for flags that would change nothing or contradict each other."""
    if args.seed is not None:
        raise ConfigError(f"--seed {args.seed}: a run has a seed of --seeds; give it there")
    if len(set(args.seeds)) < len(args.seeds):
        raise ConfigError(f"--seeds {','.join(map(str, args.seeds))}: the same seed twice; each is a run of its own")
    if args.text and not args.quality_tokens:
        raise ConfigError("--text is scored by --quality-tokens, which are 0; leave out either")
    if args.cases is not None and not args.task and not args.lm_eval:
        raise ConfigError(f"--cases {args.cases}: of no task; want --task NAME or --lm-eval NAME, or leave it out")
    if args.lm_eval_path and not args.lm_eval:
        raise ConfigError(f"--lm-eval-path {args.lm_eval_path}: with no task of it; want --lm-eval NAME too")
    args.cases = args.cases or CASES


@dataclass
class Work:
    """What is measured of each configuration, and kept as soon as it is known."""

    args: argparse.Namespace
    asks: Callable[[int], Sequence[BenchAsk]]
    store: Store
    text: str
    first: Contender  # the reference of the others
    lm_eval: dict[str, Any] = field(default_factory=dict)  # tasks of lm-eval, loaded
    scores: TextScores | None = None  # of the first

    @functools.cached_property
    def lm_identity(self) -> dict[str, Any]:
        from minivllm.lab.bench import lm_tasks

        return lm_tasks.identity(self.lm_eval)

    def identity(self, one: Contender) -> tuple[dict[str, Any], str]:
        """The bill of materials of a configuration, and its digest with what is asked of it."""
        from minivllm.cli.bench_runs import bill_planned
        from minivllm.lab.bench.store import digest

        args = self.args
        asked = [[ask.prompt, ask.max_tokens] for ask in self.asks(0)]
        work = {
            "asks": asked,
            "temperature": args.temperature,
            "text": self.text,
            "tokens": args.quality_tokens,
            "tasks": args.task,
            "cases": args.cases,
            "an_engine_each": args.in_turns or bool(args.results),
        }
        if self.lm_eval:
            work["lm_eval"] = self.lm_identity
        bill = bill_planned(one.loaded)
        return bill, digest(bill, work)

    def stored(self, found: Sequence[Contender]) -> list[dict[str, Any]]:
        """The runs of each, and its quality against the first."""
        there = [self.store.of(one.key) for one in found]
        return [{"runs": one["runs"], "quality": one["quality"].get(self.first.key)} for one in there]

    def done(self, one: Contender) -> bool:
        there = self.store.of(one.key)
        runs = all(str(seed) in there["runs"] for seed in self.args.seeds)
        return runs and (self.first.key in there["quality"] or not self.text)

    def reference(self) -> TextScores | None:
        from minivllm.lab.bench.quality import TextScores

        path = self.store.scores(self.first.key)
        self.scores = self.scores or (TextScores.load(path) if path is not None else None)
        return self.scores

    def there(self, one: Contender, seed: int) -> bool:
        """Whether nothing is left to measure of a seed; quality is measured with the first of them."""
        kept = self.store.of(one.key)
        if str(seed) not in kept["runs"]:
            return False
        return seed != self.args.seeds[0] or not self.text or self.scored(one)

    def scored(self, one: Contender) -> bool:
        """Whether the quality of a text is known of a configuration, and of the first its distributions."""
        known = self.first.key in self.store.of(one.key)["quality"]
        return known and (one is not self.first or self.reference() is not None)

    def warm(self, one: Contender, llm: Any) -> None:
        """Quality first, once, then runs that are not counted."""
        from minivllm.lab.bench import trials

        if not self.scored(one):
            self._quality(one, llm)
        watch = watch_of(llm.config, llm.engine.wiring.device)
        for turn in range(self.args.warmups):
            trials.run(llm, self.asks(-1 - turn), self.args.temperature, -1 - turn, watch)

    def once(self, one: Contender, llm: Any, seed: int) -> None:
        """The run of a seed, unless it is there."""
        from minivllm.lab.bench import lm_tasks, quality, trials

        args, watch = self.args, watch_of(llm.config, llm.engine.wiring.device)
        if str(seed) in self.store.of(one.key)["runs"]:
            return
        run = trials.run(llm, self.asks(seed), args.temperature, seed, watch)
        if args.task:
            run["figures"] |= quality.tasks(llm, args.task, args.cases, seed)
        if self.lm_eval:
            figures, run["lm_eval"] = lm_tasks.scores(llm, self.lm_eval, args.cases, seed)
            run["figures"] |= figures
        capacity = llm.engine.capacity
        sizes = zip(capacity.block_bytes, capacity.blocks, strict=True)
        run["figures"] |= {
            "weight_bytes": capacity.weight_bytes,
            "kv_token_bytes": sum(size for size, _ in sizes) / llm.engine.wiring.block,
        }
        self.store.keep_run(one.key, seed, run)
        progress(f"{brief(one.name)}, seed {seed}: {run['figures']['output_throughput']:.1f} tokens/s")

    def _quality(self, one: Contender, llm: Any) -> None:
        from minivllm.lab.bench import quality

        if not self.text:
            return
        try:
            own = quality.score(llm, self.text, self.args.quality_tokens)
        except RequestError as exc:
            self.store.keep_quality(one.key, self.first.key, {"not_measured": brief(str(exc), 300)})
            return
        if one is self.first:
            self.scores = own
            if (path := self.store.scores(one.key)) is not None:
                own.save(path)
        reference = self.reference()
        if reference is None:  # the first could not be scored: a perplexity needs none
            found = {key: value for key, value in quality.summary(own, own).items() if key not in quality.RELATIVE}
        else:
            found = quality.summary(own, reference)
        self.store.keep_quality(one.key, self.first.key, found)


def contenders(args: argparse.Namespace) -> list[Contender]:
    """The configurations, each with a name of its own.  ConfigError if there are fewer than two, or one twice."""
    if args.sweep and len(args.file) > 1:
        raise ConfigError(f"--sweep: want one file at most to begin with, not {len(args.file)}")
    if not args.sweep and len(args.file) < 2:
        raise ConfigError("want at least two files to compare, or --sweep KEY=VALUE,VALUE")
    cases: list[tuple[str, list[str], list[str]]] = []
    if args.sweep:
        for chosen in itertools.product(*map(_values, args.sweep)):
            cases.append((" ".join(chosen), list(args.file), list(chosen)))
    else:
        stems = [Path(file).stem for file in args.file]
        names = stems if len(set(stems)) == len(stems) else args.file
        cases = [(name, [file], []) for name, file in zip(names, args.file, strict=True)]
    if twice := {name for name, _, _ in cases if sum(name == other for other, _, _ in cases) > 1}:
        raise ConfigError(f"{brief(min(twice))}: the same configuration twice")
    found, unused_options = [], {}
    for name, files, sets in cases:
        own = copy(args)
        own.set = [*args.set, *sets]
        try:
            loaded = load(own, files)
        except ConfigError as exc:
            if args.set or not sets or not str(exc).startswith("--set"):
                raise
            raise ConfigError(str(exc).replace("--set", "--sweep", 1)) from None
        if unused := unused_tables(loaded):
            unused_options[" ".join(files)] = unused
        found.append(Contender(name, own, replace(loaded, run=type(loaded.run)())))  # [run] is about `minivllm run`
    for file, unused in unused_options.items():
        want = "requests are those of --dataset, or random ones, at --temperature"
        print(f"minivllm: {unused} of {file}: not used here; {want}", file=sys.stderr)
    return found


def unused_tables(loaded: Loaded) -> str:
    """The tables of a configuration that say what is asked of an engine, which here flags do."""
    sections = {"[run]": loaded.run.prompts or loaded.run.prompts_file, "[sampling]": loaded.sampling}
    return " and ".join(name for name, given in sections.items() if given)


def _values(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    given = at_commas(values, f"--sweep {shown(text)}")
    if not equals or not key.strip() or not all(given):
        raise ConfigError(f"--sweep {shown(text)}: want key=value,value, for example quantizer=none,int8")
    return [f"{key.strip()}={value}" for value in given]
