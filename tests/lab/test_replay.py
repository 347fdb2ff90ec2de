"""Replay: traces are read or refused, hits are those that one counts by hand, the optimum is what trying everything
finds, and the engine under it is the real one."""

from __future__ import annotations

import functools
import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest

from minivllm.cli import main
from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.errors import ConfigError, PluginError
from minivllm.lab.replay.blocks import _info, run_cache, run_optimum
from minivllm.lab.replay.serve import ServeSizes, serve
from minivllm.lab.traces.read import read_trace
from minivllm.lab.traces.synthetic import Synthetic, generate
from minivllm.lab.traces.trace import build
from minivllm.plugins.evictor.cost_aware import CostAware
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.evictor.options import CostAwareOptions, S3FifoOptions
from minivllm.plugins.evictor.s3fifo import S3Fifo
from minivllm.plugins.scheduler.fcfs import Fcfs

SMALL = "synthetic:requests=60,seed=3,question=30,answer=20,node=40,longest=600,think=5,rate=4"


def lru(ctx):
    return Lru(None, ctx)


def fcfs(ctx):
    return Fcfs(None, ctx)


def turns(*runs, output=8, every=100.0):
    """Return a trace of prompts that are lists of (content, tokens), far apart."""
    n = len(runs)
    lengths = [sum(k for _, k in r) for r in runs]
    return build("hand", [i * every for i in range(n)], lengths, [output] * n, [900 + i for i in range(n)], runs)


SIZES = ServeSizes(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200, block=4, blocks=40, partial=False)

# ---------------------------------------------------------------- traces


def test_an_azure_trace_is_read(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,5,9"
    )
    t = read_trace(str(file))
    assert (t.prompt.tolist(), t.output.tolist(), len(t.tokens(0))) == ([374, 5], [44, 9], 374)
    assert t.arrival == pytest.approx([0, 4.314579], abs=1e-6)
    assert not set(t.keys(0, 4)) & set(t.keys(1, 4)), "requests share content that the trace says nothing of"


def test_a_mooncake_trace_is_read_with_its_shared_prefixes(tmp_path):
    file = tmp_path / "m.jsonl"
    rows = [(0, 1000, [0, 1]), (2500, 1100, [0, 1, 2]), (1000, 600, [0, 3])]
    file.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": n, "output_length": 7, "hash_ids": i}) + "\n"
            for t, n, i in rows
        )
    )
    t = read_trace(str(file))
    assert t.prompt.tolist() == [1000, 600, 1100] and t.arrival.tolist() == [0, 1, 2.5]
    first, second, third = (t.chain(i, 512) for i in range(3))
    assert len(third) == 3 and third[:2] == first and second[0] == first[0] and second[1] not in third
    shared = [a == b for a, b in zip(t.keys(0, 16), t.keys(2, 16), strict=False)]
    assert shared == [True] * 62  # 1000 tokens have 62 full blocks, and the third begins with all of them


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIME,ContextTokens\n", "no column TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace has no request"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "a.csv:2: "),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,0,2\n",
            "expected at least one of each",
        ),
        ("a.jsonl", "{}\n", "a.jsonl:1: the field hash_ids is missing; a line has timestamp (ms), input_length"),
        (
            "a.jsonl",
            '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n',
            "1 hash ids for 513 tokens",
        ),
        (
            "a.txt",
            "",
            "expected a .csv (Azure, BurstGPT), a .jsonl (Mooncake, Qwen-Bailian), sample:NAME or synthetic:",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(str(tmp_path / name))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic:turn=3", "Did you mean 'turns'?"), ("synthetic:seed=x", "seed='x': expected a whole number"),
        ("synthetic:rate=0", "rate=0.0: expected at least"),
        ("synthetic:longest=1", "no conversation fits into longest=1"),
    ],
)  # fmt: skip
def test_a_generator_with_wrong_parameters_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        read_trace(text)
    assert message in str(caught.value)


def test_the_same_seed_makes_the_same_trace_and_another_seed_another():
    a, b = read_trace(SMALL), read_trace(SMALL)
    assert all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("arrival", "prompt", "output", "runs", "answer"))
    assert not np.array_equal(a.prompt, read_trace(SMALL.replace("seed=3", "seed=4")).prompt)


def test_a_generated_trace_is_as_its_parameters_say():
    s = Synthetic(requests=4000, rate=2.0, burst=4.0, turns=3.0, question=200, spread=0.8, depth=2, fan=8, zipf=1.2)
    t = generate(s)
    assert len(t) == 4000 and (np.diff(t.arrival) >= 0).all() and (t.prompt + t.output).max() <= s.longest
    assert 150 < np.median(t.output) < 250  # the answer's median is 200; long conversations are cut
    begins = [tuple(t.runs[t.first[i]]) for i in range(len(t))]
    counts = sorted((begins.count(b) for b in set(begins)), reverse=True)
    assert len(counts) == 8 and 3 * counts[-1] < counts[0]  # Zipf: some beginnings are popular
    chains = [[c for c, _ in t.runs[t.first[i] : t.first[i + 1]].tolist()] for i in range(len(t))]
    later = [c for c in chains if len(c) > s.depth + 1]
    ends = {tuple(c) for c in chains}
    assert len(later) > 1000 and sum(tuple(c[:-2]) in ends for c in later) > 0.95 * len(
        later
    )  # a turn repeats the last


# ---------------------------------------------------------------- the cache alone


def test_hits_are_those_that_are_counted_by_hand():
    """Of LRU.  With room for four: c goes for d e.  With room for three: c and b go for d e, then e goes for b."""
    a, b, c, d, e = 11, 12, 13, 14, 15
    run = run_cache([[a, b, c], [a, b], [d, e], [a, b], [d]], 4, 16, lru)
    assert run.hits.tolist() == [0, 2, 0, 2, 1] and run.evictions == 1
    run = run_cache([[a, b, c], [a, b], [d, e], [a, b], [d]], 3, 16, lru)
    assert run.hits.tolist() == [0, 2, 0, 1, 1] and run.evictions == 3
    assert run.requested.tolist() == [3, 2, 2, 2, 1] and run.rate == 0.4


def test_the_end_of_a_chain_that_is_longer_than_the_cache_is_not_cached():
    run = run_cache([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 3, 16, lru)
    assert run.hits.tolist() == [0, 3]


class _Losing(Lru):
    def victims(self, n):
        return super().victims(n)[:-1]


class _ParentsFirst(Lru):
    def free(self, keys):
        super().free(keys[::-1])


@pytest.mark.parametrize(
    ("wrong", "message"), [(_Losing, "it loses keys"), (_ParentsFirst, "the parent of a cached block")]
)
def test_an_evictor_that_breaks_its_contract_is_found(wrong, message):
    with pytest.raises(PluginError, match=message):
        run_cache([[1, 2, 3], [4, 5], [6]], 4, 16, lambda ctx: wrong(None, ctx))


def best_by_trying(chains, capacity):
    """Return the most blocks that any choice of victims can hit, by trying every choice."""
    parent = {key: chain[d - 1] if d else 0 for chain in chains for d, key in enumerate(chain)}

    @functools.cache
    def best(i, cached):
        if i == len(chains):
            return 0
        chain = chains[i]
        n = next((d for d, key in enumerate(chain) if key not in cached), len(chain))
        others = cached - set(chain)
        need = max(0, len(cached | set(chain)) - capacity)
        found = -1
        for gone in itertools.combinations(sorted(others), need):
            left = cached - set(gone)
            if all(parent[key] in left or not parent[key] for key in left):  # no block without its parent
                found = max(found, best(i + 1, left | set(chain)))
        return n + found

    return best(0, frozenset())


def test_belady_is_what_trying_every_choice_finds():
    rng = random.Random(5)
    better = 0
    for _ in range(60):
        chains = []
        for _ in range(rng.randint(5, 9)):
            branch = [rng.randint(1, 2) for _ in range(rng.randint(1, 3))]
            chains.append(tuple(int("".join(map(str, branch[: d + 1]))) for d in range(len(branch))))
        capacity = rng.randint(3, 5)
        run = run_optimum(chains, capacity, 16)
        assert run.hits.sum() == best_by_trying(tuple(chains), capacity), (chains, capacity)
        better += run.hits.sum() > run_cache(chains, capacity, 16, lru).hits.sum()
    assert better > 10, "the optimum is hardly ever better than LRU here: the test has no power"


# ---------------------------------------------------------------- what tells evictors apart


def add(evictor, *chain):
    keys = np.array(chain, np.uint64)
    evictor.add(keys, _info(chain, 0, len(chain), 16))
    evictor.free(keys)


def hit(evictor, key):
    one = np.array([key], np.uint64)
    evictor.hit(one)
    evictor.hold(one)
    evictor.free(one)


def test_s3fifo_lets_a_scan_pass_and_takes_a_ghost_back_to_main():
    e = S3Fifo(S3FifoOptions(), EvictorContext(10, 16, "device"))
    add(e, 1)
    hit(e, 1)
    hit(e, 1)
    for key in range(2, 11):
        add(e, key)
    assert e.victims(8).tolist() == list(range(2, 10))  # what was never hit, oldest first; 1 was promoted
    add(e, 5)  # a ghost: it comes to main at once
    for key in range(20, 28):
        add(e, key)
    assert e.victims(8).tolist() == [10, *range(20, 27)]
    assert e.victims(9).tolist() == [1, 5, 27]  # the small queue is down to its share: main gives, oldest first


def test_cost_aware_learns_that_blocks_which_were_hit_are_hit_again():
    e = CostAware(CostAwareOptions(horizon=20), EvictorContext(100, 16, "device"))
    for key in range(1, 200):  # one in four is used again, and again
        add(e, key)
        if key % 4 == 0:
            for _ in range(3):
                hit(e, key)
    assert e.chance(0) < e.chance(2) and e.chance(1) > 0.5
    gone = e.victims(120).tolist()
    assert sum(key % 4 == 0 for key in gone) == 0, "what is used again went before what never was"


def test_cost_aware_gives_up_what_is_cheap_to_compute_again():
    e = CostAware(CostAwareOptions(), EvictorContext(100, 16, "device"))
    info = _info([7], 0, 1, 16)
    e.add(np.array([7], np.uint64), replace(info, cost=np.array([1600.0])))
    e.free(np.array([7], np.uint64))
    add(e, 8)
    assert e.victims(1).tolist() == [8]  # younger, and a hundredth of the cost


def test_a_ghost_brings_its_hits_back():
    e = CostAware(CostAwareOptions(), EvictorContext(4, 16, "device"))
    add(e, 1)
    hit(e, 1)
    assert e.victims(1).tolist() == [1]
    add(e, 1)
    assert e.blocks[1].hits == 2
    none = CostAware(CostAwareOptions(ghosts=0), EvictorContext(4, 16, "device"))
    add(none, 1)
    hit(none, 1)
    none.victims(1)
    add(none, 1)
    assert none.blocks[1].hits == 0


# ---------------------------------------------------------------- the engine


def test_the_engine_finds_what_one_finds_by_hand():
    """The second prompt begins with 5 of the first one's blocks, the third repeats the first with its answer."""
    t = turns([(1, 24)], [(1, 20), (2, 10)], [(1, 24), (900, 8), (3, 5)])
    run = serve(t, SIZES, fcfs, lru, seconds_per_step=1.0)
    assert run.cached.tolist() == [0, 20, 28]  # an answer's last token is never computed: 31 of 32 are, 7 blocks
    assert run.computed == 24 + 7 + 10 + 7 + 9 + 7  # a prompt less its hit, and all of the answer but its last
    assert run.queued.tolist() == run.first.tolist() == [0, 0, 0] and run.done.tolist() == [7, 7, 7]
    assert run.steps == 24 and run.hit_rate == 48 / (24 + 30 + 37)


def test_a_prompt_of_which_one_token_is_left_to_compute_has_a_first_token_as_others_do():
    run = serve(turns([(1, 24)], [(1, 21)]), SIZES, fcfs, lru, seconds_per_step=1.0)
    assert run.cached.tolist() == [0, 20] and run.first.tolist() == [0, 0]


def test_queue_times_are_steps_in_line():
    """Two rows, four requests at once, three steps each: the second pair waits for the first."""
    t = turns([(1, 5)], [(2, 5)], [(3, 5)], [(4, 5)], output=3, every=0.0)
    run = serve(t, replace(SIZES, max_num_seqs=2), fcfs, lru, seconds_per_step=1.0)
    assert run.queued.tolist() == [0, 0, 3, 3] and run.done.tolist() == [2, 2, 5, 5] and run.steps == 6


def test_a_request_that_cannot_fit_is_counted_and_the_others_are_served():
    run = serve(turns([(1, 5)], [(2, 190)], [(3, 6)]), replace(SIZES, blocks=20), fcfs, lru)
    assert run.refused == 1 and run.queued.tolist()[1] == -1 and (run.done[[0, 2]] > 0).all()


def test_a_run_is_the_same_every_time_and_nothing_beats_what_knows_the_future():
    t = read_trace(SMALL)
    sizes = ServeSizes(4, 128, 700, 8, 120)
    runs = [serve(t, sizes, fcfs, lru) for _ in range(2)]
    same = ("steps", "computed", "evictions", "preemptions")
    assert [getattr(runs[0], f) for f in same] == [getattr(runs[1], f) for f in same]
    assert np.array_equal(runs[0].queued, runs[1].queued) and np.array_equal(runs[0].cached, runs[1].cached)
    assert runs[0].evictions > 500 and runs[0].refused == 0
    best = serve(t, sizes, fcfs, None)
    assert best.hit_rate > runs[0].hit_rate > 0.1


# ---------------------------------------------------------------- the command


def test_the_command_compares_configurations(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('num_kvcache_blocks = 150\nkvcache_block_size = 8\nevictor = "lru"\n')
    (tmp_path / "b.toml").write_text(
        'num_kvcache_blocks = 150\nkvcache_block_size = 8\nevictor = {name = "s3fifo", options = {small = 0.3}}\n'
    )
    files = ["--config", str(tmp_path / "a.toml"), "--config", str(tmp_path / "b.toml")]
    assert main(["replay", SMALL, *files, "--optimum", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    named = [(r["config"], r["evictor"]) for r in found["runs"]]
    assert named == [("a", "lru"), ("a", "optimum"), ("b", "s3fifo"), ("b", "optimum")]
    first = found["runs"][0]
    assert found["requests"] == 60 == first["requests"] and 0 < first["of_optimum"] <= 1.001
    assert {"plan", "publish"} < first["host_us_per_step"].keys() and first["seam_us_per_step"]["evictor"] > 0
    assert main(["replay", SMALL, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[1].split()[:4] == ["config", "scheduler", "evictor", "blocks"]
    assert lines[4].startswith("figures of b fcfs s3fifo: evictor.")
    assert lines[3].split()[:3] == ["b", "fcfs", "s3fifo"]


def test_the_command_counts_the_cache_alone(capsys):
    args = [
        "replay",
        SMALL,
        "--cache-only",
        "--blocks",
        "10%",
        "--evictor",
        "lru,lfu",
        "--evictor",
        "fifo",
        "--optimum",
    ]
    assert main([*args, "--json", "--requests", "10:60"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["evictor"] for r in found["runs"]] == ["lru", "lfu", "fifo", "optimum"] and found["requests"] == 50
    assert max(r["hit_rate"] for r in found["runs"]) == found["runs"][-1]["hit_rate"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "evictor=lru"], "num_kvcache_blocks is not set"),
        (["--blocks", "0"], "--blocks 0: expected a positive number, or a percentage"),
        (["--blocks", "200%"], "expected a positive number, or a percentage"),
        (["--blocks", "9", "--requests", "5:3"], "expected A:B with 0 <= A < B <= 60"),
        (["--blocks", "9", "--step-ms", "-1"], "expected 0 to 3600000"),
        (["--blocks", "9", "--output-json", "/nowhere/r.json"], "/nowhere/r.json: No such file or directory"),
        (["--blocks", "9", "--cache-only", "--scheduler", "fcfs"], "--scheduler has no meaning with --cache-only"),
        (["--blocks", "9", "--evictor", "lruu"], "Did you mean 'lru'?"),
    ],
)
def test_the_command_says_what_it_cannot_do(args, message, capsys):
    assert main(["replay", SMALL, *args]) in (2, 4)
    assert message in capsys.readouterr().err


OPTION, WHOSE = ["--set", "evictor.options.small=0.3"], ["--set", "evictor.name=s3fifo"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--evictor", "s3fifo", *OPTION], ""),
        (["--evictor", "lru,s3fifo", *WHOSE, *OPTION], ""),
        (["--evictor", "lru,s3fifo", *OPTION], "with --evictor lru,s3fifo"),
        (["--evictor", "lru", *WHOSE, *OPTION], "with --evictor lru"),
        (["--evictor", "lru", *OPTION], "minivllm/lru takes no options"),
        (["--scheduler", "fair,fcfs", "--set", "scheduler.options.x=1"], "with --scheduler fair,fcfs"),
    ],
)
def test_options_beside_a_name_are_its_own_or_refused(args, says, capsys):
    trace = [
        "replay",
        "synthetic:requests=60,seed=0",
        "--blocks",
        "10%",
        *(["--cache-only"] if "--evictor" in args else []),
    ]
    code = main([*trace, *args])
    message = capsys.readouterr()
    assert (code, says in message.err) == (2 if says else 0, True), message.err


def test_a_comma_within_brackets_parts_no_names_and_a_table_has_options_of_its_own(tmp_path, capsys):
    (tmp_path / "a.toml").write_text('evictor = {name = "cost-aware", options = {horizon = 1.5}}\n')
    table = '{name="cost-aware",options={horizon=9.0,ghosts=0}}'
    shared = ["replay", "synthetic:requests=200,seed=0", "--blocks", "10%", "--cache-only", "--json"]
    flags = ["--config", str(tmp_path / "a.toml"), "--evictor", f"lru, {table},", "--evictor", "cost-aware,lru"]
    assert main([*shared, *flags]) == 0
    found = {row["evictor"]: row["evictions"] for row in json.loads(capsys.readouterr().out)["runs"]}
    assert list(found) == ["lru", "cost-aware (horizon=9.0, ghosts=0)", "cost-aware"]
    for name, horizon, ghosts in ((list(found)[1], 9.0, 0), ("cost-aware", 1.5, None)):
        sets = [f"evictor.options.horizon={horizon}", *([] if ghosts is None else [f"evictor.options.ghosts={ghosts}"])]
        assert main([*shared, "--evictor", "cost-aware", *(word for text in sets for word in ("--set", text))]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["evictions"] == found[name]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--evictor", 'lru,{name="fifo"'], "a quote or bracket has no partner"),
        (
            ["--evictor", "8"],
            "--evictor: evictor: 8 is not a plug-in: expected a name, or a table with name and options",
        ),
        (["--evictor", '{nam="lru"}'], "--evictor: unknown option 'evictor.nam'. Did you mean 'name'?"),
        (["--scheduler", '{name="fair",options={x=1}}'], "--scheduler: "),
        (["--evictor", '{name="s3fifo",options={small=0.5}}', *OPTION], "both have options of s3fifo"),
    ],
)
def test_a_part_that_is_named_wrongly_is_refused_by_the_flag_that_names_it(args, says, capsys):
    assert main(["replay", SMALL, "--blocks", "9", *args]) == 2
    assert says in capsys.readouterr().err


def test_the_options_of_the_evictor_that_is_run_are_used(capsys):
    run = [
        "replay",
        "synthetic:requests=200,seed=0",
        "--blocks",
        "10%",
        "--cache-only",
        "--json",
        "--evictor",
        "s3fifo",
    ]
    found = []
    for small in ("0.1", "0.9"):
        assert main([*run, "--set", f"evictor.options.small={small}"]) == 0
        found.append(json.loads(capsys.readouterr().out)["runs"][0]["evictions"])
    assert found[0] != found[1]


# ---------------------------------------------------------------- recurrent states


@pytest.mark.parametrize(("checkpoints", "cached"), [(None, [0, 36, 36]), (8, [0, 20, 36]), (0, [0, 0, 0])])
def test_a_model_with_states_hits_only_where_a_checkpoint_is(checkpoints, cached):
    trace = turns(*[[(7, 40)]] * 3)
    run = serve(trace, replace(SIZES, blocks=60, checkpoints=checkpoints), fcfs, lru)
    assert run.cached.tolist() == cached
