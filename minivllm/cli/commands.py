"""What the subcommands do.  Each takes the parsed arguments and returns the exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import minivllm
from minivllm import files
from minivllm.cli import record as recording
from minivllm.cli.common import SAMPLING, load, open_llm
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, shown, suggest
from minivllm.validation import is_text

if TYPE_CHECKING:
    from minivllm.config import Loaded

MOST_HEARD = 1 << 24  # characters of standard input that are one prompt


def with_flags(args: argparse.Namespace, loaded: Loaded) -> Loaded:
    """Sampling flags over the ``[sampling]`` table."""
    names = [*(name for name, _, _ in SAMPLING), "stop"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.json_schema is not None or args.regex is not None:
        given["structured_outputs"] = structured(args)
    origins = {f"sampling.{name}": f"--{name.replace('_', '-')}" for name in given}
    return replace(loaded, sampling={**loaded.sampling, **given}, origins={**loaded.origins, **origins})


def structured(args: argparse.Namespace) -> dict[str, str]:
    """What ``--json-schema`` or ``--regex`` asks for."""
    if args.regex is not None:
        if args.json_schema is not None:
            raise ConfigError("--regex and --json-schema: want one of them")
        return {"regex": args.regex}
    return {"json": files.read_given(args.json_schema, name=f"--json-schema: {args.json_schema}")}


def failure(message: str, engine: Any = None) -> MinivllmError:
    """The error of a failed request, or of the engine if that is what failed."""
    return EngineDeadError(message) if engine is not None and engine.dead else MinivllmError(message)


def write_stream(pieces: Iterable[Any], engine: Any = None, most: int | None = None) -> str:
    """Write the pieces to standard output as they come, then figures to standard error.  Return the text.

    ``most`` is the request's max_tokens.  A failed request is an error, not an empty answer: EngineDeadError if
    ``engine`` has ended with it.
    """
    start, first, tokens, text, last = time.perf_counter(), 0.0, 0, "", None
    for last in pieces:
        if last.token_ids and not tokens:
            first = time.perf_counter() - start
        tokens += len(last.token_ids)
        text += last.delta
        sys.stdout.write(last.delta)
        sys.stdout.flush()
    seconds = time.perf_counter() - start
    if text:
        sys.stdout.write("\n")
        sys.stdout.flush()
    output = None if last is None else last.output
    if output is not None and output.error:
        raise failure(output.error, engine)
    rate = (tokens - 1) / (seconds - first) if tokens > 1 and seconds > first else 0.0
    print(f"{tokens} tokens, first after {1000 * first:.0f} ms, then {rate:.1f} tok/s", file=sys.stderr)
    if output is not None and any(one.finish_reason == "length" for one in output.outputs):
        print(f"minivllm: {cut_off(tokens, most, engine)}", file=sys.stderr)
    return text


def cut_off(tokens: int, most: int | None, engine: Any) -> str:
    """Return why an answer of so many tokens was cut off, with the option that allows more."""
    if tokens == most or engine is None:
        return f"the answer was cut off after {tokens} tokens; --max-tokens N allows more"
    room = f"max_model_len={engine.wiring.max_model_len}, a KV cache of {engine.cache.pools[0].total - 1} blocks"
    return f"the answer was cut off after {tokens} tokens: prompt and answer fill the context ({room})"


def generate(args: argparse.Namespace) -> int:
    from minivllm.core.interfaces.params import SamplingParams

    loaded = with_flags(args, load(args))
    SamplingParams.make(**loaded.sampling)  # refuses before the model is loaded
    prompt = args.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: give it as an argument or on standard input")
        prompt = heard(sys.stdin.read).rstrip("\n")
    loaded = replace(loaded, run=type(loaded.run)(prompts=[prompt], chat=args.chat))
    with open_llm(loaded, args) as llm:
        params = llm.get_default_sampling_params()
        ask: Any = [{"role": "user", "content": prompt}] if args.chat else prompt
        if params.n > 1:  # their pieces come in turns: one text after another reads better
            answer = (llm.chat if args.chat else llm.generate)(ask, params, use_tqdm=False)[0]
            if answer.error:
                raise failure(answer.error, llm.engine)
            for number, output in enumerate(answer.outputs, 1):
                print(f"[{number}] {output.text}")
            return 0
        write_stream((llm.chat_stream if args.chat else llm.stream)(ask, params), llm.engine, params.max_tokens)
    return 0


def heard(read: Callable[[int], str]) -> str:
    """What standard input says, to its end or to that of a line.  ConfigError if it is no text, or does not end."""
    try:
        text = read(MOST_HEARD + 1)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"standard input: not UTF-8 (byte {exc.start}); want Unicode text") from None
    if len(text) > MOST_HEARD:
        raise ConfigError(f"standard input: more than {MOST_HEARD} characters; want a prompt that a model can read")
    if not is_text(text):
        raise ConfigError("standard input: not UTF-8; want Unicode text")
    return text


def run(args: argparse.Namespace) -> int:
    loaded = load(args, [args.file])
    record = recording.read_record(args.file)
    loaded, batches = workload(loaded, record, args.file)
    path = loaded.run.output
    if path:
        files.check_output(path)  # before the work, not after it; what is there stays until the results are
    if record is not None:
        recording.check_recorded(record, loaded, args)
    outputs: list[Any] = []
    with open_llm(loaded, args) as llm:
        shows = sys.stderr.isatty()
        start = time.perf_counter()
        for asks, params, taps in batches:
            outputs += (llm.chat if loaded.run.chat else llm.generate)(asks, params, use_tqdm=shows, taps=taps)
        seconds, died = time.perf_counter() - start, llm.engine.dead is not None
        now = llm.bill_of_materials() if record is not None else {}
    prompts = loaded.run.prompts or [o.prompt if o.prompt is not None else o.prompt_token_ids for o in outputs]
    lines = [json.dumps(result(p, o), ensure_ascii=False) + "\n" for p, o in zip(prompts, outputs, strict=True)]
    if path:
        Path(path).write_text("".join(lines), encoding="utf-8")
    else:
        sys.stdout.writelines(lines)
    tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    where = path or "standard output"
    print(f"{len(outputs)} results to {where}: {tokens} tokens in {seconds:.1f} s", file=sys.stderr)
    if record is not None:
        recording.tell_tokens(record, now, args.file)
    failed = [output.error for output in outputs if output.error]
    if failed:
        print(f"minivllm: error: {len(failed)} of {len(outputs)} requests failed: {failed[0]}", file=sys.stderr)
    return (EngineDeadError.exit_code if died else 1) if failed else 0


def workload(loaded: Loaded, record: Any, path: str) -> tuple[Loaded, list[tuple[list[Any], Any, Any]]]:
    """The configuration with all prompts in it, and (prompts, sampling parameters, taps) for each call of the engine.

    What a recorded request read is read again, as that decides how it is computed; no result shows it."""
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap

    run = loaded.run
    prompts = [*run.prompts, *(read_prompts(run.prompts_file) if run.prompts_file else [])]
    if prompts:
        asks = [[{"role": "user", "content": p}] for p in prompts] if run.chat else prompts
        run = run.model_copy(update={"prompts": prompts, "prompts_file": None})
        SamplingParams.make(**loaded.sampling)  # refuses before the model is loaded
        return replace(loaded, run=run), [(asks, None, None)]
    if record is not None:
        from minivllm.frontend.record.replay import batches

        return loaded, [
            (asks, params, [[Tap(point, read=True) for point in own] for own in points])
            for asks, params, points in batches(record, path)
        ]
    raise ConfigError(f"{path}: nothing to run: want prompts or prompts_file in the [run] table")


def result(prompt: str, output: Any) -> dict[str, Any]:
    """One line of results."""
    texts = [
        {"text": o.text, "token_ids": list(o.token_ids), "finish_reason": o.finish_reason, "stop_reason": o.stop_reason}
        for o in output.outputs
    ]
    line: dict[str, Any] = {"prompt": prompt, "outputs": texts}
    return {**line, "error": output.error} if output.error else line


def read_prompts(path: str) -> list[str]:
    """One prompt a line; in a .jsonl file a line is a string or an object with a ``prompt``."""
    found = []
    for number, line in enumerate(files.read_lines(path), 1):
        if not line.strip():
            continue
        value: Any = line.rstrip("\r\n")
        if path.endswith(".jsonl"):
            value = files.parse_json(line, path, line=number)
            value = value.get("prompt") if isinstance(value, Mapping) else value
        if not isinstance(value, str):
            raise ConfigError(f"{path}:{number}: want a string or an object with a 'prompt'")
        found.append(value)
    return found


def version(args: argparse.Namespace) -> int:
    print(f"minivllm {minivllm.__version__}")
    return 0


def evaluate(args: argparse.Namespace) -> int:
    from minivllm.pocket import evaluate as quality
    from minivllm.pocket.tasks import TASKS

    tasks = args.task or list(TASKS)
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(
                f"--task {shown(task)}: no such task.{suggest(task, TASKS)} There are: {', '.join(TASKS)}"
            )
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: want a positive number of cases")
    with open_llm(load(args), args) as llm:
        engine = quality.Minivllm(llm, progress=sys.stderr.isatty())
        print(quality.table(quality.evaluate(engine.generate, quality.default_cases(args.n, tasks=tasks))), flush=True)
        stories = max(1, args.n // 5)
        value = quality.perplexity(engine.log_likelihood, stories)
        print(f"perplexity    {stories:>6} {value:>8.3f}  (a token, held-out stories)")
    return 0
