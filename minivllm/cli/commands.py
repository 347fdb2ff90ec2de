"""The commands ``generate``, ``run``, ``eval`` and ``version``.

The function of a command takes the parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import minivllm
from minivllm import files
from minivllm.cli import record as recording
from minivllm.cli.answer_views import Answered, PlainView, for_output
from minivllm.cli.common import SAMPLING, load, open_llm, report
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, ResourceError, shown, suggest
from minivllm.validation import is_text

if TYPE_CHECKING:
    from minivllm.config import Loaded

LONGEST_INPUT = 1 << 24  # largest number of characters of a prompt from standard input


def with_flags(args: argparse.Namespace, loaded: Loaded) -> Loaded:
    """Return the configuration with the values of the sampling flags in its ``[sampling]`` table."""
    names = [name for name, _, _ in SAMPLING]
    flags = {name: getattr(args, name) for name in (*names, "stop") if getattr(args, name) is not None}
    if args.json_schema is not None or args.regex is not None:
        flags["structured_outputs"] = structured(args)
    origins = {f"sampling.{name}": f"--{name.replace('_', '-')}" for name in flags}
    return replace(loaded, sampling={**loaded.sampling, **flags}, origins={**loaded.origins, **origins})


def structured(args: argparse.Namespace) -> dict[str, str]:
    """Return the ``structured_outputs`` of ``--json-schema`` or ``--regex``.  ConfigError if both are used."""
    if args.regex is None:
        return {"json": files.read_given(args.json_schema, name=f"--json-schema: {args.json_schema}")}
    if args.json_schema is not None:
        raise ConfigError("--regex and --json-schema: expected only one of them")
    return {"regex": args.regex}


def failure(message: str, engine: Any = None) -> MinivllmError:
    """Return the exception for a failed request: EngineDeadError if the engine has ended, else MinivllmError."""
    return EngineDeadError(message) if engine is not None and engine.dead else MinivllmError(message)


def write_stream(
    pieces: Iterable[Any], engine: Any = None, most: int | None = None, view: Answered | None = None
) -> str:
    """Show an answer as its pieces arrive, then write its counts and times to standard error; return its text.

    ``most`` is max_tokens of the request.  ``view`` None writes plain text to standard output.  The error of a failed
    request is raised as ``failure`` makes it.
    """
    view = PlainView() if view is None else view
    start = time.perf_counter()
    first = 0.0  # seconds until the first token arrived
    tokens = 0
    text = ""
    last = None
    try:
        for last in pieces:
            if last.token_ids and not tokens:
                first = time.perf_counter() - start
            tokens += len(last.token_ids)
            text += last.delta
            view.text(last.delta)
        seconds = time.perf_counter() - start
    finally:
        view.end()
    output = None if last is None else last.output
    if output is not None and output.error:
        raise failure(output.error, engine)
    rate = (tokens - 1) / (seconds - first) if tokens > 1 and seconds > first else 0.0
    print(f"{tokens} tokens, first after {1000 * first:.0f} ms, then {rate:.1f} tok/s", file=sys.stderr)
    if output is not None and any(sequence.finish_reason == "length" for sequence in output.outputs):
        report(f"{cut_off(tokens, most, engine)}")
    return text


def cut_off(tokens: int, most: int | None, engine: Any) -> str:
    """Return a message that an answer was cut off after ``tokens`` tokens, with the limit that it reached."""
    if tokens == most or engine is None:
        return f"the answer was cut off after {tokens} tokens; --max-tokens N allows more"
    room = f"max_model_len={engine.wiring.max_model_len}, a KV cache of {engine.cache.pools[0].total - 1} blocks"
    return f"the answer was cut off after {tokens} tokens: prompt and answer fill the context ({room})"


def generate(args: argparse.Namespace) -> int:
    """Run ``minivllm generate`` and return its exit code.  ConfigError if there is no prompt.  If generation fails, the
    engine's error is raised."""
    from minivllm.core.interfaces.params import SamplingParams

    loaded = with_flags(args, load(args))
    SamplingParams.make(**loaded.sampling)  # raises an error for wrong parameters before the model is loaded
    prompt = args.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt: give it as an argument or on standard input")
        prompt = read_stdin(sys.stdin.read).rstrip("\n")
    loaded = replace(loaded, run=type(loaded.run)(prompts=[prompt], chat=args.chat))
    with open_llm(loaded, args) as llm:
        params = llm.get_default_sampling_params()
        question: Any = [{"role": "user", "content": prompt}] if args.chat else prompt
        if params.n > 1:  # several texts are printed one after another, because their pieces would be mixed
            complete = llm.chat if args.chat else llm.generate
            answer = complete(question, params, use_tqdm=False)[0]
            if answer.error:
                raise failure(answer.error, llm.engine)
            for number, output in enumerate(answer.outputs, 1):
                print(for_output(f"[{number}] {output.text}"))
            return 0
        stream = llm.chat_stream if args.chat else llm.stream
        write_stream(stream(question, params), llm.engine, params.max_tokens)
    return 0


def read_stdin(read: Callable[[int], str]) -> str:
    """Return the text of standard input, read by ``sys.stdin.read`` or ``readline``.

    ConfigError if it is not UTF-8 or longer than ``LONGEST_INPUT`` characters.
    """
    try:
        text = read(LONGEST_INPUT + 1)
    except UnicodeDecodeError as exc:
        raise ConfigError(f"standard input: not UTF-8 (byte {exc.start}); expected Unicode text") from None
    if len(text) > LONGEST_INPUT:
        raise ConfigError(f"standard input: more than {LONGEST_INPUT} characters; send a prompt that a model can read")
    if not is_text(text):
        raise ConfigError("standard input: not UTF-8; expected Unicode text")
    return text


def _write_results(path: str | None, prompts: Sequence[Any] | None, outputs: Sequence[Any]) -> None:
    """Write a JSON line for each output of ``minivllm run`` to a file, or to standard output if the path is empty.

    ResourceError if the file cannot be written; the results then go to standard output."""
    prompts = prompts or [o.prompt if o.prompt is not None else o.prompt_token_ids for o in outputs]
    results = [result(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in results)
    if not path:
        sys.stdout.write(text)
        return
    try:
        files.write_text(path, text)
    except ResourceError as exc:
        sys.stdout.write(text)
        raise ResourceError(f"{exc}; the results are on standard output") from None


def run(args: argparse.Namespace) -> int:
    """Run ``minivllm run`` and return its exit code: 1 if a request failed, 7 if the engine ended."""
    loaded = load(args, [args.file])
    record = recording.read_record(args.file)
    loaded, batches = workload(loaded, record, args.file)
    path = loaded.run.output
    if path:
        # checked before the work starts; an existing file keeps its content until results are written
        files.check_output(path)
    if record is not None:
        recording.check_recorded(record, loaded, args)
    outputs: list[Any] = []
    answered = False
    try:
        with open_llm(loaded, args) as llm:
            complete = llm.chat if loaded.run.chat else llm.generate
            terminal = sys.stderr.isatty()
            start = time.perf_counter()
            for prompts, params, taps in batches:
                outputs += complete(prompts, params, use_tqdm=terminal, taps=taps)
            seconds = time.perf_counter() - start
            dead = llm.engine.dead is not None
            now = llm.bill_of_materials() if record is not None else {}
            answered = True
    finally:
        # behind the output of hooks, and also if the record, which is written when the LLM is closed, cannot be written
        if answered:
            _write_results(path, loaded.run.prompts, outputs)
    tokens = sum(len(sequence.token_ids) for output in outputs for sequence in output.outputs)
    where = path or "standard output"
    print(f"{len(outputs)} results to {where}: {tokens} tokens in {seconds:.1f} s", file=sys.stderr)
    if record is not None:
        recording.print_tokens(record, now, args.file)
    failed = [output.error for output in outputs if output.error]
    if not failed:
        return 0
    report(f"error: {len(failed)} of {len(outputs)} requests failed: {failed[0]}")
    return EngineDeadError.exit_code if dead else 1


def workload(loaded: Loaded, record: Any, path: str) -> tuple[Loaded, list[tuple[list[Any], Any, Any]]]:
    """Return the configuration with all prompts, and (prompts, sampling parameters, taps) of each engine call.

    ``record`` is the recorded run to repeat, None for an experiment file.  Taps that the recorded requests read are
    set again, because they change how a request is computed; the results do not show their values.  ConfigError if the
    file names no prompts.
    """
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap

    run = loaded.run
    prompts = list(run.prompts)
    if run.prompts_file:
        prompts += read_prompts(run.prompts_file)
    if prompts:
        questions: list[Any] = prompts
        if run.chat:
            questions = [[{"role": "user", "content": prompt}] for prompt in prompts]
        run = run.model_copy(update={"prompts": prompts, "prompts_file": None})
        SamplingParams.make(**loaded.sampling)  # raises an error for wrong parameters before the model is loaded
        return replace(loaded, run=run), [(questions, None, None)]
    if record is None:
        raise ConfigError(f"{path}: nothing to run: expected prompts or prompts_file in the [run] table")
    from minivllm.frontend.record.replay import batches

    calls = []
    for questions, params, points in batches(record, path):
        taps = [[Tap(point, read=True) for point in request_points] for request_points in points]
        calls.append((questions, params, taps))
    return loaded, calls


def result(prompt: str, output: Any) -> dict[str, Any]:
    """Return the result of a request as a JSON object, for a line of the result file."""
    texts = []
    for sequence in output.outputs:
        texts.append(
            {
                "text": sequence.text,
                "token_ids": list(sequence.token_ids),
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
        )
    line: dict[str, Any] = {"prompt": prompt, "outputs": texts}
    if output.error:
        line["error"] = output.error
    return line


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file, one per line.  Empty lines are left out.

    A line of a .jsonl file is a string or an object with a ``prompt``.  ConfigError for any other line."""
    prompts = []
    for number, line in enumerate(files.read_lines(path), 1):
        if not line.strip():
            continue
        value: Any = line.rstrip("\r\n")
        if path.endswith(".jsonl"):
            value = files.parse_json(line, path, line=number)
            value = value.get("prompt") if isinstance(value, Mapping) else value
        if not isinstance(value, str):
            raise ConfigError(f"{path}:{number}: expected a string or an object with a 'prompt'")
        prompts.append(value)
    return prompts


def version(args: argparse.Namespace) -> int:
    """Print the version of minivllm, and return the exit code 0."""
    print(f"minivllm {minivllm.__version__}")
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """Run ``minivllm eval`` and return its exit code.  ConfigError for an unknown task or for ``-n`` below 1."""
    from minivllm.pocket import evaluate as quality
    from minivllm.pocket.tasks import TASKS

    tasks = args.task or list(TASKS)
    for task in tasks:
        if task not in TASKS:
            raise ConfigError(
                f"--task {shown(task)}: no such task.{suggest(task, TASKS)} There are: {', '.join(TASKS)}"
            )
    if args.n < 1:
        raise ConfigError(f"-n {args.n}: expected a positive number of cases")
    with open_llm(load(args), args) as llm:
        engine = quality.Minivllm(llm, progress=sys.stderr.isatty())
        scores = quality.evaluate(engine.generate, quality.default_cases(args.n, tasks=tasks))
        print(quality.table(scores), flush=True)
        stories = max(1, args.n // 5)
        value = quality.perplexity(engine.log_likelihood, stories)
        print(f"perplexity    {stories:>6} {value:>8.3f}  (a token, held-out stories)")
    return 0
