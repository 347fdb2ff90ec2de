"""Translate the flags of ``vllm serve`` that ``minivllm serve`` does not have by the same name.

No flag is accepted and ignored.  A flag for behaviour that minivllm always has is dropped with a note.  All other ones
are refused with a message that names the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

from minivllm.errors import ConfigError, suggest

# lines "fact <- flags": because of the fact these flags have no effect; each flag has the value for which the fact
# holds, and a flag without a value is a switch
_SETTLED = """\
tool_choice=auto is always served <- enable-auto-tool-choice
usage always has them <- enable-prompt-tokens-details
/tokenizer_info is always there <- enable-tokenizer-info-endpoint
answers always have X-Request-Id <- enable-request-id-headers
no prompt is ever logged <- disable-log-requests no-enable-log-requests
no answer is ever logged <- no-enable-log-outputs
tools are not shown to the model with tool_choice=none <- exclude-tools-when-tool-choice-none
answers are the assistant's <- response-role=assistant
parts of text are joined, or kept where the template reads parts <- chat-template-content-format=auto
uvicorn's warnings are logged <- uvicorn-log-level=warning
system_fingerprint is null <- fingerprint-mode=none
"""
# lines "replacement <- refused flags of vLLM"; a final * stands for all flags with this beginning
_REFUSED = """\
the code of a model's directory is never run, and README.md names the models that are built in <- trust-remote-code
a package adds a parser (docs/plugins/parser.md), and --tool-parser names it <- tool-parser-plugin \
    reasoning-parser-plugin
tools are the client's to run: leave it out <- tool-server
the log has no prompt and no answer; --log-format says text or json <- enable-log-requests enable-log-outputs \
    max-log-len log-config-file uvicorn-log-level
what fails is always logged with its traceback <- log-error-stack
the log has a line for each request; 2>/dev/null drops it <- disable-uvicorn-access-log
polls of /health, /ready and /metrics that succeed are not logged <- disable-access-log-for-endpoints
GET and POST may come with any header, from the pages that --allowed-origins names <- allowed-methods allowed-headers \
    allow-credentials
here it is --stats-interval 0 <- disable-log-stats
here it is --set server.max_header_bytes=N and server.max_body_bytes=N <- h11-max-incomplete-event-size
here it is --set server.max_headers=N <- h11-max-header-count
there are no pages of documents, and /openapi.json needs a key as the other routes do <- disable-fastapi-docs
restart the server for another certificate <- enable-ssl-refresh
clients ask for it with stream_options={"include_usage": true} <- enable-force-include-usage
clients send chat_template_kwargs; or write the values into a --chat-template <- default-chat-template-kwargs
no template comes from a request: here it is --chat-template FILE <- trust-request-chat-template
here it is --set grammar=llguidance or xgrammar <- guided-decoding-backend structured-outputs-config
here it is --set attention=sdpa, triton, flash_attn or flashinfer <- attention-backend
here it is --set attention=NAME and --set attention.options.KEY=VALUE <- attention-config
here it is --set drafter=ngram (or model) with --set num_speculative_tokens=N: see docs/speculative.md <- \
    num-speculative-tokens spec-decoding-acceptance-method speculative-* ngram-prompt-lookup*
here it is --set 'processors=[...]', a list of plug-ins <- logits-processors
functions come from Python only <- logits-processor-pattern
here it is --set executor=NAME <- distributed-executor-backend worker-cls worker-extension-cls
here it is --set scheduler=NAME <- scheduler-cls
here it is --set run_ahead=0 <- no-async-scheduling
here it is --set scheduler=static, or prefill-first <- no-enable-chunked-prefill
here it is --num-gpu-blocks-override N, in blocks <- kv-cache-memory-bytes
here it is --set graph=auto, mixed, decode or off, or --enforce-eager <- compilation-config optimization-level \
    cudagraph-capture-sizes max-cudagraph-capture-size cuda-graph-sizes max-seq-len-to-capture
here it is --hf-overrides JSON, with that key of config.json <- rope-scaling rope-theta disable-sliding-window
edit config.json in the model's directory, or --hf-overrides JSON <- hf-config-path config-format
the code of a model's repository is never run: leave it out <- code-revision
only safetensors, configuration and tokenizer are fetched: leave it out <- ignore-patterns
set HF_TOKEN <- hf-token
here it is --set 'hooks=["opentelemetry"]' with OTEL_EXPORTER_OTLP_ENDPOINT: see docs/hooks.md <- otlp-traces-endpoint \
    collect-detailed-traces
adapters are in the dtype of the model: leave it out <- lora-*
merge the adapter into the weights <- fully-sharded-loras qlora-adapter-name-or-path enable-prompt-adapter
here it is --set max_images=N, the largest number of images of a request; 0 means text only <- limit-mm-per-prompt \
    language-model-only
images come as data in a request, and no path or URL is opened: leave it out <- allowed-local-media-path \
    allowed-media-domains
here it is --set image_cache_mb=N, MiB of image features on the device <- disable-mm-preprocessor-cache \
    mm-processor-cache-*
the checkpoint's own encoder and image processor are used: leave it out <- media-io-kwargs interleave-mm-strings \
    skip-mm-profiling mm-*
requests have token ids, text or images: leave it out <- enable-mm-embeds enable-prompt-embeds
here it is --set kvstore=cpu, or disk: see docs/tiers.md <- kv-transfer-config kv-offloading*
here it is --admin, whose routes include /sleep and /wake_up <- enable-sleep-mode
models generate: leave it out <- task runner convert
preempted requests are computed again: leave it out <- preemption-mode
schedulers decide it: see docs/scheduling.md <- long-prefill-token-threshold max-num-partial-prefills \
    max-long-partial-prefills
minivllm has nothing like it: leave it out <- disable-cascade-attn calculate-kv-scales \
    prefix-caching-hash-algo enable-offline-docs model-loader-extra-config use-tqdm-on-load pt-load-map-location \
    safetensors-load-strategy enable-flash-late-interaction kv-events-config \
    kv-sharing-fast-prefill tokens-only pooler-config override-pooler-config io-processor-plugin renderer-num-workers \
    num-lookahead-slots scheduler-delay-factor stream-interval fingerprint-value mamba-* offload-* \
    cpu-offload* swap-space* multi-step* tokenizer-pool* fingerprint-* chat-template-content* \
    response-role* override-neuron*
here it is --replicas N, engines behind one address: see docs/replicas.md <- data-parallel*
here it is --tensor-parallel-size N, devices that share the model: see docs/tensor-parallelism.md <- \
    enable-expert-parallel pipeline-parallel* decode-context-parallel* prefill-context-parallel* dcp-*
here it is --set executor=ray for several machines: see docs/tensor-parallelism.md <- headless master-addr \
    master-port node-rank nnodes*
one process receives all requests: leave it out <- api-server*
minivllm has no equivalent: leave it out <- enable-eplb enable-dbo disable-custom-all-reduce ray-workers-use-nsight \
    eplb-* dbo-* numa-* all2all-* enable-elastic*
here it is /metrics <- enable-server-load-tracking show-hidden-metrics-for-version
here it is /metrics, and the log's line of each request <- enable-per-request-metrics
clients ask for it <- return-tokens-as-token-ids
the engine always runs in a process of its own <- disable-frontend-multiprocessing
here it is --set KEY=VALUE <- additional-config
write the key without its passphrase: openssl pkey -in KEY -out PLAIN <- ssl-keyfile-password
reasoning needs no further setting: leave it out <- reasoning-*
"""


def _rows(text: str) -> list[tuple[str, str]]:
    """Return (flag, text before the arrow) for each flag in a table of lines ``text <- flags``."""
    rows = []
    for line in text.splitlines():
        reason, flags = line.split(" <- ")
        rows += [(flag, reason) for flag in flags.split()]
    return rows


def _as_flag(name: str, values: list[str], reason: str) -> tuple[str, tuple[list[str], str]]:
    """Return the flag of an option without effect, with (the accepted values, the reason).

    An option that accepts only True or only False becomes a switch.
    """
    flag = name.replace("_", "-")
    if values == ["True"]:
        return flag, ([""], reason)
    if values == ["False"]:
        return f"no-{flag}", ([""], reason)
    return flag, (values, reason)


# as flags of a server, these names have another meaning than as options
SERVER_ONLY = ("disable_log_requests", "disable_log_stats")


@cache
def settled() -> dict[str, tuple[list[str], str]]:
    """Return (accepted values, reason) of each flag for behaviour that minivllm always has, by flag."""
    from minivllm.config.other_names import NEUTRAL  # imported here, because the module imports pydantic

    flags = dict(_as_flag(name, *neutral) for name, neutral in NEUTRAL.items() if name not in SERVER_ONLY)
    for flag, reason in _rows(_SETTLED):
        name, _, values = flag.partition("=")
        flags[name] = (values.split("|"), reason)
    return flags


_REFUSED_ROWS = _rows(_REFUSED)
REFUSED = {flag: reason for flag, reason in _REFUSED_ROWS if flag[-1] != "*"}
FAMILIES = [(flag[:-1], reason) for flag, reason in _REFUSED_ROWS if flag[-1] == "*"]
_SHORT = "pp:pipeline-parallel-size dp:data-parallel-size dcp:decode-context-parallel-size ep:enable-expert-parallel"
_SHORT += " pcp:prefill-context-parallel-size asc:api-server-count cc:compilation-config ac:attention-config"
_SHORT += " sc:speculative-config O:optimization-level O0:optimization-level O1:optimization-level"
_SHORT += " O2:optimization-level O3:optimization-level"
SHORT = {f"-{short}": flag for short, _, flag in (pair.partition(":") for pair in _SHORT.split())}


def translate(argv: Sequence[str], known: Collection[str], note: Callable[[str], None]) -> list[str]:
    """Return the arguments of ``serve`` with ``-`` for ``_`` in flags, and without vLLM's flags that have no effect.

    ``known`` are the flags of ``minivllm serve``.  ``note`` is called with a sentence for each flag that is dropped.
    ConfigError for all other flags of vLLM, and for unknown flags.
    """
    kept: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*kept, word, *words]
        if word[:2] != "--" and word not in SHORT:
            kept.append(word)
            continue
        written, equals, value = word.partition("=")
        name = SHORT.get(written) or written[2:].replace("_", "-")
        flag, _, key = name.partition(".")  # vLLM writes --FLAG.KEY for an item of a JSON flag
        if f"--{name}" in known or (not key and any(own.startswith(f"--{name}") for own in known)):
            kept.append(f"--{name}{equals}{value}")
            continue
        if key and f"--{flag}" in known:
            raise ConfigError(f"{written}: expected --{flag} with a JSON object that has {key!r}")
        if key or flag not in settled():
            reason = _instead_of(flag)
            if reason:
                raise ConfigError(f"{written} is vLLM's: {reason}")
            raise ConfigError(f"unknown flag {written[:80]}.{suggest(written, known)}")
        accepted, reason = settled()[flag]
        if accepted != [""] and not equals:
            value = words.pop(0) if words else ""
        if value not in accepted:
            raise ConfigError(f"{written} {value}: {_instead_of(flag)}")
        note(f"{written}: {reason}")
    return kept


def _instead_of(flag: str) -> str:
    """Return advice that replaces a flag of vLLM, "" for a flag that vLLM does not have."""
    if reason := REFUSED.get(flag):
        return reason
    for start, reason in FAMILIES:
        if flag.startswith(start):
            return reason
    if flag.startswith("no-"):
        positive = flag[3:]
        return f"{settled()[positive][1]}: leave it out" if positive in settled() else _instead_of(positive)
    return f"{settled()[flag][1]}: leave it out" if flag in settled() else ""
