"""The flags of ``vllm serve`` that ``minivllm serve`` does not have by the same name.

None is accepted and ignored: what asks for what is the case anyway is noted, all else is refused, with what does the
same here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache

from minivllm.errors import ConfigError, suggest

# why what a flag asks for is so anyway <- flags, with the values for which that holds (none: it is a switch)
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
# what to do instead <- flags of vLLM; * ends one that stands for all that begin so
_REFUSED = """\
the code of a model's directory is never run, and README.md names the models that are built in <- trust-remote-code
minivllm.server.openai.tools.register adds a parser, from Python <- tool-parser-plugin
tools are the client's to run: leave it out <- tool-server
answers are not divided into reasoning and content: leave it out <- reasoning-parser
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
adapters are not served: merge the adapter into the weights <- enable-lora max-loras max-lora-rank max-cpu-loras \
    fully-sharded-loras qlora-adapter-name-or-path enable-prompt-adapter lora-*
only text is served <- limit-mm-per-prompt disable-mm-preprocessor-cache allowed-local-media-path media-io-kwargs \
    enable-mm-embeds interleave-mm-strings mm-*
models generate: leave it out <- task runner convert
preempted requests are computed again: leave it out <- preemption-mode
schedulers decide it: see docs/scheduling.md <- long-prefill-token-threshold max-num-partial-prefills \
    max-long-partial-prefills
minivllm has nothing like it: leave it out <- disable-cascade-attn enable-sleep-mode calculate-kv-scales \
    prefix-caching-hash-algo enable-offline-docs model-loader-extra-config use-tqdm-on-load pt-load-map-location \
    safetensors-load-strategy enable-flash-late-interaction kv-transfer-config kv-events-config \
    kv-sharing-fast-prefill tokens-only pooler-config override-pooler-config io-processor-plugin renderer-num-workers \
    num-lookahead-slots scheduler-delay-factor stream-interval fingerprint-value mamba-* offload-* kv-offloading* \
    cpu-offload* swap-space* multi-step* tokenizer-pool* tokenizer-mode* fingerprint-* chat-template-content* \
    response-role* override-neuron*
one process serves one model on one device: start several, and a proxy before them <- enable-expert-parallel \
    enable-eplb enable-dbo headless master-addr master-port node-rank disable-custom-all-reduce ray-workers-use-nsight \
    data-parallel* pipeline-parallel* decode-context-parallel* nnodes* prefill-context-parallel* dcp-* eplb-* dbo-* \
    numa-* api-server* all2all-* enable-elastic*
here it is /metrics <- enable-server-load-tracking show-hidden-metrics-for-version
here it is /metrics, and the log's line of each request <- enable-per-request-metrics
clients ask for it <- return-tokens-as-token-ids
the engine always runs in a process of its own <- disable-frontend-multiprocessing
here it is --set KEY=VALUE <- additional-config
write the key without its passphrase: openssl pkey -in KEY -out PLAIN <- ssl-keyfile-password
see --reasoning-parser: leave it out <- reasoning-*
"""


def _rows(text: str) -> list[tuple[str, str]]:
    """(flag, why) of each line."""
    pairs = (line.split(" <- ") for line in text.splitlines())
    return [(flag, why) for why, flags in pairs for flag in flags.split()]


def _switches(name: str, values: list[str], why: str) -> tuple[str, tuple[list[str], str]]:
    """Return the flag of a neutral option, with its values; an option that is True or False becomes a switch."""
    flag = name.replace("_", "-")
    if values in (["True"], ["False"]):
        return flag if values == ["True"] else f"no-{flag}", ([""], why)
    return flag, (values, why)


SERVER_ONLY = ("disable_log_requests", "disable_log_stats")  # these flags mean something else to a server


@cache
def settled() -> dict[str, tuple[list[str], str]]:
    """Return the accepted values and the reason of each flag that asks for what is the case anyway."""
    from minivllm.config.other_names import NEUTRAL  # which imports pydantic

    found = dict(_switches(name, *neutral) for name, neutral in NEUTRAL.items() if name not in SERVER_ONLY)
    own = ((flag.partition("="), why) for flag, why in _rows(_SETTLED))
    return found | {name: (values.split("|"), why) for (name, _, values), why in own}


REFUSED = {flag: why for flag, why in _rows(_REFUSED) if flag[-1] != "*"}
FAMILIES = [(flag[:-1], why) for flag, why in _rows(_REFUSED) if flag[-1] == "*"]
_SHORT = "pp:pipeline-parallel-size dp:data-parallel-size dcp:decode-context-parallel-size ep:enable-expert-parallel"
_SHORT += " pcp:prefill-context-parallel-size asc:api-server-count cc:compilation-config ac:attention-config"
_SHORT += " sc:speculative-config O:optimization-level O0:optimization-level O1:optimization-level"
_SHORT += " O2:optimization-level O3:optimization-level"
SHORT = {f"-{short}": flag for short, _, flag in (pair.partition(":") for pair in _SHORT.split())}


def translate(argv: Sequence[str], known: Collection[str], note: Callable[[str], None]) -> list[str]:
    """The arguments of ``serve`` without those of vLLM's flags that are settled here, each of which is noted, and with
    ``-`` for ``_`` in names.  ``known``: our own flags.  ConfigError for vLLM's others, and for what nobody knows."""
    left: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*left, word, *words]
        if word[:2] != "--" and word not in SHORT:
            left.append(word)
            continue
        given, equals, value = word.partition("=")
        name = SHORT.get(given) or given[2:].replace("_", "-")
        flag, _, key = name.partition(".")  # vLLM's way to write an item of a JSON flag
        if f"--{name}" in known or (not key and any(own.startswith(f"--{name}") for own in known)):
            left.append(f"--{name}{equals}{value}")
        elif key and f"--{flag}" in known:
            raise ConfigError(f"{given}: want --{flag} with a JSON object that has {key!r}")
        elif (accepted := settled().get(flag)) is not None and not key:
            if accepted[0] != [""] and not equals:
                value = words.pop(0) if words else ""
            if value not in accepted[0]:
                raise ConfigError(f"{given} {value}: {_why(flag)}")
            note(f"{given}: {accepted[1]}")
        elif why := _why(flag):
            raise ConfigError(f"{given} is vLLM's: {why}")
        else:
            raise ConfigError(f"unknown flag {given[:80]}.{suggest(given, known)}")
    return left


def _why(flag: str) -> str:
    """What to do instead of one of vLLM's flags; "" for a flag that it does not have."""
    why = REFUSED.get(flag) or next((text for head, text in FAMILIES if flag.startswith(head)), "")
    if not why and flag.startswith("no-"):
        positive = flag[3:]
        return f"{settled()[positive][1]}: leave it out" if positive in settled() else _why(positive)
    return why or (f"{settled()[flag][1]}: leave it out" if flag in settled() else "")
