"""The flags of ``minivllm bench``, and its measurements ``latency``, ``throughput``, ``memory`` and ``startup``.

Importing this module imports no large package, because every ``minivllm`` command imports it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.cli.common import JsonObject, add_switch, add_value, load, open_llm, report
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.lab.bench.limits import EngineLimits
    from minivllm.lab.bench.workload import BenchAsk

    RequestsBySeed = Callable[[int], Sequence[BenchAsk]]  # function from a seed to the requests of a run

COMPONENTS = {  # figures of ``bench memory``, in the order of the printed rows
    "weight_bytes": "weights",
    "kv_pool_bytes": "KV cache, reserved",
    "kv_peak_bytes": "KV cache, held at the peak",
    "state_bytes": "recurrent states, reserved",
    "state_bytes_per_request": "recurrent state of a request",
    "rest_bytes": "activations and the rest",
    "process_before_bytes": "process before",
    "process_built_bytes": "process with the engine",
    "process_peak_bytes": "process at its peak",
    "device_peak_bytes": "device, allocated at the peak",
    "device_reserved_bytes": "device, reserved by torch",
    "device_used_bytes": "device, used by all",
}
VOCAB = 1000  # random prompts use token ids below this number, so that models of all sizes have the same prompts
IN_TURNS = "alternate between the engines, one run each, and build a new engine for each run: evens out drift"
SHARE = 0.9  # default share of requests that must meet the latency targets
TARGETS = ("ttft", "tpot", "e2el")
# measurements whose function is in a module of its own, ``cli/bench_NAME.py``
OWN_FILES = ("serve", "kernels", "batching")
DRAWN = {  # sizes of random requests by default; a command may replace some of them
    "num_prompts": 32,
    "input_len": 64,
    "range_ratio": 0.0,
    "prefix_len": 0,
    "num_prefixes": 1,
    "output_len": 32,
}
LENGTHS = ("input_len", "output_len", "prefix_len")


def count(text: str) -> int:
    """Return the whole number, at least 1, in a flag's text.

    ArgumentTypeError for a smaller number, and ValueError for another text."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: expected a whole number of at least 1")
    return value


def non_negative(text: str) -> int:
    """Return the whole number, at least 0, in a flag's text.

    ArgumentTypeError for a smaller number, and ValueError for another text."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value}: expected a whole number of at least 0")
    return value


def positive(text: str) -> float:
    """Return the finite number above 0 in a flag's text.

    ArgumentTypeError for any other number, including nan and inf, and ValueError for a text that is no number."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is out of range: expected a finite number above 0")
    return value


def comma_list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a function that reads a comma-separated flag, with ``kind`` applied to each item."""
    return lambda text: [kind(item) for item in text.split(",")]


def target(text: str) -> tuple[str, float]:
    """Return the name and the milliseconds of a latency target, written ``ttft:200``.

    ArgumentTypeError for an unknown name, and for milliseconds that are not finite and above 0."""
    name, _, value = text.partition(":")
    if name not in TARGETS:
        names = ", ".join(TARGETS)
        raise argparse.ArgumentTypeError(f"{text}: expected one of {names} and milliseconds, such as ttft:200")
    return name, positive(value)


def output_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags that print or write the result as JSON."""
    add_value(sub, "--output-json", str, "FILE", "write the whole result, with every run", "")
    add_switch(sub, "--json", "print the result as JSON")


def repeat_flags(sub: argparse.ArgumentParser, repeats: int = 3, warmups: int = 1) -> None:
    """Add the flags for the number of runs and of warm-up runs, and for the output of the result."""
    add_value(sub, "--repeats", count, "N", f"runs (default {repeats})", repeats)
    text = f"warm-up runs, which are not counted (default {warmups})"
    add_value(sub, "--warmups", non_negative, "N", text, warmups)
    output_flags(sub)


def workload_flags(sub: argparse.ArgumentParser, *, seed: int | None = 0, **defaults: float) -> None:
    """Add the flags that describe the requests to send.  ``defaults`` replace values of ``DRAWN``.

    A flag that the user leaves out stays None until ``requests_by_seed``, which fills in the default: with a file of
    requests most of these flags are refused.  ``seed`` None is for a command that reads --seeds and refuses --seed.
    The flag exists there too, because argparse would otherwise accept --seed as a short form of --seeds.
    """
    drawn = {**DRAWN, **defaults}
    sub.set_defaults(drawn=drawn)
    text = f"requests of a run (default {drawn['num_prompts']}; with --dataset all of the file)"
    add_value(sub, "--num-prompts", count, "N", text)
    add_value(sub, "--input-len", count, "N", "random tokens of a prompt (default 64)")
    text = f"tokens of an answer (default {drawn['output_len']})"
    add_value(sub, "--output-len", count, "N", text)
    text = f"draw lengths uniformly within this share of --input-len, --output-len (default {drawn['range_ratio']:g})"
    add_value(sub, "--range-ratio", float, "R", text)
    text = f"tokens of a prefix that all prompts share (default {drawn['prefix_len']})"
    add_value(sub, "--prefix-len", non_negative, "N", text)
    text = "number of different prefixes of --prefix-len tokens; each prompt begins with one of them (default 1)"
    add_value(sub, "--num-prefixes", count, "N", text)
    text = "requests to send instead: JSON lines with prompt, max_tokens, at (seconds), or a trace as simulate reads it"
    add_value(sub, "--dataset", str, "FILE", text, "")
    drawing_flags(sub, seed)


def drawing_flags(sub: argparse.ArgumentParser, seed: int | None = 0) -> None:
    """Add the flags for the random numbers of prompts and samplers.  ``seed`` None hides --seed from the help."""
    text = f"draw token ids below N (default {VOCAB}, or the size of a smaller vocabulary)"
    add_value(sub, "--vocab", count, "N", text)
    add_value(sub, "--temperature", float, "T", "default 0", 0.0)
    text = "seed of the first run; later runs add 1, 2, ..." if seed is not None else argparse.SUPPRESS
    add_value(sub, "--seed", int, "N", text, seed)


def add_commands(verbs: Any, *parents: argparse.ArgumentParser) -> None:
    """Add the measurements of ``bench`` to ``verbs``, its subparsers.  Each gets the flags of ``parents``."""

    def add(name: str, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text, parents=parents)
        module = name if name in OWN_FILES else "runs"
        sub.set_defaults(run=f"minivllm.cli.bench_{module}:{name}")
        return sub

    sub = add("latency", "Time one batch from its call to its last token, by prompt length and batch size.")
    add_value(sub, "--input-len", comma_list(count), "N,N", "default 32")
    add_value(sub, "--output-len", count, "N", "tokens of an answer (default 128)")
    add_value(sub, "--batch-size", comma_list(count), "N,N", "default 8")
    drawing_flags(sub)
    repeat_flags(sub, repeats=10, warmups=2)
    sub = add("throughput", "Count tokens a second when all requests are present from the start.")
    workload_flags(sub, num_prompts=64)
    repeat_flags(sub)
    _serve_flags(add("serve", "Measure latency and throughput under load: closed loop, open loop, the knee."))
    sub = add("memory", "Count the bytes of weights, KV cache and the rest, with their peaks.")
    workload_flags(sub)
    repeat_flags(sub, repeats=1, warmups=0)
    sub = add("startup", "Count the seconds from process start to a first token; each run is a new process.")
    repeat_flags(sub)
    text = "Compare ways to form batches over arrival rates: static, timeout, continuous, adaptive."
    _batching_flags(add("batching", text))
    text = "Time each operation of a step; compare it with its lower bound (memory, arithmetic) and with torch."
    _kernel_flags(add("kernels", text))


def _serve_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench serve``."""
    workload_flags(sub)
    text = "URL of any server with OpenAI's /v1/completions; default: start minivllm's server"
    sub.add_argument("--url", default="", help=text)
    text = "model to request from --url (default: the first that the server lists)"
    add_value(sub, "--served-model", str, "NAME", text, "")
    text = "name of an environment variable with the API key of --url"
    add_value(sub, "--api-key-env", str, "NAME", text, "")
    text = "seconds for a whole answer over HTTP (default 600); a request that takes longer has failed"
    add_value(sub, "--timeout", positive, "S", text)
    add_switch(sub, "--direct", "no server: an engine in this process, without HTTP")
    text = "open loop: requests a second, arriving as a Poisson process; several values: one measurement each"
    add_value(sub, "--request-rate", comma_list(positive), "R,R", text, [])
    text = "gaps between arrivals have a Gamma distribution of this shape (default 1: Poisson)"
    add_value(sub, "--burstiness", positive, "X", text, 1.0)
    text = "most concurrent requests; without --request-rate a closed loop; several values: one measurement each"
    add_value(sub, "--max-concurrency", comma_list(count), "N,N", text, [])
    text = "search the knee: the highest request rate at which answers keep up with arrivals"
    add_switch(sub, "--find-knee", text)
    text = "latency targets, such as ttft:200 tpot:50; the result counts the answers a second that meet them"
    sub.add_argument("--goodput", type=target, nargs="+", default=[], metavar="NAME:MS", help=text)
    text = "with --find-knee: share of the requests that must meet the targets (default 0.9)"
    add_value(sub, "--goodput-share", positive, "X", text, SHARE)
    repeat_flags(sub)


def _batching_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench batching``."""
    rates = [4.0, 8.0, 16.0, 32.0]
    text = "requests a second, arriving as a Poisson process (default 4,8,16,32)"
    add_value(sub, "--request-rate", comma_list(positive), "R,R", text, rates)
    add_value(sub, "--batch", count, "N", "requests of a batch (default 8)")
    text = "milliseconds that the timeout policy waits for a full batch (default 50)"
    add_value(sub, "--timeout-ms", positive, "MS", text, 50.0)
    text = "more scheduling policies to measure, by name"
    add_value(sub, "--policy", comma_list(str), "NAME,NAME", text, [])
    workload_flags(sub, num_prompts=40, range_ratio=0.5)
    text = "keep the engines of all policies in memory and alternate between them, one run each: evens out drift"
    add_switch(sub, "--in-turns", text)
    repeat_flags(sub)


def _kernel_flags(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench kernels``."""
    text = "rows of a decode step (default 1,8)"
    add_value(sub, "--batch-size", comma_list(count), "N,N", text)
    text = "tokens of context of each decode row (default 256)"
    add_value(sub, "--context-len", comma_list(count), "N,N", text)
    text = "prompt tokens of a prefill step (default 128)"
    add_value(sub, "--input-len", comma_list(count), "N,N", text)
    add_value(sub, "--seed", int, "N", "seed of the random operands", 0)
    repeat_flags(sub, repeats=5)


# ---- shared by the measurements --------------------------------------------------------------------------------------


def requests_by_seed(args: argparse.Namespace, limits: EngineLimits | None) -> RequestsBySeed:
    """Return a function from a seed to the requests of its run; the requests of a file are the same for each seed.

    ``limits`` are those of the engine that answers; None stands for a server with unknown limits.  Sizes that the user
    left out shrink to the limits and are written into ``args``.  ConfigError for flags that contradict each other or
    exceed the limits.
    """
    from minivllm.lab.bench import workload

    check_vocab(args, limits)
    vocab = args.vocab or VOCAB
    if limits is not None:
        vocab = min(vocab, limits.vocab)
    if args.dataset:
        return _file_requests(args, limits, vocab)
    args.vocab = vocab
    chosen = {key: getattr(args, key) for key in args.drawn}
    for key, value in args.drawn.items():
        if chosen[key] is None:
            setattr(args, key, value)
    if not 0 <= args.range_ratio <= 1:
        raise ConfigError(f"--range-ratio {args.range_ratio:g}: expected 0 to 1")
    if args.num_prefixes > 1 and not args.prefix_len:
        raise ConfigError(f"--num-prefixes {args.num_prefixes}: prefixes need a length; add --prefix-len N")
    if limits is not None:
        shrink(args, chosen, limits)
    drawn = workload.Generated(
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.range_ratio,
        args.prefix_len,
        args.num_prefixes,
        args.vocab,
    )
    return drawn.asks


def check_vocab(args: argparse.Namespace, limits: EngineLimits | None) -> None:
    """Raise ConfigError if ``--vocab`` is more than the vocabulary of the model."""
    if args.vocab is not None and limits is not None and args.vocab > limits.vocab:
        raise ConfigError(f"--vocab {args.vocab}: the model has {limits.vocab} tokens; expected at most as many")


def _file_requests(args: argparse.Namespace, limits: EngineLimits | None, vocab: int) -> RequestsBySeed:
    """Return a function from any seed to the requests of ``--dataset``, a file of prompts or a trace.  ConfigError for
    a flag that has no meaning with such a file."""
    from minivllm.lab.bench import workload

    trace = workload.names_trace(args.dataset)
    random_only = ("input_len", "range_ratio", "prefix_len", "num_prefixes")
    refused = (*random_only, "output_len") if trace else (*random_only, "vocab")
    if unused := [key for key in refused if getattr(args, key) is not None]:
        reason = "the trace says that" if trace else "random requests have that, and --dataset gives others"
        raise ConfigError(f"{', '.join(map(flag_of, unused))}: {reason}; leave out either")
    if args.output_len is None:
        args.output_len = args.drawn["output_len"]
    if trace:
        most_tokens = limits.tokens if limits is not None else None
        requests, left_out = workload.of_trace(args.dataset, vocab, most_tokens)
        if left_out:
            total = left_out + len(requests)
            report(
                f"{args.dataset}: {left_out} of {total} requests need more than {most_tokens or 0} tokens, "
                "the most that a request of this configuration may have, and are left out"
            )
    else:
        requests = workload.read(args.dataset, args.output_len)
    sent = requests[: args.num_prompts]
    return lambda seed: sent


def flag_of(name: str) -> str:
    """Return the flag of an attribute of the parsed arguments: ``--input-len`` for ``input_len``."""
    return f"--{name.replace('_', '-')}"


def shrink(args: argparse.Namespace, chosen: Mapping[str, Any], limits: EngineLimits) -> None:
    """Scale down the lengths that the user left out (None in ``chosen``) until the longest request fits the engine.

    The new lengths are written into ``args`` and reported on standard error.  ConfigError if the lengths of the user
    do not fit.
    """
    from minivllm.lab.bench.limits import fitted

    def longest(sizes: Mapping[str, int]) -> int:
        spread = 1 + args.range_ratio
        prompt = max(1, round(sizes["input_len"] * spread))
        answer = max(1, round(sizes["output_len"] * spread))
        return prompt + answer + sizes["prefix_len"]

    def fits(sizes: Mapping[str, int]) -> bool:
        return longest(sizes) <= limits.tokens

    def refusal(sizes: Mapping[str, int]) -> str:
        flags = ", ".join(f"{flag_of(name)} {sizes[name]}" for name in LENGTHS)
        need = f"{flags} make requests of up to {longest(sizes)} tokens"
        return f"{need}, and max_model_len and the KV cache allow {limits.tokens}; lower them, or raise max_model_len"

    least_prefix = 1 if args.num_prefixes > 1 else 0
    least = {"input_len": 1, "output_len": 1, "prefix_len": least_prefix}
    fixed = {name: chosen[name] for name in LENGTHS}
    defaults = {name: args.drawn[name] for name in LENGTHS}
    sizes = fitted(fixed, defaults, least, fits, refusal)
    report_smaller(fixed, sizes, defaults, f"a request of this configuration may have {limits.tokens} tokens")
    for name, value in sizes.items():
        setattr(args, name, value)


def report_smaller(
    chosen: Mapping[str, Any], sizes: Mapping[str, int], defaults: Mapping[str, int], reason: str
) -> None:
    """Report on standard error each size that is below its default, with the reason.

    Sizes that the user chose are not reported.
    """
    smaller = [name for name, value in chosen.items() if value is None and sizes[name] < defaults[name]]
    if smaller:
        texts = [f"{flag_of(name)} {sizes[name]} (not {defaults[name]})" for name in smaller]
        report(f"{', '.join(texts)}: {reason}")


def workload_text(args: argparse.Namespace, requests: Sequence[BenchAsk]) -> str:
    """Return a line of text that describes the requests of a measurement."""
    temperature = f"temperature {args.temperature:g}"
    if args.dataset:
        timed = any(request.at is not None for request in requests)
        note = " (all at once: arrival times are not used)" if timed else ""
        return f"{len(requests)} requests of {args.dataset}{note}, {temperature}"
    prefix = ""
    if args.num_prefixes > 1:
        prefix = f", behind one of {args.num_prefixes} prefixes of {args.prefix_len}"
    elif args.prefix_len:
        prefix = f", {args.prefix_len} more in common"
    spread = f" (within {100 * args.range_ratio:g} %)" if args.range_ratio else ""
    sizes = f"{args.input_len} random tokens{prefix}, {args.output_len} out{spread}"
    return f"{len(requests)} requests of {sizes}, {temperature}"


def settings(args: argparse.Namespace) -> JsonObject:
    """Return the flags of a measurement by name, for the result."""
    outside = ("run", "debug", "json", "output_json", "config", "set", "allow_target", "drawn")
    return {key: value for key, value in sorted(vars(args).items()) if key not in outside}


def check_output(args: argparse.Namespace) -> None:
    """Raise ConfigError if the file of ``--output-json`` cannot be written, before the measurement begins."""
    if args.output_json:
        files.check_output(args.output_json)


def print_result(
    result: JsonObject, args: argparse.Namespace, lines: Sequence[str], states: Sequence[JsonObject] = ()
) -> int:
    """Print a result as text or as JSON, write the file of ``--output-json``, and return exit code 0.

    The text ends with the energy and the state of the machine if there are ``states`` of it.
    """
    from minivllm.lab.bench import repeats

    if args.output_json:
        repeats.write(args.output_json, result)
    if states:
        lines = [*lines, energy_line(result, states), machine_line(states)]
    print(repeats.dumps(result) if args.json else "\n".join(lines))
    return 0


def progress(text: str) -> None:
    """Print a line about finished work to standard error if that is a terminal."""
    if sys.stderr.isatty():
        report(f"{text}")


def bill_of(llm: Any, args: argparse.Namespace) -> Any:
    """Return the bill of materials (versions and hashes of all parts) of an engine.

    It is None for a result that is printed as text, which does not show it: hashing the sources for it takes a moment.
    """
    return llm.bill_of_materials() if args.json or args.output_json else None


def planned_bill(loaded: Loaded, args: argparse.Namespace) -> Any:
    """Return the bill of materials of an engine in another process; None for a result that is printed as text."""
    return bill_of_config(loaded) if args.json or args.output_json else None


def bill_of_config(loaded: Loaded) -> JsonObject:
    """Return the bill of materials of a configuration without building an engine."""
    from minivllm.device.hardware import prepare_environment

    prepare_environment()
    from minivllm.config.resolve import resolve
    from minivllm.frontend.record import bill
    from minivllm.registry import Catalog

    return bill.make(resolve(loaded.engine, Catalog.discover(), loaded.origins), loaded)


def energy_line(result: JsonObject, states: Sequence[JsonObject]) -> str:
    """Return a line with the joules per token, or with the reason why they are unknown."""
    from minivllm.lab.bench.repeats import with_bounds

    if result.get("joules_per_output_token") is not None:
        joules = with_bounds(result, "joules_per_output_token", 4)
        return f"energy: {joules} J a token ({states[-1]['energy_by']})"
    if not states:
        return "energy: unknown: nothing was run"
    return f"energy: unknown: {states[-1].get('energy_unknown', 'no counter')}"


def machine_line(states: Sequence[JsonObject]) -> str:
    """Return a line about foreign load, clock rates and throttling of the machine during the runs."""
    parts = []
    others = [state["cores_of_others"] for state in states if state.get("cores_of_others") is not None]
    if others:
        parts.append(f"others used {max(others):.2f} cores at most")
    clocks = [state["mhz"] for state in states if state.get("mhz")]
    if clocks:
        parts.append(f"clock {min(clocks):.0f} to {max(clocks):.0f} MHz, {states[-1]['watts']:.0f} W")
    reasons = {reason for state in states for reason in state.get("throttled_by", ())}
    if reasons:
        parts.append(f"slowed by {', '.join(sorted(reasons))}")
    return "machine: " + "; ".join(parts or ["nothing is known of it"])


def watch_of(config: Any, device: str, pid: int | None = None) -> Callable[[], Any]:
    """Return a function that makes a ``state.MachineWatch`` over the devices of an engine.

    ``device`` is the kind of the engine's devices.  ``pid`` is the engine's process, None for this process.
    """
    from minivllm.lab.bench import state

    return functools.partial(state.MachineWatch, device, pid, config.tensor_parallel_size)


def engine_title(llm: Any, text: str) -> str:
    """Return the first line of a result: the model, the device and the dtype of an engine, then ``text``."""
    wiring = llm.engine.wiring
    return f"{llm.config.model} on {wiring.device}, {wiring.dtype}: {text}"


def config_title(loaded: Loaded, text: str) -> str:
    """Return the first line of a result of an engine in another process: the model, then ``text``."""
    return f"{loaded.engine.model}: {text}"


# ---- measurements in this process ------------------------------------------------------------------------------------


def latency(args: argparse.Namespace) -> int:
    """Run ``bench latency``, which times batches of requests for each input length and batch size, and return its exit
    code."""
    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.limits import of_engine
    from minivllm.lab.bench.workload import Generated

    check_output(args)
    loaded = load(args)
    rows: list[JsonObject] = []
    states: list[JsonObject] = []
    runs: list[JsonObject] = []
    with open_llm(loaded, args) as llm:
        watch = watch_of(llm.config, llm.engine.wiring.device)
        _fit_latency(args, of_engine(llm))
        for length in args.input_len:
            for batch in args.batch_size:
                drawn = Generated(batch, length, args.output_len, vocab=args.vocab)
                once = functools.partial(offline.latency, llm, batch, drawn, args.temperature)
                row_runs, row_states = offline.repeated(once, args.warmups, args.repeats, args.seed, watch)
                row = {"input_len": length, "batch_size": batch}
                row |= repeats.merged(row_runs)
                row |= offline.latencies(row_runs)
                rows.append(row)
                runs += row_runs
                states += row_states
        result = repeats.result("latency", runs, states, settings(args), bill_of(llm, args), rows=rows)
        title = engine_title(llm, f"{args.output_len} tokens out, {args.repeats} runs; median ± half the 95 % interval")
    if len(rows) == 1:
        result |= {key: rows[0][key] for key in ("avg_latency", "latencies", "percentiles")}
    lines = [title, f"{'prompt':>6} {'batch':>6} {'latency ms':>16} {'p99':>9} {'TTFT ms':>16} {'TPOT ms':>16}"]
    lines += map(_latency_line, rows)
    return print_result(result, args, lines, states)


def _latency_line(row: JsonObject) -> str:
    """Return the table's line of a prompt length and batch size."""
    from minivllm.lab.bench.repeats import with_bounds

    intervals = {key: [1e3 * bound for bound in bounds] for key, bounds in row["intervals"].items()}
    latency_ms = with_bounds({"latency": 1e3 * row["latency"], "intervals": intervals}, "latency")
    ttft = with_bounds(row, "median_ttft_ms", 2)
    tpot = with_bounds(row, "median_tpot_ms", 2)
    sizes = f"{row['input_len']:>6} {row['batch_size']:>6}"
    return f"{sizes} {latency_ms:>16} {row['p99_e2el_ms']:>9.1f} {ttft:>16} {tpot:>16}"


def _fit_latency(args: argparse.Namespace, limits: EngineLimits) -> None:
    """Fill in the sizes of ``bench latency`` that the user left out.  ConfigError if the user's sizes do not fit."""
    from minivllm.lab.bench.limits import fitted

    check_vocab(args, limits)
    args.vocab = args.vocab or min(VOCAB, limits.vocab)
    if args.batch_size is None:
        args.batch_size = [min(8, limits.rows)]
    if max(args.batch_size) > limits.rows:
        raise ConfigError(f"--batch-size {max(args.batch_size)} is more than max_num_seqs={limits.rows}; lower it")
    longest_input = max(args.input_len) if args.input_len else None
    chosen = {"input_len": longest_input, "output_len": args.output_len}
    defaults = {"input_len": 32, "output_len": 128}
    least = {"input_len": 1, "output_len": 1}

    def fits(sizes: Mapping[str, int]) -> bool:
        return sum(sizes.values()) <= limits.tokens

    def refusal(sizes: Mapping[str, int]) -> str:
        flags = f"--input-len {sizes['input_len']} and --output-len {sizes['output_len']}"
        limit = f"a request of this configuration may have {limits.tokens}; lower them, or raise max_model_len"
        return f"{flags} are {sum(sizes.values())} tokens, and {limit}"

    sizes = fitted(chosen, defaults, least, fits, refusal)
    report_smaller(chosen, sizes, defaults, f"a request of this configuration may have {limits.tokens} tokens")
    if args.input_len is None:
        args.input_len = [sizes["input_len"]]
    args.output_len = sizes["output_len"]


def throughput(args: argparse.Namespace) -> int:
    """Run ``bench throughput``, which times many requests that are added at once, and return its exit code."""
    from minivllm.lab.bench import offline, repeats
    from minivllm.lab.bench.limits import of_engine
    from minivllm.runtime.hooks import figures

    check_output(args)
    with open_llm(load(args), args) as llm:
        requests = requests_by_seed(args, of_engine(llm))
        watch = watch_of(llm.config, llm.engine.wiring.device)

        def once(seed: int) -> JsonObject:
            run = offline.throughput(llm, requests(seed), args.temperature, seed)
            return {key: value for key, value in run.items() if key != "token_ids"}

        runs, states = offline.repeated(once, args.warmups, args.repeats, args.seed, watch)
        result = repeats.result("throughput", runs, states, settings(args), bill_of(llm, args))
        text = f"{result['num_requests']} requests, {args.repeats} runs; median ± half the 95 % interval"
        title = engine_title(llm, text)
    bounds = functools.partial(repeats.with_bounds, result)
    lines = [
        title,
        f"throughput   {bounds('output_throughput')} output tokens/s, {bounds('total_token_throughput')} tokens/s, "
        f"{bounds('request_throughput', 2)} requests/s",
        f"tokens       {result['total_input_tokens']} in, {result['total_output_tokens']} out "
        f"in {result['duration']:.2f} s",
        f"latency ms   first token {bounds('median_ttft_ms')}, per token {bounds('median_tpot_ms', 2)}, "
        f"99th percentile of a request {bounds('p99_e2el_ms')}",
    ]
    if "draft_acceptance" in result:
        lines.append(f"drafts       {100 * result['draft_acceptance']:.1f} % accepted")
    if hook_figures := figures.text(result):
        lines.append(f"figures      {hook_figures}")
    return print_result(result, args, lines, states)


def memory(args: argparse.Namespace) -> int:
    """Run ``bench memory`` and return its exit code."""
    from minivllm.lab.bench import limits, offline, repeats

    check_output(args)
    loaded = load(args)
    requests = requests_by_seed(args, limits.planned(loaded))
    # The engine's modules are imported before the measurement, so that the memory of torch counts for no component.
    importlib.import_module("minivllm.frontend.llm")

    def build() -> Any:
        return open_llm(loaded, args)

    def work(llm: Any) -> None:
        offline.generate(llm, requests(args.seed), args.temperature, args.seed)

    turns = args.warmups + args.repeats
    runs = [offline.memory(build, work) for _ in range(turns)][args.warmups :]
    states: list[JsonObject] = [{} for _ in runs]
    result = repeats.result("memory", runs, states, settings(args), planned_bill(loaded, args))
    title = config_title(loaded, f"{len(requests(args.seed))} requests")
    lines = [f"{text:32} {result[key] / 2**20:10.1f} MiB" for key, text in COMPONENTS.items() if key in result]
    if "state_checkpoints" in result:
        lines.append(f"{'checkpoints of states':32} {result['state_checkpoints']:10.0f}")
    return print_result(result, args, [title, *lines])


def startup(args: argparse.Namespace) -> int:
    """Run ``bench startup``, which times new processes that start an engine, and return its exit code."""
    from minivllm.lab.bench import repeats, state
    from minivllm.lab.bench import startup as starts

    check_output(args)
    loaded = load(args)
    runs = []
    states = []
    for turn in range(args.warmups + args.repeats):
        with state.MachineWatch() as watch:
            run = starts.once(loaded)
        if turn >= args.warmups:
            runs.append(run)
            states.append(watch.found)
    result = repeats.result("startup", runs, states, settings(args), planned_bill(loaded, args))
    parts = [key for key in runs[0] if key.startswith("build_") and key != "build_s"]
    names = {"import_s": "imports", "build_s": "engine"}
    names |= {key: "  " + key.removeprefix("build_").removesuffix("_s").replace("_", " ") for key in parts}
    names |= {"first_token_s": "first token", "startup_s": "altogether"}
    lines = [f"{text:12} {repeats.with_bounds(result, key, 3)} s" for key, text in names.items()]
    title = config_title(loaded, f"{args.repeats} starts")
    return print_result(result, args, [title, *lines, machine_line(states)])
