"""Tables of the documentation.

Figures that a command computes must be exact, because they are the same on each machine.  Limits, defaults and names
must be the ones in the code.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from runpy import run_path

import pytest

from minivllm import errors
from minivllm.cli import main, make_parser
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError
from minivllm.lab.traces.synthetic import Synthetic
from minivllm.registration.spec import KINDS
from minivllm.registry import Catalog

DOCS = Path(__file__).resolve().parents[2] / "docs"


def rows(page: str, head: str) -> list[list[str]]:
    """Return the cells of a table of a page, below the line with this beginning, without marks for bold and code."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith(head))
    found = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip().replace("*", "").replace("`", "") for cell in line.strip("|").split("|")])
    return found


def replay(capsys, *flags: str) -> list[dict]:
    assert main(["replay", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def trace_of(page: str, start: str) -> str:
    """The first ``synthetic:...`` behind some words of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.search(r"`(synthetic:[^`]*)`", text[text.index(start) :])[1]


EVICTORS = [row for row in rows("eviction.md", "| trace | cache |") if row[0].startswith("synthetic:")]
NAMES = "lru,fifo,lfu,s3fifo,prefix-depth,cost-aware"


@pytest.mark.slow
@pytest.mark.parametrize("row", EVICTORS, ids=lambda row: row[0])
def test_the_hit_rates_of_evictors_are_what_a_replay_counts(capsys, row):
    trace, share, *shown = row
    runs = replay(capsys, trace, "--cache-only", "--blocks", share.replace(" ", ""), "--evictor", NAMES, "--optimum")
    assert [f"{100 * run['hit_rate']:.2f}" for run in runs] == shown


@pytest.mark.slow
def test_the_schedulers_beside_evictors_are_as_a_replay_counts(capsys):
    table = rows("eviction.md", "| scheduler | hits |")
    names = [row[0].split(" ")[0] for row in table]
    trace = trace_of("eviction.md", "## Schedulers and a trace")
    sets = ["--set", "max_num_seqs=16", "--set", "max_num_batched_tokens=1024"]
    runs = replay(capsys, trace, "--blocks", "10%", *sets, "--evictor", "cost-aware", "--scheduler", ",".join(names))
    for row, run in zip(table, runs, strict=True):
        queued = [f"{run['queue_steps'][key]:.0f}" for key in ("p50", "p99", "max")]
        counted = [f"{100 * run['hit_rate']:.1f} %", str(run["preemptions"]), str(run["steps"]), *queued]
        assert row[1:] == counted, row[0]


@pytest.mark.slow
def test_the_policies_of_the_page_about_scheduling_are_as_a_replay_counts(capsys):
    head = "| policy | queued: mean | 99 % | first token: mean | 99 % | last token: mean | preempted | length | hits |"
    table = rows("scheduling.md", head)
    names = [row[0].split(" ")[0] for row in table]
    trace = trace_of("scheduling.md", "## Policies and traces")
    sets = ["--set", "max_num_seqs=64", "--set", "max_num_batched_tokens=2048"]
    runs = replay(capsys, trace, "--blocks", "8000", *sets, "--evictor", "lru", "--scheduler", ",".join(names))
    for row, run in zip(table, runs, strict=True):
        means = [
            f"{run[f'{what}_steps'][key]:,.0f}"
            for what, key in (
                ("queue", "mean"),
                ("queue", "p99"),
                ("first_token", "mean"),
                ("first_token", "p99"),
                ("last_token", "mean"),
            )
        ]
        counted = [*means, f"{run['preemptions']:,}", f"{run['steps']:,}", f"{100 * run['hit_rate']:.1f} %"]
        assert row[1:] == counted, row[0]


def test_the_tables_of_figures_are_there():
    assert len(EVICTORS) == 3 and all(len(row) == 2 + NAMES.count(",") + 1 + 1 for row in EVICTORS)
    assert trace_of("scheduling.md", "## Policies and traces") == "synthetic:requests=2000,rate=1.5"


# ---- limits, defaults and names that pages state -------------------------------------------------------------------


def refused(**values):
    beside = {"beam_width": 2} if "length_penalty" in values else {}
    try:
        SamplingParams(**values, **beside)
    except RequestError:
        return True
    return False


LIMIT = re.compile(r"up to (\d+)|(-?\d+) to (\d+)")


def test_limits_of_sampling_parameters_are_those_that_are_refused_beyond():
    seen = set()
    for name, _, meaning in rows("options.md", "| name | default | meaning |"):
        found = LIMIT.search(meaning)
        if found is None or name in ("logit_bias", "bad_words"):  # those are checked by their processors
            continue
        seen.add(name)
        most = int(found[1] or found[3])
        listed = {"stop": ["x"] * (most + 1), "stop_token_ids": list(range(most + 1))}.get(name)
        good, bad = (listed[:-1], listed) if listed else (most, most + 1)
        assert not refused(**{name: good}) and refused(**{name: bad}), f"{name}: {meaning}"
        if found[2]:
            assert not refused(**{name: int(found[2])}) and refused(**{name: int(found[2]) - 1}), f"{name}: {meaning}"
    assert seen >= {"n", "temperature", "length_penalty", "presence_penalty", "frequency_penalty", "stop"}


def test_defaults_of_the_generator_are_those_of_the_code():
    page = (DOCS / "eviction.md").read_text(encoding="utf-8")
    reported = page[page.index("The generator's keys, with defaults") :].partition("\n\n")[0]
    shown = {name: float(value) for name, value in re.findall(r"`(\w+)` ([\d.]*\d)", reported)}
    assert shown == {f.name: float(f.default) for f in dataclasses.fields(Synthetic)}


def test_defaults_of_schedulers_are_those_of_their_options():
    from minivllm.plugins.scheduler import options

    models = {name.removesuffix("Options").lower(): made for name, made in vars(options).items() if "Options" in name}
    plugin, seen = "", 0
    for name, keys, defaults, _ in rows("scheduling.md", "| policy | option |"):
        plugin = name or plugin
        for key, default in zip(keys.split(", "), defaults.split(", "), strict=True):
            field = models[plugin.replace("-", "")].model_fields[key]
            words = {"none": None, "false": False}
            assert field.default == (words[default] if default in words else float(default)), (plugin, key)
            seen += 1
    assert seen == sum(len(model.model_fields) for model in models.values())


def test_the_table_of_commands_has_all_of_them():
    shown = {row[0].split(" ")[0] for row in rows("options.md", "| command | what it does |")}
    commands = next(a for a in make_parser()._actions if a.choices and "run" in a.choices).choices
    assert shown == set(commands)
    wired = ("generate", "chat", "run", "run-batch", "explain", "serve", "eval", "ablate", "compare", "calibrate")
    for name, parser in commands.items():  # the page's text about flags
        flags = parser.filled()._option_string_actions
        assert ("--model" in flags) == (name in wired), name
        assert ("--record" in flags) == (name in ("generate", "chat", "run", "eval")), name


def test_the_exit_codes_of_the_page_are_those_of_the_errors():
    table = rows("options.md", "| error | exit code | when |")
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MinivllmError)
    ]
    codes = {kind.__name__: kind.exit_code for kind in kinds if kind.exit_code > 1}
    assert {row[0]: int(row[1]) for row in table} == codes


def test_the_readme_names_every_built_in_plug_in():
    page = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| seam | built in today |") :].partition("\n\n")[0]
    catalog = Catalog.discover(environ={}, entry_points=NoPoints())
    for kind in KINDS:
        for entry in catalog[kind].entries:
            assert f"`{entry.name}`" in table, (kind, entry.name)


def figures(text: str) -> list[str]:
    """Find the numbers of a text."""
    return re.findall(r"\d[\d.,]*\d|\d", text)


def test_the_figures_of_the_readme_are_those_of_the_page_about_performance():
    measured = figures((DOCS / "performance.md").read_text(encoding="utf-8"))
    table = (DOCS.parent / "README.md").read_text(encoding="utf-8").split("<!-- table: figures -->")[1]
    lines = table.partition("<!-- end -->")[0].splitlines()[3:]
    shown = [figure for line in lines for figure in figures(line.partition("|")[2].partition("|")[2])]
    assert len(shown) >= 12
    assert not (missing := [figure for figure in shown if figure not in measured]), missing


def test_the_sentences_about_speed_in_the_readme_have_figures_of_the_page_about_performance():
    measured = figures((DOCS / "performance.md").read_text(encoding="utf-8"))
    page = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    shown = figures(page.split("**How fast.**")[1].partition("\n\n")[0])
    assert len(shown) >= 6
    assert not (missing := [figure for figure in shown if figure not in measured]), missing


def test_scripts_and_tests_that_pages_name_are_there():
    root = DOCS.parent
    for path in (*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"):
        for name in re.findall(r"\b((?:benchmarks|tests|examples)/[\w/]+\.\w+)", path.read_text(encoding="utf-8")):
            made = name == "tests/test_conformance.py"  # in the package that the tutorial writes
            assert made or (root / name).exists(), f"{path.name}: {name}"


class NoPoints:
    groups = ()


PAPERS = [row for row in rows("experiments.md", "| paper | method |") if re.match(r"\w+=", row[2])]


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: row[0].partition(" (")[0])
def test_the_settings_of_a_paper_run(capsys, row):
    settings = row[2].partition(", and")[0].split()
    flags = [flag for setting in settings for flag in ("--set", setting)]
    assert main(["generate", "Once upon a time", *flags, "--max-tokens", "4"]) == 0, capsys.readouterr().err


def test_most_papers_are_settings():
    assert len(PAPERS) == 5


@pytest.mark.slow
def test_the_table_of_quality_is_what_its_command_prints():
    """Sums of another machine may change an answer and the last digit of a KL."""
    shown = rows("../benchmarks/RESULTS.md", "| compressor | needles, % |")
    quality = run_path(str(DOCS.parent / "benchmarks" / "compression_quality.py"))
    printed = quality["table"](quality["SCORERS"], 0.5, 40)
    assert printed[0] == "| compressor | needles, % | interval | KL, nats | perplexity |"
    for row, line in zip(shown, printed[2:], strict=True):
        name, share, _, divergence, perplexity = (cell.strip(" `") for cell in line.strip("|").split("|"))
        kl, half = (float(part) for part in divergence.split(" ± "))
        assert row[0] == name and abs(int(row[1]) - int(share)) <= 5
        assert abs(float(row[3].split(" ± ")[0]) - kl) <= max(0.002, half / 4)
        assert float(row[4]) == pytest.approx(float(perplexity), rel=0.02)
