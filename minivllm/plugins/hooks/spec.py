"""Describe the built-in hooks."""

from minivllm.registration.spec import Needs, Spec

LIVE = Spec(
    impl="minivllm.plugins.hooks.live:Live",
    api=(1, 2),
    summary="queue, batch, cache and tokens per second in the terminal, as they change",
    options="minivllm.plugins.hooks.options:LiveOptions",
    needs=(Needs("rich", "13", 'pip install "minivllm[live]"'),),
)
OPENTELEMETRY = Spec(
    impl="minivllm.plugins.hooks.spans:Spans",
    api=(1, 2),
    summary="a span for each request with its queue, prefill and decode, in the client's trace",
    options="minivllm.plugins.hooks.options:SpansOptions",
    needs=(Needs("opentelemetry.sdk", "1.25", 'pip install "minivllm[otel]"', dist="opentelemetry-sdk"),),
)
STEP_LOG = Spec(
    impl="minivllm.plugins.hooks.step_log:StepLog",
    api=(1, 2),
    summary="a line of figures for each step, as CSV or JSON lines",
    options="minivllm.plugins.hooks.options:StepLogOptions",
)
