"""``minivllm bench``: what it measures but for ``profile``.  Parsing it imports nothing heavy."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli.common import load, open_llm
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.limits import EngineLimits
    from minivllm.lab.bench.workload import BenchAsk

COMPONENTS = {  # of ``bench memory``
    "weight_bytes": "weights",
    "kv_pool_bytes": "KV cache, reserved",
    "kv_peak_bytes": "KV cache, held at the peak",
    "rest_bytes": "activations and the rest",
    "process_before_bytes": "process before",
    "process_built_bytes": "process with the engine",
    "process_peak_bytes": "process at its peak",
    "device_peak_bytes": "device, allocated at the peak",
    "device_reserved_bytes": "device, reserved by torch",
    "device_used_bytes": "device, used by all",
}
VOCAB = 1000
IN_TURNS = "a run each in turns, by an engine made anew: for what drifts, and for how engines of one kind differ"
SHARE = 0.9  # of requests that have to meet their targets
TARGETS = ("ttft", "tpot", "e2el")
OWN_FILES = ("serve", "kernels", "batching")  # ``cli/bench_serve.py`` ...


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: want a positive number")
    return value


def none_or_more(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: want 0 or a positive number")
    return value


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: want a positive number")
    return value


def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values with commas between them."""
    return lambda text: [kind(one) for one in text.split(",")]


def target(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in TARGETS:
        raise argparse.ArgumentTypeError(f"{text}: want {', '.join(TARGETS)} and milliseconds, as ttft:200")
    return name, positive(value)


def repeat_flags(sub: argparse.ArgumentParser, repeats: int = 3, warmups: int = 1) -> None:
    sub.add_argument("--repeats", type=count, default=repeats, metavar="N", help=f"runs (default {repeats})")
    text = f"runs before them that are not counted (default {warmups})"
    sub.add_argument("--warmups", type=none_or_more, default=warmups, metavar="N", help=text)
    sub.add_argument("--output-json", default="", metavar="FILE", help="write the whole result, with every run")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")


def workload_flags(
    sub: argparse.ArgumentParser,
    prompts: int = 32,
    out: int = 32,
    ratio: float = 0.0,
    prefix: int = 0,
    seed: int | None = 0,
) -> None:
    """What is not given stays None until ``asks_of``: a file of requests leaves no use for most of it.  ``seed`` None:
    a command that has no --seed refuses it by itself, as argparse would take it for a shorter --seeds."""
    from_one: dict[str, Any] = dict(type=count, metavar="N")
    sub.add_argument("--num-prompts", help=f"requests of a run (default {prompts}; of a file all)", **from_one)
    sub.set_defaults(
        drawn={
            "num_prompts": prompts,
            "input_len": 64,
            "range_ratio": ratio,
            "prefix_len": prefix,
            "num_prefixes": 1,
            "output_len": out,
        }
    )
    sub.add_argument("--input-len", help="random tokens of a prompt (default 64)", **from_one)
    sub.add_argument("--output-len", help=f"tokens of an answer (default {out})", **from_one)
    text = f"lengths are uniform within this share of the given ones (default {ratio:g})"
    sub.add_argument("--range-ratio", type=float, metavar="R", help=text)
    text = f"tokens before each prompt that all have in common (default {prefix})"
    sub.add_argument("--prefix-len", type=none_or_more, metavar="N", help=text)
    text = "so many beginnings of --prefix-len tokens, of which each prompt has one (default 1)"
    sub.add_argument("--num-prefixes", help=text, **from_one)
    text = "requests to send instead: JSON lines with prompt, max_tokens, at (seconds), or a trace as simulate reads it"
    sub.add_argument("--dataset", default="", metavar="FILE", help=text)
    drawing_flags(sub, seed)


def drawing_flags(sub: argparse.ArgumentParser, seed: int | None = 0) -> None:
    text = f"token ids are below it (default {VOCAB}, or as many as the model has)"
    sub.add_argument("--vocab", type=count, metavar="N", help=text)
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    text = "of the first run; each has another" if seed is not None else argparse.SUPPRESS
    sub.add_argument("--seed", type=int, default=seed, metavar="N", help=text)


def add_commands(whats: Any, *parents: argparse.ArgumentParser) -> None:
    """Add them to ``bench``."""

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = whats.add_parser(name, help=text, description=text, parents=parents)
        sub.set_defaults(run=f"minivllm.cli.bench_{name if name in OWN_FILES else 'runs'}:{name}")
        return sub

    sub = add("latency", "One batch from its call to its last token, by prompt length and batch size.")
    sub.add_argument("--input-len", type=several(count), metavar="N,N", help="default 32")
    sub.add_argument("--output-len", type=count, metavar="N", help="tokens of an answer (default 128)")
    sub.add_argument("--batch-size", type=several(count), metavar="N,N", help="default 8")
    drawing_flags(sub)
    repeat_flags(sub, repeats=10, warmups=2)
    sub = add("throughput", "Tokens a second with all requests there at once.")
    workload_flags(sub, prompts=64)
    repeat_flags(sub)
    sub = add("serve", "Latencies and throughput under load: closed loop, open loop, the knee.")
    workload_flags(sub)
    sub.add_argument("--url", default="", help="of any server with OpenAI's /v1/completions; default: start one")
    sub.add_argument("--served-model", default="", metavar="NAME", help="to ask a server for (default: its first)")
    text = "name of an environment variable with the key of the server"
    sub.add_argument("--api-key-env", default="", metavar="NAME", help=text)
    text = "for a whole answer over HTTP (default 600); what takes longer has failed"
    sub.add_argument("--timeout", type=positive, metavar="S", help=text)
    sub.add_argument("--direct", action="store_true", help="no server: an engine in this process, without HTTP")
    text = "open loop: requests a second, arriving as a Poisson process; several: one run for each"
    sub.add_argument("--request-rate", type=several(positive), default=[], metavar="R,R", help=text)
    text = "gaps between arrivals have a Gamma distribution of this shape (default 1: Poisson)"
    sub.add_argument("--burstiness", type=positive, default=1.0, metavar="X", help=text)
    text = "requests at a time; without a rate a closed loop; several: one run for each"
    sub.add_argument("--max-concurrency", type=several(count), default=[], metavar="N,N", help=text)
    sub.add_argument("--find-knee", action="store_true", help="search the highest rate that is kept up with")
    text = "latency targets, as ttft:200 tpot:50: answers a second that meet them"
    sub.add_argument("--goodput", type=target, nargs="+", default=[], metavar="NAME:MS", help=text)
    text = "of the requests must meet the targets for a rate to be kept up with (default 0.9)"
    sub.add_argument("--goodput-share", type=positive, default=SHARE, metavar="X", help=text)
    repeat_flags(sub)
    sub = add("memory", "Bytes of weights, KV cache and the rest, with their peaks.")
    workload_flags(sub)
    repeat_flags(sub, repeats=1, warmups=0)
    sub = add("startup", "Seconds from nothing to a first token, each run in a process of its own.")
    repeat_flags(sub)
    _batching_flags(add("batching", "Ways to form batches over arrival rates: static, timeout, continuous, adaptive."))
    _kernel_flags(add("kernels", "Each operation of a step beside its floor (memory, arithmetic) and torch's own."))


def _batching_flags(sub: argparse.ArgumentParser) -> None:
    text = "requests a second, arriving as a Poisson process (default 4,8,16,32)"
    sub.add_argument("--request-rate", type=several(positive), default=[4.0, 8.0, 16.0, 32.0], metavar="R,R", help=text)
    sub.add_argument("--batch", type=count, metavar="N", help="requests of a batch (default 8)")
    text = "that a batch may take to fill where it has a timeout (default 50)"
    sub.add_argument("--timeout-ms", type=positive, default=50.0, metavar="MS", help=text)
    text = "other scheduling policies to measure too, by name"
    sub.add_argument("--policy", type=several(str), default=[], metavar="NAME,NAME", help=text)
    workload_flags(sub, prompts=40, ratio=0.5)
    text = "all engines (one a policy) at once, a run each in turns: what drifts does so for all; needs memory for all"
    sub.add_argument("--in-turns", action="store_true", help=text)
    repeat_flags(sub)


def _kernel_flags(sub: argparse.ArgumentParser) -> None:
    text = "rows of a decode step (default 1,8)"
    sub.add_argument("--batch-size", type=several(count), metavar="N,N", help=text)
    text = "tokens of each of these rows (default 256)"
    sub.add_argument("--context-len", type=several(count), metavar="N,N", help=text)
    text = "tokens of a prompt that a step computes (default 128)"
    sub.add_argument("--input-len", type=several(count), metavar="N,N", help=text)
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the operands")
    repeat_flags(sub, repeats=5)


# ---- what they share -------------------------------------------------------------------------------------------------


def asks_of(args: argparse.Namespace, limits: EngineLimits | None) -> Callable[[int], Sequence[BenchAsk]]:
    """Return a function from a seed to the requests of its run; requests of a file are the same for each seed.

    ``limits`` are of the engine that answers, None for a server whose limits are unknown.  Sizes that no flag gives
    shrink to them.  ConfigError for flags that contradict each other or exceed the limits.
    """
    from minivllm.lab.bench import workload

    if args.vocab is not None and limits is not None and args.vocab > limits.vocab:
        raise ConfigError(f"--vocab {args.vocab}: the model has {limits.vocab} tokens; want at most as many")
    vocab = args.vocab or min(VOCAB, limits.vocab if limits is not None else VOCAB)
    if args.dataset:
        return _of_file(args, limits, vocab)
    args.vocab = vocab
    given = {key: getattr(args, key) for key in args.drawn}
    for key, value in args.drawn.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if not 0 <= args.range_ratio <= 1:
        raise ConfigError(f"--range-ratio {args.range_ratio:g}: want 0 to 1")
    if args.num_prefixes > 1 and not args.prefix_len:
        raise ConfigError(f"--num-prefixes {args.num_prefixes}: of no tokens; want --prefix-len N too")
    if limits is not None:
        shrink(args, given, limits)
    return workload.Generated(
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.range_ratio,
        args.prefix_len,
        args.num_prefixes,
        args.vocab,
    ).asks


def _of_file(args: argparse.Namespace, limits: EngineLimits | None, vocab: int) -> Callable[[int], Sequence[BenchAsk]]:
    """Return the requests of ``--dataset``, a file of prompts or a trace, for any seed."""
    from minivllm.lab.bench import workload

    trace = workload.names_trace(args.dataset)
    random_only = ("input_len", "range_ratio", "prefix_len", "num_prefixes")
    refused = (*random_only, "output_len") if trace else (*random_only, "vocab")
    if given := [key for key in refused if getattr(args, key) is not None]:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        what = "the trace says that" if trace else "random requests have that, and --dataset gives others"
        raise ConfigError(f"{flags}: {what}; leave out either")
    if args.output_len is None:
        args.output_len = args.drawn["output_len"]
    if not trace:
        found = workload.read(args.dataset, args.output_len)[: args.num_prompts]
        return lambda seed: found
    asked, left_out = workload.of_trace(args.dataset, vocab, limits.tokens if limits is not None else None)
    if left_out:
        what = f"{left_out} of {left_out + len(asked)} requests"
        print(
            f"minivllm: {args.dataset}: {what} need more than {limits.tokens if limits else 0} tokens, the most that a "
            "request of this configuration may have, and are left out",
            file=sys.stderr,
        )
    found = asked[: args.num_prompts]
    return lambda seed: found


def shrink(args: argparse.Namespace, given: Mapping[str, Any], limits: EngineLimits) -> None:
    """Scale the lengths in ``args`` that are not ``given`` until the longest request fits; report it on stderr."""
    from minivllm.lab.bench.limits import fitted

    names = ("input_len", "output_len", "prefix_len")

    def longest(sizes: Mapping[str, int]) -> int:
        most = [max(1, round(sizes[name] * (1 + args.range_ratio))) for name in ("input_len", "output_len")]
        return sum(most) + sizes["prefix_len"]

    def refusal(sizes: Mapping[str, int]) -> str:
        flags = ", ".join(f"--{name.replace('_', '-')} {sizes[name]}" for name in names)
        what = f"{flags} make requests of up to {longest(sizes)} tokens"
        return f"{what}, and max_model_len and the KV cache allow {limits.tokens}; lower them, or raise max_model_len"

    least = {"input_len": 1, "output_len": 1, "prefix_len": int(args.num_prefixes > 1)}
    own = {name: given[name] for name in names}
    defaults = {name: args.drawn[name] for name in names}
    sizes = fitted(own, defaults, least, lambda sizes: longest(sizes) <= limits.tokens, refusal)
    if smaller := [name for name in names if own[name] is None and sizes[name] < defaults[name]]:
        texts = [f"--{name.replace('_', '-')} {sizes[name]} (not {defaults[name]})" for name in smaller]
        say_smaller(texts, f"a request of this configuration may have {limits.tokens} tokens")
    for name, value in sizes.items():
        setattr(args, name, value)


def say_smaller(texts: Sequence[str], why: str) -> None:
    """Report defaults that were lowered for a small engine on stderr."""
    print(f"minivllm: {', '.join(texts)}: {why}", file=sys.stderr)


def workload_text(args: argparse.Namespace, asks: Sequence[BenchAsk]) -> str:
    """Return the requests of an offline run in a line."""
    drawn = f"temperature {args.temperature:g}"
    if args.dataset:
        timed = " (all at once: arrival times are not used)" if any(ask.at is not None for ask in asks) else ""
        return f"{len(asks)} requests of {args.dataset}{timed}, {drawn}"
    spread = f" (within {100 * args.range_ratio:g} %)" if args.range_ratio else ""
    common = f", {args.prefix_len} more in common" if args.prefix_len else ""
    common = f", behind one of {args.num_prefixes} prefixes of {args.prefix_len}" if args.num_prefixes > 1 else common
    sizes = f"{args.input_len} random tokens{common}, {args.output_len} out{spread}"
    return f"{len(asks)} requests of {sizes}, {drawn}"


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, in the result."""
    outside = ("run", "debug", "json", "output_json", "config", "set", "allow_target", "drawn")
    return {key: value for key, value in sorted(vars(args).items()) if key not in outside}


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Before the work: can the result be written?"""
    if args.output_json:
        files.check_output(args.output_json)
    return args


def tell(found: dict[str, Any], args: argparse.Namespace, text: str) -> int:
    from minivllm.lab.bench import repeats

    if args.output_json:
        repeats.write(args.output_json, found)
    print(repeats.dumps(found) if args.json else text)
    return 0


def progress(text: str) -> None:
    """What has been done, for who waits at a terminal."""
    if sys.stderr.isatty():
        print(f"minivllm: {text}", file=sys.stderr)


def bill_of(llm: Any, args: argparse.Namespace) -> Any:
    """What was wired, where somebody will read it: to hash the sources takes a moment."""
    return llm.bill_of_materials() if args.json or args.output_json else None


def planned_bill(loaded: Loaded, args: argparse.Namespace) -> Any:
    """The same of an engine that runs elsewhere with this configuration."""
    return bill_planned(loaded) if args.json or args.output_json else None


def bill_planned(loaded: Loaded) -> dict[str, Any]:
    """The bill of materials of a configuration before an engine is built."""
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.frontend.record import bill
    from minivllm.registry import Catalog

    return bill.make(resolve(loaded.engine, Catalog.discover(), loaded.origins), loaded)


def energy_line(found: dict[str, Any], states: Sequence[dict[str, Any]]) -> str:
    from minivllm.lab.bench.repeats import with_bounds

    if found.get("joules_per_output_token") is None:
        return f"energy: unknown: {states[-1].get('energy_unknown', 'no counter') if states else 'nothing was run'}"
    return f"energy: {with_bounds(found, 'joules_per_output_token', 4)} J a token ({states[-1]['energy_by']})"


def machine_line(states: Sequence[dict[str, Any]]) -> str:
    """What may have disturbed the runs."""
    parts = []
    others = [state["cores_of_others"] for state in states if state.get("cores_of_others") is not None]
    if others:
        parts.append(f"others used {max(others):.2f} cores at most")
    clocks = [state["mhz"] for state in states if state.get("mhz")]
    if clocks:
        parts.append(f"clock {min(clocks):.0f} to {max(clocks):.0f} MHz, {states[-1]['watts']:.0f} W")
    if slowed := sorted({word for state in states for word in state.get("throttled_by", ())}):
        parts.append(f"slowed by {', '.join(slowed)}")
    return "machine: " + "; ".join(parts or ["nothing is known of it"])


def watch_of(config: Any, device: str, pid: int | None = None) -> Callable[[], Any]:
    """Makes a ``state.MachineWatch`` of the devices that an engine of this configuration uses."""
    from minivllm.lab.bench import state

    return functools.partial(state.MachineWatch, device, pid, config.tensor_parallel_size)


def head(llm_or_loaded: Any, what: str) -> str:
    config = getattr(llm_or_loaded, "config", None) or llm_or_loaded.engine
    wiring = getattr(getattr(llm_or_loaded, "engine", None), "wiring", None)
    where = f" on {wiring.device}, {wiring.dtype}" if wiring is not None else ""
    return f"{config.model}{where}: {what}"


# ---- in this process -------------------------------------------------------------------------------------------------


def latency(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.limits import of_engine
    from minivllm.lab.bench.workload import Generated

    loaded = load(checked(args))
    rows: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    with open_llm(loaded, args) as llm:
        watch = watch_of(llm.config, llm.engine.wiring.device)
        _fit_latency(args, of_engine(llm))
        for length in args.input_len:
            for batch in args.batch_size:
                asked = Generated(batch, length, args.output_len, vocab=args.vocab)
                once = functools.partial(offline.latency, llm, batch, asked, args.temperature)
                found, seen = offline.repeated(once, args.warmups, args.repeats, args.seed, watch)
                merged = repeats.merged(found)
                rows.append({"input_len": length, "batch_size": batch, **merged, **offline.latencies(found)})
                runs, states = [*runs, *found], [*states, *seen]
        whole = repeats.result("latency", runs, states, settings(args), bill_of(llm, args), rows=rows)
        title = head(llm, f"{args.output_len} tokens out, {args.repeats} runs; median ± half the 95 % interval")
    whole |= {key: rows[0][key] for key in ("avg_latency", "latencies", "percentiles")} if len(rows) == 1 else {}
    lines = [title, f"{'prompt':>6} {'batch':>6} {'latency ms':>16} {'p99':>9} {'TTFT ms':>16} {'TPOT ms':>16}"]
    for row in rows:
        in_ms = {
            "latency": 1e3 * row["latency"],
            "intervals": {k: [1e3 * x for x in v] for k, v in row["intervals"].items()},
        }
        times = [repeats.with_bounds(row, f"median_{name}_ms", 2) for name in ("ttft", "tpot")]
        lines.append(
            f"{row['input_len']:>6} {row['batch_size']:>6} {repeats.with_bounds(in_ms, 'latency'):>16} "
            f"{row['p99_e2el_ms']:>9.1f} {times[0]:>16} {times[1]:>16}"
        )
    return tell(whole, args, "\n".join([*lines, energy_line(whole, states), machine_line(states)]))


def _fit_latency(args: argparse.Namespace, limits: EngineLimits) -> None:
    """Fill in the sizes of ``bench latency`` that no flag gives.  ConfigError if those given do not fit."""
    from minivllm.lab.bench.limits import fitted

    if args.vocab is not None and args.vocab > limits.vocab:
        raise ConfigError(f"--vocab {args.vocab}: the model has {limits.vocab} tokens; want at most as many")
    args.vocab = args.vocab or min(VOCAB, limits.vocab)
    if args.batch_size is None:
        args.batch_size = [min(8, limits.rows)]
    if max(args.batch_size) > limits.rows:
        raise ConfigError(f"--batch-size {max(args.batch_size)} is more than max_num_seqs={limits.rows}; lower it")
    given = {"input_len": max(args.input_len) if args.input_len else None, "output_len": args.output_len}
    defaults, least = {"input_len": 32, "output_len": 128}, {"input_len": 1, "output_len": 1}

    def refusal(sizes: Mapping[str, int]) -> str:
        flags = f"--input-len {sizes['input_len']} and --output-len {sizes['output_len']}"
        have = f"and a request of this configuration may have {limits.tokens}; lower them, or raise max_model_len"
        return f"{flags} are {sum(sizes.values())} tokens, {have}"

    sizes = fitted(given, defaults, least, lambda sizes: sum(sizes.values()) <= limits.tokens, refusal)
    smaller = [name for name, value in given.items() if value is None and sizes[name] < defaults[name]]
    if smaller:
        texts = [f"--{name.replace('_', '-')} {sizes[name]} (not {defaults[name]})" for name in smaller]
        say_smaller(texts, f"a request of this configuration may have {limits.tokens} tokens")
    args.input_len, args.output_len = args.input_len or [sizes["input_len"]], sizes["output_len"]


def throughput(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.limits import of_engine
    from minivllm.runtime.hooks import figures

    with open_llm(load(checked(args)), args) as llm:
        asks = asks_of(args, of_engine(llm))
        watch = watch_of(llm.config, llm.engine.wiring.device)

        def once(seed: int) -> dict[str, Any]:
            found = offline.throughput(llm, asks(seed), args.temperature, seed)
            return {key: value for key, value in found.items() if key != "token_ids"}

        runs, states = offline.repeated(once, args.warmups, args.repeats, args.seed, watch)
        found = repeats.result("throughput", runs, states, settings(args), bill_of(llm, args))
        title = head(llm, f"{found['num_requests']} requests, {args.repeats} runs; median ± half the 95 % interval")
    shown_ = functools.partial(repeats.with_bounds, found)
    lines = [
        title,
        f"throughput   {shown_('output_throughput')} output tokens/s, {shown_('total_token_throughput')} tokens/s, "
        f"{shown_('request_throughput', 2)} requests/s",
        f"tokens       {found['total_input_tokens']} in, {found['total_output_tokens']} out "
        f"in {found['duration']:.2f} s",
        f"latency ms   first token {shown_('median_ttft_ms')}, per token {shown_('median_tpot_ms', 2)}, "
        f"99th percentile of a request {shown_('p99_e2el_ms')}",
        *([f"drafts       {100 * found['draft_acceptance']:.1f} % accepted"] if "draft_acceptance" in found else []),
        *([f"figures      {own}"] if (own := figures.text(found)) else []),
        energy_line(found, states),
        machine_line(states),
    ]
    return tell(found, args, "\n".join(lines))


def memory(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import limits, offline, repeats

    loaded = load(checked(args))
    asks = asks_of(args, limits.planned(loaded))
    importlib.import_module("minivllm.frontend.llm")  # torch and what else is imported belongs to no component

    def work(llm: Any) -> None:
        offline.generate(llm, asks(args.seed), args.temperature, args.seed)

    turns = args.warmups + args.repeats
    runs = [offline.memory(lambda: open_llm(loaded, args), work) for _ in range(turns)][args.warmups :]
    found = repeats.result("memory", runs, [{}] * len(runs), settings(args), planned_bill(loaded, args))
    lines = [f"{text:32} {found[key] / 2**20:10.1f} MiB" for key, text in COMPONENTS.items() if key in found]
    return tell(found, args, "\n".join([head(loaded, f"{len(asks(args.seed))} requests"), *lines]))


def startup(args: argparse.Namespace) -> int:
    from minivllm.lab.bench import repeats, state
    from minivllm.lab.bench import startup as starts

    loaded = load(checked(args))
    runs, states = [], []
    for turn in range(args.warmups + args.repeats):
        with state.MachineWatch() as watch:
            found = starts.once(loaded)
        if turn >= args.warmups:
            runs.append(found)
            states.append(watch.found)
    whole = repeats.result("startup", runs, states, settings(args), planned_bill(loaded, args))
    names = {"import_s": "imports", "build_s": "engine", "first_token_s": "first token", "startup_s": "altogether"}
    lines = [f"{text:12} {repeats.with_bounds(whole, key, 3)} s" for key, text in names.items()]
    return tell(whole, args, "\n".join([head(loaded, f"{args.repeats} starts"), *lines, machine_line(states)]))
