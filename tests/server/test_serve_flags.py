"""``minivllm serve``: vLLM's flags, the listening addresses (for TLS see test_tls.py), and the output of its start."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from http_helpers import GOLDEN, Running

from minivllm.cli import main, make_parser
from minivllm.cli.serve import ALSO, ENGINE, SERVER, SWITCHES, load
from minivllm.cli.vllm_flags import FAMILIES, REFUSED, SHORT, settled
from minivllm.config import EngineConfig, load_config
from minivllm.config.other_names import OPTIONS
from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError, ResourceError
from minivllm.server import logs
from minivllm.server.http import listening

CHATS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def serve_parser():
    choices = [action.choices for action in make_parser()._actions if isinstance(action.choices, dict)]
    return choices[0]["serve"]


def parsed(*flags):
    return make_parser().parse_args(["serve", *flags])


def loaded(*flags):
    return load(parsed(*flags))


def refused(capsys, *flags):
    """The one line with which flags are refused."""
    try:
        code = main(["serve", *flags])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("minivllm: error: ") and err.count("\n") == 1, (flags, err)
    return err


# ---- flags -----------------------------------------------------------------------------------------------------------

# vLLM's spelling -> the result (path of the option, value)
SERVED = {
    "--enable-prefix-caching": ("engine.enable_prefix_caching", True),
    "--no-enable-prefix-caching": ("engine.enable_prefix_caching", False),
    "--enable_prefix_caching": ("engine.enable_prefix_caching", True),
    "--enforce-eager": ("engine.enforce_eager", True),
    "--quantization int8": ("engine.quantizer.name", "int8"),
    "-q int8": ("engine.quantizer.name", "int8"),
    "--kv-cache-dtype auto": ("engine.kv_format.name", "auto"),
    "--kv-cache-dtype bfloat16": ("engine.kv_format.name", "bf16"),
    "--block-size 32": ("engine.kvcache_block_size", 32),
    "--num-gpu-blocks-override 99": ("engine.num_kvcache_blocks", 99),
    "--max-logprobs 7": ("engine.max_logprobs", 7),
    "--max-logprobs 8": ("server.max_logprobs", 8),
    "--max_model_len 512": ("engine.max_model_len", 512),
    "--max-num-seqs=5": ("engine.max_num_seqs", 5),
    "--gpu-memory-utilization 0.5": ("engine.gpu_memory_utilization", 0.5),
    "--dtype float16": ("engine.dtype", "float16"),
    "-tp 1": ("engine.tensor_parallel_size", 1),
    "--scheduling-policy priority": ("engine.scheduler.name", "priority"),
    "--tokenizer ./here": ("engine.tokenizer", "./here"),
    "--revision v1": ("engine.revision", "v1"),
    "--tokenizer-revision=v2": ("engine.tokenizer_revision", "v2"),
    "--download_dir ./models": ("engine.download_dir", "./models"),
    "--skip-tokenizer-init": ("engine.skip_tokenizer_init", True),
    "--load-format dummy": ("engine.load_format", "dummy"),
    "--chat-template ./t.jinja": ("engine.chat_template", "./t.jinja"),
    "--tool-call-parser json --enable-auto-tool-choice": ("server.tool_parser", "json"),
    "--uds /tmp/a.sock": ("server.uds", "/tmp/a.sock"),
    "--ssl-certfile c.pem --ssl-keyfile k.pem": ("server.ssl_keyfile", "k.pem"),
    "--ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2": ("server.ssl_cert_reqs", 2),
    '--allowed-origins ["http://a","http://b"]': ("server.allowed_origins", ["http://a", "http://b"]),
    "--allowed-origins http://a http://b": ("server.allowed_origins", ["http://a", "http://b"]),
    "--served-model-name a b": ("server.served_model_name", ["a", "b"]),
    '--override-generation-config {"temperature":0.5,"max_new_tokens":9}': ("sampling.max_tokens", 9),
    '--override-generation-config {"do_sample":false}': ("sampling.temperature", 0),
}


@pytest.mark.parametrize("flags", SERVED)
def test_a_flag_of_vllm_becomes_the_option_that_means_the_same(flags):
    path, want = SERVED[flags]
    found = loaded(*flags.split(" "))
    for name in path.split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == want


def test_every_flag_of_serve_is_an_option_by_the_same_name():
    options = {*EngineConfig.model_fields, "quantization", "kv_cache_dtype"}
    assert {name for name, *_ in (*ENGINE, *SWITCHES)} <= options and {name for name, *_ in SERVER} <= set(
        ServerConfig.model_fields
    )
    assert set(ALSO) <= {name for name, *_ in (*ENGINE, *SERVER)}


def test_flags_that_ask_for_what_is_so_anyway_are_noted_and_others_refused_by_name(capsys):
    for flag, (values, why) in settled().items():
        given = [f"--{flag}"] if values == [""] else [f"--{flag}", values[0]]
        assert parsed(*given).notes == [f"--{flag}: {why}"]
        if values != [""]:
            assert parsed(f"--{flag}={values[-1]}").notes and "leave" in refused(capsys, f"--{flag}", "9").replace(
                "start several", "leave"
            ).replace("here it is", "leave").replace("edit", "leave").replace("text or json", "leave")
    for flag, why in REFUSED.items():
        if flag not in settled():
            assert f"--{flag} is vLLM's: {why} (see" in refused(capsys, f"--{flag}", "x")
    for head, why in FAMILIES:
        if not any(flag.startswith(head) for flag in settled()):
            assert f"--{head}foo is vLLM's: {why} (see" in refused(capsys, f"--{head}foo")
    for short, flag in SHORT.items():
        assert flag in settled() or short in refused(capsys, short, "3")


def test_replacements_of_refused_options_and_flags_are_options_and_flags_that_exist():
    for name, hint in OPTIONS.items():
        for replacement in re.findall(r"(?:use|with|or) ([a-z_]+)=(?![a-z])", hint):
            own = {"use_tqdm", *EngineConfig.model_fields}
            assert replacement in own, (name, hint)
    flags = {flag for action in serve_parser()._actions for flag in action.option_strings}
    for why in {*REFUSED.values(), *(why for _, why in FAMILIES)}:
        assert flags.issuperset(re.findall(r"--[a-z][a-z-]+", why)), why


def test_an_image_or_a_stored_block_is_not_said_to_be_unknown():
    """Refusals that deny a part of the engine mislead more than an unknown name."""
    for name in ("limit_mm_per_prompt", "language_model_only"):
        assert "max_images" in OPTIONS[name] and "max_images" in REFUSED[name.replace("_", "-")]
    for name in ("kv_transfer_config", "kv_offloading_*"):
        assert "kvstore" in OPTIONS[name]
    assert "kvstore" in REFUSED["kv-transfer-config"] and "kvstore" in dict(FAMILIES)["kv-offloading"]
    assert "--admin" in REFUSED["enable-sleep-mode"] and "--replicas" in dict(FAMILIES)["data-parallel"]
    assert not [why for why in {*OPTIONS.values(), *REFUSED.values()} if "only text is served" in why]


def test_names_in_refusals_are_options_that_exist():
    for why in {*REFUSED.values(), *(why for _, why in FAMILIES)}:
        for word in why.split("--set ")[1:]:
            name = word.strip("'").split("=")[0].partition(".options")[0]
            table, _, inner = name.partition(".")
            assert (
                inner in ServerConfig.model_fields if table == "server" else name in (*EngineConfig.model_fields, "KEY")
            )


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--trust-remote-code"], "never run"),
        (["--prot", "1"], "Did you mean '--port'?"),
        (["--compilation-config.level", "3"], "--set graph="),
        (["-O3"], "--set graph="),
        (["--override-generation-config.temperature", "1"], "JSON object that has 'temperature'"),
        (["--override-generation-config", "[1]"], "expected a JSON object"),
        (["--override-generation-config", "{"], "expected a JSON object"),
        (["--override-generation-config", '{"temprature": 1}'], "Did you mean 'temperature'"),
        (["--override-generation-config", '{"do_sample": 3}'], "do_sample"),
        (["--override-generation-config", '{"max_tokens": 1, "max_new_tokens": 2}'], "expected only one of them"),
        (["--allowed-origins", "[1"], "JSON list"),
        (["--quantization", "hqq", "--port", "0"], "No quantizer is called 'hqq'"),
        (["--tool-call-parser", "hermse"], "Did you mean 'hermes'?"),
        (["--max-logprobs", "-1"], "server.max_logprobs=-1"),
        (["--uds", "/tmp/x", "--port", "1"], "set a Unix socket or an address, not both"),
        (["--ssl-keyfile", "k"], "without server.ssl_certfile"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "2"], "without server.ssl_ca_certs: set both, or neither"),
        (["--ssl-certfile", "c", "--ssl-ca-certs", "a"], "set it to 1 or 2"),
        (["--ssl-cert-reqs", "7"], "expected 0, 1 or 2"),
    ],
)
def test_what_is_wrong_with_flags_is_one_line_that_says_what_is_wanted(capsys, monkeypatch, flags, words):
    if flags[0] == "--quantization":  # found out when the parts are chosen
        code = main(["explain", "quantizer", "--set", "quantization=hqq"])
        assert code == 4 and words in capsys.readouterr().err
        return
    assert words in refused(capsys, "pocket", *flags)


# ---- chat templates --------------------------------------------------------------------------------------------------


def test_a_chat_template_takes_the_place_of_the_models(tmp_path):
    from minivllm.device.loading.hf_config import find_model
    from minivllm.runtime.text.tokenizer import load_tokenizer

    (tmp_path / "t.jinja").write_text(CHATS)
    (tmp_path / "a.toml").write_text('chat_template = "t.jinja"\n')
    found = load_config([tmp_path / "a.toml"]).engine.chat_template  # relative to the file that names it
    for given in (found, CHATS):
        made = load_tokenizer(find_model("pocket"), given)
        assert made.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "[user]Hi[assistant]"


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "huge", "broken", "none", "latin"])
def test_a_file_that_is_no_chat_template_is_refused_by_name_within_a_second(tmp_path, capsys, kind):
    path = tmp_path / "t.jinja"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(1 << 33)
    elif kind != "missing":
        path.write_bytes({"broken": b"{% if %}", "none": b"no template", "latin": b"\xff{{ a }}"}[kind])
    begin = time.process_time()
    assert "t.jinja" in refused(capsys, "pocket", "--port", "0", "--chat-template", str(path))
    assert time.process_time() - begin < 5


# ---- where it listens ------------------------------------------------------------------------------------------------


def test_a_unix_socket_serves_and_nothing_is_left_of_it(tmp_path):
    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)  # as a server that was killed leaves it
    server = Running(uds=path)
    try:
        assert server.url == f"unix:{path}"
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "pocket"
        assert server.events("/v1/completions", GOLDEN)[-1] == "[DONE]"
        with pytest.raises(ResourceError, match="another program listens there"):
            listening.bind(ServerConfig(uds=path))
        server.at_rest()
    finally:
        server.close()
    assert not os.path.exists(path)


def test_what_is_no_socket_is_never_replaced(tmp_path):
    for path in (tmp_path / "file", tmp_path, tmp_path / "link"):
        if path.name == "file":
            path.write_text("mine")
        elif path.name == "link":
            path.symlink_to(tmp_path / "file")
        with pytest.raises(ConfigError, match="is not a socket"):
            listening.bind(ServerConfig(uds=str(path)))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="at most 107 bytes"):
        listening.bind(ServerConfig(uds="/tmp/" + "x" * 200))
    with pytest.raises(ResourceError, match="choose another --uds"):
        listening.bind(ServerConfig(uds=str(tmp_path / "none" / "s.sock")))


def test_the_url_of_an_ipv6_address_has_brackets():
    server = ServerConfig(host="::1", port=0)
    try:
        bound = listening.bind(server)
    except ResourceError:
        pytest.skip("this machine has no IPv6")
    with bound:
        assert listening.url_of(server, bound) == f"http://[::1]:{bound.getsockname()[1]}"


# ---- what it says ----------------------------------------------------------------------------------------------------


def start(*flags, **streams):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-m", "minivllm", "serve", "pocket", "--max-model-len", "256", *flags]
    return subprocess.Popen(argv, env=env, **streams)


def test_a_terminal_is_told_in_sentences_what_goes_on(tmp_path):
    ours, theirs = pty.openpty()
    path = tmp_path / "s.sock"
    process = start("--uds", str(path), "--enable-auto-tool-choice", stdin=theirs, stderr=theirs, stdout=theirs)
    os.close(theirs)
    reported = b""
    try:
        while b"ready at" not in reported:
            reported += os.read(ours, 4096)
        while not reported.endswith(b"\n"):
            reported += os.read(ours, 4096)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/ready").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        os.close(ours)
    lines = [line for line in reported.decode().splitlines() if line.startswith("minivllm: ")]  # the others are bars
    note, loading, loaded, parsed, ready = (line.removeprefix("minivllm: ") for line in lines)
    assert note == "--enable-auto-tool-choice: tool_choice=auto is always served"
    assert loading == f"loading pocket; unix:{path} answers 503 until it is loaded"
    assert "KV cache holds" in loaded and "256" in loaded and parsed.startswith("replies are parsed as")
    assert "weights: " in reported.decode() and "\r" in reported.decode(), "there is a bar"
    assert ready.startswith(f"ready at unix:{path} as pocket (no key is required)")
    assert not path.exists()


def test_elsewhere_every_line_is_json_and_the_url_comes_when_it_is_ready():
    with start("--port", "0", "--enable-chunked-prefill", stderr=subprocess.PIPE, text=True) as process:
        rows = []
        while not rows or "url" not in rows[-1]:
            rows.append(json.loads(process.stderr.readline()))
        assert httpx.get(rows[-1]["url"] + "/ready", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        rows += [json.loads(line) for line in process.stderr]
        assert process.wait(60) == 0
    rows = [row for row in rows if row["message"] != "progress"]  # of a stage that took long
    assert [row["message"] for row in rows] == ["note", "loading", "loaded", "parser", "serving", "stopped"]
    assert rows[2]["kv_tokens"] > 256 == rows[2]["max_model_len"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_log_is_text_on_a_terminal_and_json_elsewhere_unless_it_is_chosen(monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    saved = {name: list(logs.logging.getLogger(name).handlers) for name in ("minivllm", "uvicorn.error", "asyncio")}
    try:
        for form, text in (("auto", terminal), ("text", True), ("json", False)):
            logs.set_up(form)
            (handler,) = logs.logging.getLogger("minivllm").handlers
            assert isinstance(handler.formatter, logs.TextLogLines if text else logs.JsonLines)
    finally:
        for name, handlers in saved.items():
            logs.logging.getLogger(name).handlers = handlers


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_the_version_is_printed(capsys, argv):
    import minivllm

    try:
        assert main(argv) == 0
    except SystemExit as end:
        assert not end.code
    assert capsys.readouterr().out == f"minivllm {minivllm.__version__}\n"


def test_the_mode_of_a_socket_follows_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        with listening.bind(ServerConfig(uds=str(tmp_path / "s"))):
            assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o700
    finally:
        os.umask(before)
