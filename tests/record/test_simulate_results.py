"""What ``minivllm simulate`` says of its runs."""

from __future__ import annotations

import json

from test_simulate import COSTS

from minivllm.cli import main
from minivllm.plugins.evictor.options import CostAwareOptions

TRACE = "synthetic:like=pocket,requests=40,seed=3,rate=20"
SIZES = ["--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=64"]
OPTIONS = [f'{{name="cost-aware",options={{horizon={h},ghosts=2}}}}' for h in ("2.0", "3.0")]
SHOWN = [f"cost-aware (horizon={h}, ghosts=2)" for h in ("2.0", "3.0")]


def test_rows_that_differ_in_options_alone_say_them(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS.as_json()))

    def told(*flags):
        assert main(["simulate", "--trace", TRACE, "--costs", str(costs), *SIZES, *flags, "--json"]) == 0
        return [(run["scheduler"], run["evictor"]) for run in json.loads(capsys.readouterr().out)["runs"]]

    met = told("--evictor", ",".join(["cost-aware", *OPTIONS]), "--scheduler", "fcfs,static")
    assert met == [(one, evictor) for one in ("fcfs", "static") for evictor in ("cost-aware", *SHOWN)]
    met = told("--scheduler", 'static,{name="static",options={max_hold=7.0}}', "--oracle")
    hold, shortest = "static (max_hold=7.0)", "shortest-job (lengths known)"
    assert met == [("static", "lru"), ("static", "optimum"), (shortest, "lru"), (hold, "lru"), (hold, "optimum")]


def test_a_part_with_an_option_at_its_default_is_a_run_beside_the_one_without(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS.as_json()))
    default = CostAwareOptions().horizon
    flags = ["--evictor", f'cost-aware,{{name="cost-aware",options={{horizon={default}}}}}']
    assert main(["simulate", "--trace", TRACE, "--costs", str(costs), *SIZES, *flags, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["evictor"] for run in runs] == ["cost-aware", f"cost-aware (horizon={default})"]
    assert runs[0]["mean_e2el_ms"] == runs[1]["mean_e2el_ms"]
