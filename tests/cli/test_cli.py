"""The command line: what it prints, what it refuses and with which exit code, and what it does not import."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_helpers import run_cli
from plugin_helpers import install

import minivllm
from minivllm.cli import one_line
from minivllm.cli.commands import read_prompts, result, write_stream
from minivllm.errors import ConfigError, MinivllmError

ROOT = Path(__file__).parents[2]
POCKET = ROOT / "minivllm" / "pocket" / "model"
pocket = pytest.mark.skipif(not POCKET.is_dir(), reason="the model is not in this tree")
HEAVY = ("torch", "transformers", "pydantic", "numpy", "yaml")
SMALL = ["--set", "max_num_seqs=4", "--set", "max_num_batched_tokens=512", "--set", "num_kvcache_blocks=64"]


def command(*args, **environ):
    return [sys.executable, "-m", "minivllm", *args], {**os.environ, "PYTHONPATH": str(ROOT), **environ}


def python(code):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------- what is imported


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["plugins"],
        ["generate", "--help"],
        ["plugins", "scheduler"],
        ["diff", "--help"],
        ["compare-hf", "--help"],
        ["quantize", "--help"],
        ["bench", "serve", "--help"],
        ["ablate", "--help"],
        ["compare", "--help"],
        ["report", "--help"],
    ],
)
def test_light_commands_import_nothing_heavy(args):
    code = (
        f"import sys\nfrom minivllm.cli import main\ntry: main({args!r})\nexcept SystemExit: pass\n"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    done = python(code)
    assert done.stderr.strip() == "[]" and done.stdout


@pytest.mark.parametrize("args", [["config", "show", "--origin"], ["schema"]])
def test_the_commands_about_configuration_import_no_torch(args):
    code = (
        f"import sys\nfrom minivllm.cli import main\nmain({args!r})\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    assert python(code).stderr.strip() == "[]"


def test_importing_the_package_imports_nothing_heavy_and_its_names_are_there():
    code = (
        f"import sys, minivllm; print([m for m in {HEAVY} if m in sys.modules]);"
        "assert set(minivllm.__all__) <= set(dir(minivllm));"
        "print(minivllm.SamplingParams(n=2).n, 'torch' in sys.modules)"
    )
    done = python(code)
    assert done.stdout.split("\n")[:2] == ["[]", "2 False"], done.stderr
    with pytest.raises(AttributeError, match="module 'minivllm' has no attribute 'LLN'"):
        minivllm.LLN  # noqa: B018


def test_every_name_of_the_package_can_be_imported():
    for name in minivllm.__all__:
        assert getattr(minivllm, name) is not None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["generate", "--config", "no.toml", "x"], 2, "no.toml: no such file"),
        (["generate", "--set", "sede=1", "x"], 2, "--set: unknown option 'sede'. Did you mean 'seed'?"),
        (["generate", "--top-p", "7", "x"], 2, "top_p=7.0: expected a number in (0, 1]"),
        (["generate", "--model", "/no/model", "x"], 3, "/no/model: no such directory"),
        (["explain", "--model", "/no/model"], 3, "/no/model: no such directory"),
        (["plugins", "atention"], 4,
         "No seam is called 'atention'. Did you mean 'attention'? There are: adapter, attention, compressor, drafter, "
         "encoder, evictor, executor, grammar, hooks, kvformat, kvstore, model, parser, predictor, processor, "
         "quantizer, router, sampler, scheduler, strategy, tokenizer."),
        (["run", "no.toml"], 2, "no.toml: no such file"),
        (["eval", "pocket", "--task", "sum"], 2,
         "--task 'sum': no such task. Did you mean 'sums'? There are: needle, copy, sums, json, story, echo"),
        (["eval", "pocket", "-n", "0"], 2, "-n 0: expected a positive number of cases"),
    ],
)  # fmt: skip
def test_an_error_is_one_line_and_a_code(capsys, args, code, message):
    assert run_cli(capsys, *args) == (code, "", f"minivllm: error: {message}\n")


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "the following arguments are required: COMMAND (see minivllm --help)"),
        (
            ["generate", "--max-tokens", "x"],
            "argument --max-tokens: invalid int value: 'x' (see minivllm generate --help)",
        ),
        (["plugins", "--nonsense"], "unrecognized arguments: --nonsense (see minivllm plugins list --help)"),
        (
            ["generate", "--evictor=lru"],
            "unrecognized arguments: --evictor=lru; here it is --set evictor=VALUE (see minivllm generate --help)",
        ),
        (
            ["run", "a.toml", "--quantization=int8"],
            "unrecognized arguments: --quantization=int8; here it is --set quantizer=VALUE (see minivllm run --help)",
        ),
        (
            ["generate", "--presence_penalty=1"],
            "unrecognized arguments: --presence_penalty=1; here it is --set sampling.presence_penalty=VALUE "
            "(see minivllm generate --help)",
        ),
        (
            ["generate", "--top_k=5"],
            "unrecognized arguments: --top_k=5. Did you mean '--top-k'? (see minivllm generate --help)",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(capsys, args, message):
    assert run_cli(capsys, *args) == (2, "", f"minivllm: error: {message}\n")


def test_a_plugin_error_of_several_lines_is_folded_into_one(capsys):
    if not POCKET.is_dir():
        pytest.skip("the model is not in this tree")
    assert run_cli(capsys, "explain", "--set", "scheduler=fcf") == (
        4,
        "",
        "minivllm: error: --set: No scheduler is called 'fcf'. Did you mean 'fcfs'? Installed: adaptive, deadline, "
        "fair, fcfs, prefill-first, prefix-aware, priority, shortest-job, static; A package adds one with the "
        "entry-point group 'minivllm.scheduler'; an experiment can say 'module:Class'.\n",
    )
    assert one_line("a:\n   b  c\n\n  d.\ne") == "a: b c; d. e"


def test_debug_shows_where_it_came_from(capsys):
    code, out, err = run_cli(capsys, "generate", "--debug", "--model", "/no/model", "x")
    assert (
        (code, out) == (3, "")
        and "Traceback" in err
        and err.endswith("minivllm: error: /no/model: no such directory\n")
    )


# ---------------------------------------------------------------- plugins and explain


def test_plugins_lists_what_is_installed(capsys):
    code, out, err = run_cli(capsys, "plugins")
    lines = out.splitlines()
    assert (code, err) == (0, "") and re.split(r" {2,}", lines[0]) == ["seam", "name", "dist", "version", "summary"]
    found = [line.split()[:4] for line in lines[1:] if line.split()[2] == "minivllm"]
    from minivllm.plugins.specs import BUILTINS

    assert found == [[kind, name, "minivllm", minivllm.__version__] for kind, name, _ in BUILTINS]
    code, out, err = run_cli(capsys, "plugins", "kv_format")
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["bf16", "fp16", "fp32", "fp8", "int8"]


def test_a_broken_plugin_is_a_line_of_the_list(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    points = {"minivllm.attention": {"x": "no_such_module:S"}, "minivllm.trimmer": {"disk": "no_such_module:E"}}
    install(tmp_path, "acme", points, version="2.0")
    code, out, err = run_cli(capsys, "plugins", "--specs")
    rows = [re.split(r" {2,}", line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [
        "attention",
        "x",
        "acme",
        "2.0",
        "broken: attention 'acme/x' (acme 2.0, entry point 'no_such_module:S') "
        "could not be imported: ModuleNotFoundError: No module named 'no_such_module'",
    ] in rows
    assert ["trimmer", "disk", "acme", "2.0", "reserved: not used by this version"] in rows


@pocket
def test_explain_says_what_would_be_wired(capsys):
    code, out, err = run_cli(capsys, "explain", "--set", "dtype=float32", "--set", "device=cpu")
    assert (code, err) == (0, "")
    assert "attention -> minivllm/sdpa   (asked: auto)" in out and "dtype          float32 (asked for)" in out
    code, out, err = run_cli(capsys, "explain", "model", "--all", "--set", "device=cpu")
    assert code == 0 and out.startswith("model -> minivllm/qwen3   (asked: auto)\n") and "executor" not in out


@pocket
def test_explain_of_a_choice_that_cannot_be_wired_shows_the_reasons_and_ends_with_2(capsys):
    code, out, err = run_cli(
        capsys,
        "explain",
        "quantizer",
        "--set",
        "dtype=float32",
        "--set",
        "device=cpu",
        "--set",
        "batch_invariant=true",
        "--set",
        "quantizer=int8",
    )
    assert (code, err) == (2, "") and out.startswith("quantizer -> nothing suitable   (asked: int8)\n")
    assert "x minivllm/int8  feature 'batch_invariant' not declared  (the bits of a row depend neither" in out


# ---------------------------------------------------------------- running


@pocket
def test_generate_streams_text_to_stdout_and_figures_to_stderr(capsys):
    args = ["generate", "--chat", "What is 2 + 3?", "--temperature", "0", "--max-tokens", "20", *SMALL]
    code, out, err = run_cli(capsys, *args)
    assert (code, out) == (0, "2 + 3 = 5\n")
    assert re.fullmatch(r"\d+ tokens, first after \d+ ms, then [\d.]+ tok/s\n", err)


@pocket
def test_generate_reads_the_prompt_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n"))
    code, out, _ = run_cli(capsys, "generate", "--temperature", "0", "--max-tokens", "4", *SMALL)
    assert code == 0 and out.strip() and out.endswith("\n")


@pocket
def test_chat_answers_each_line_of_a_pipe_and_remembers(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 + 3?\n\nWhat is 4 + 5?\n"))
    seen = []
    real = minivllm.LLM.chat_stream
    monkeypatch.setattr(minivllm.LLM, "chat_stream", lambda self, m, p: seen.append(list(m)) or real(self, m, p))
    code, out, _ = run_cli(capsys, "chat", "--temperature", "0", "--max-tokens", "20", *SMALL)
    first, *rest = out.splitlines()
    assert code == 0 and first == "2 + 3 = 5" and len(rest) == 1
    assert seen[1] == [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is 4 + 5?"},
    ]


@pocket
def test_chat_takes_the_model_by_position_and_knows_its_commands(capsys, monkeypatch):
    lines = "/help\nWhat is 2 + 3?\n/reset\n/system Be brief.\n//what is 2 + 3?\n/exit\nWhat is 1 + 1?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    seen = []
    real = minivllm.LLM.chat_stream
    monkeypatch.setattr(minivllm.LLM, "chat_stream", lambda self, m, p: seen.append((list(m), p)) or real(self, m, p))
    code, out, err = run_cli(capsys, "chat", "pocket", "--temperature", "0", *SMALL)
    assert code == 0 and out.splitlines()[0] == "2 + 3 = 5"
    assert "/reset         forget the conversation" in err and "The system message is set." in err
    (first, params), (second, _) = seen
    assert params.max_tokens is None, "an answer ends where the model ends it"
    assert first == [{"role": "user", "content": "What is 2 + 3?"}]
    assert second == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "/what is 2 + 3?"}]


@pocket
@pytest.mark.parametrize(
    ("options", "report_of"),
    [
        (["--max-tokens", "3"], "the answer was cut off after 3 tokens; --max-tokens N allows more"),
        (["--set", "max_model_len=24"], "prompt and answer fill the context (max_model_len=24,"),
    ],
)
def test_a_truncated_answer_says_so(options, report_of, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me a story about a fox and a lantern.\n"))
    code, out, err = run_cli(capsys, "chat", "--temperature", "0", *SMALL, *options)
    assert code == 0 and out and report_of in err


@pocket
def test_bitsandbytes_quantizes_an_unquantized_checkpoint_while_it_is_loaded(capsys):
    code, out, _ = run_cli(capsys, "explain", "quantizer", "--set", "quantization=bitsandbytes", *SMALL)
    assert code == 0 and "quantizer -> minivllm/nf4" in out


@pocket
def test_run_writes_a_line_of_json_for_each_prompt(capsys, tmp_path):
    (tmp_path / "more.jsonl").write_text('"What is 4 + 5?"\n\n{"prompt": "What is 1 + 1?"}\n')
    text = (
        "max_num_seqs = 4\nmax_num_batched_tokens = 512\nnum_kvcache_blocks = 64\n"
        "[sampling]\ntemperature = 0\nmax_tokens = 20\n"
        "[run]\nchat = true\nprompts = ['What is 2 + 3?']\nprompts_file = 'more.jsonl'\noutput = 'out.jsonl'\n"
    )
    (tmp_path / "exp.toml").write_text(text)
    code, out, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert (code, out) == (0, "") and re.match(r"3 results to .*out.jsonl: \d+ tokens in [\d.]+ s\n", err)
    assert [line["prompt"] for line in lines] == ["What is 2 + 3?", "What is 4 + 5?", "What is 1 + 1?"]
    assert lines[0]["outputs"][0]["text"] == "2 + 3 = 5" and lines[0]["outputs"][0]["finish_reason"] == "stop"


@pocket
def test_eval_prints_a_row_for_each_task(capsys):
    code, out, _ = run_cli(capsys, "eval", "pocket", "-n", "1", "--task", "sums", *SMALL)
    assert code == 0 and re.fullmatch(r"task +cases +right\nsums +1 +\d+\.\d%\nperplexity +1 +\d\.\d+ .*\n", out)


def test_run_without_prompts_is_refused(capsys, tmp_path):
    (tmp_path / "exp.toml").write_text("seed = 1\n")
    code, out, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"))
    path = tmp_path / "exp.toml"
    wanted = f"minivllm: error: {path}: nothing to run: expected prompts or prompts_file in the [run] table\n"
    assert (code, out, err) == (2, "", wanted)


@pocket
def test_who_closes_the_pipe_early_gets_no_traceback():
    argv, env = command(
        "generate", "Once upon a time", "--max-tokens", "200", "--set", "sampling.ignore_eos=true", *SMALL
    )
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(60), err) == (0, "")


@pocket
def test_an_interrupt_ends_quietly_with_130():
    argv, env = command(
        "generate", "Once upon a time", "--max-tokens", "4000", "--set", "sampling.ignore_eos=true", *SMALL
    )
    argv += ["--set", "num_kvcache_blocks=300"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.read(1)  # it runs
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err.strip()) == (130, "")


# ---------------------------------------------------------------- pieces


def piece(delta, n, output=None):
    return SimpleNamespace(delta=delta, token_ids=list(range(n)), output=output)


def test_a_failed_request_is_an_error_and_not_an_empty_answer(capsys):
    done = SimpleNamespace(error="processor acme/x: boom")
    with pytest.raises(MinivllmError, match=r"^processor acme/x: boom$"):
        write_stream([piece("a", 1), piece("", 0, done)])
    assert write_stream([piece("a", 1), piece("b", 2), piece("", 0, SimpleNamespace(error=None, outputs=[]))]) == "ab"
    assert capsys.readouterr().err.startswith("3 tokens, first after ")


def test_a_result_tells_its_error():
    one = SimpleNamespace(text="t", token_ids=(1, 2), finish_reason="stop", stop_reason=None)
    line = {"text": "t", "token_ids": [1, 2], "finish_reason": "stop", "stop_reason": None}
    assert result("p", SimpleNamespace(outputs=[one], error=None)) == {"prompt": "p", "outputs": [line]}
    assert result("p", SimpleNamespace(outputs=[], error="x")) == {"prompt": "p", "outputs": [], "error": "x"}


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("p.jsonl", b'{"a": 1}', "{path}:1: expected a string or an object with a 'prompt'"),
        ("p.jsonl", b'"x"\n[1', "{path}:2:3: broken JSON: Expecting ',' delimiter"),
        ("p.txt", b"a\xff", "{path}:1: not UTF-8 (byte 1 of the line); save it as UTF-8"),
        ("p.txt", None, "{path}: no such file"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_read_are_refused(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError) as info:
        read_prompts(str(path))
    assert str(info.value) == message.replace("{path}", str(path))


@pocket
def test_results_that_are_there_stay_until_new_ones_are_and_a_failed_request_is_a_failed_run(capsys, tmp_path):
    kept = tmp_path / "keep.jsonl"
    kept.write_text("precious\n")
    run = f'[run]\noutput = "{kept}"\nprompts = ["Once", "There"]\n'
    (tmp_path / "exp.toml").write_text(f'model = "/nonexistent"\n{run}')
    code, _, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"))
    assert code == 3 and kept.read_text() == "precious\n"
    (tmp_path / "exp.toml").write_text(run)
    (tmp_path / "stumbles.py").write_text(
        "from minivllm.core.interfaces.scheduler import SchedulerPolicy\n"
        "class Stumbles(SchedulerPolicy):\n"
        "    def order(self, head, running, now):\n        raise RuntimeError('boom')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        args = ("--set", "scheduler=stumbles:Stumbles", "--allow-target", "stumbles", *SMALL)
        code, _, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"), *args)
        for more in ((), ("--set", "sampling.n=2")):
            assert run_cli(capsys, "generate", "Once", *args, *more)[0] == 7
    finally:
        sys.path.remove(str(tmp_path))
    assert code == 7 and "2 of 2 requests failed" in err and "boom" in err and "Traceback" not in err
    assert len(kept.read_text().splitlines()) == 2


@pocket
def test_several_samples_are_printed_one_after_another(capsys):
    args = ("generate", "Once upon a time", "--set", "sampling.n=2", "--max-tokens", "4", *SMALL)
    code, out, _ = run_cli(capsys, *args)
    assert code == 0 and re.match(r"\[1\] .*\n\[2\] .*", out, re.S)


@pocket
def test_results_that_a_full_disk_cannot_hold_go_to_standard_output(tmp_path, capsys):
    prompts = '[run]\noutput = "/dev/full"\nprompts = ["Once", "There"]\n'
    (tmp_path / "exp.toml").write_text(f'model = "pocket"\n{prompts}[sampling]\nmax_tokens = 2\ntemperature = 0\n')
    code, out, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"), *SMALL)
    assert code == 5
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Once", "There"]
    assert "/dev/full: cannot be written: No space left on device; the results are on standard" in err


@pocket
def test_a_record_that_cannot_be_written_does_not_take_the_results_along(tmp_path, capsys, monkeypatch):
    (tmp_path / "exp.toml").write_text('model = "pocket"\n[run]\nprompts = ["Once"]\n[sampling]\nmax_tokens = 2\n')

    def full(self, *args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    record = ["--record", str(tmp_path / "record.json")]
    code, out, err = run_cli(capsys, "run", str(tmp_path / "exp.toml"), *SMALL, *record)
    assert code == 2
    assert json.loads(out)["prompt"] == "Once" and "the record cannot be written" in err


def test_ctrl_c_ends_a_command_with_130_also_while_its_flags_are_read(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("minivllm.cli.make_parser", interrupted)
    assert run_cli(capsys, "plugins") == (130, "", "\n")
