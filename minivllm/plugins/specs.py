"""The built-in plug-ins: (seam, name, where its Spec is).  Strings only, sorted, so that listing them costs nothing."""

BUILTINS: tuple[tuple[str, str, str], ...] = (
    ("attention", "sdpa", "minivllm.plugins.attention.spec:SDPA"),
    ("attention", "triton", "minivllm.plugins.attention.spec:TRITON"),
    ("evictor", "lru", "minivllm.plugins.evictor.spec:LRU"),
    ("executor", "local", "minivllm.plugins.executor.spec:LOCAL"),
    ("hooks", "live", "minivllm.plugins.hooks.spec:LIVE"),
    ("hooks", "step_log", "minivllm.plugins.hooks.spec:STEP_LOG"),
    ("kvformat", "bf16", "minivllm.plugins.kvformat.spec:BF16"),
    ("kvformat", "fp16", "minivllm.plugins.kvformat.spec:FP16"),
    ("kvformat", "fp32", "minivllm.plugins.kvformat.spec:FP32"),
    ("model", "llama", "minivllm.plugins.model.spec:LLAMA"),
    ("model", "qwen2", "minivllm.plugins.model.spec:QWEN2"),
    ("model", "qwen3", "minivllm.plugins.model.spec:QWEN3"),
    ("processor", "logit_bias", "minivllm.plugins.processor.spec:LOGIT_BIAS"),
    ("processor", "penalties", "minivllm.plugins.processor.spec:PENALTIES"),
    ("quantizer", "int8", "minivllm.plugins.quantizer.spec:INT8"),
    ("quantizer", "none", "minivllm.plugins.quantizer.spec:NONE"),
    ("sampler", "default", "minivllm.plugins.sampler.spec:DEFAULT"),
    ("scheduler", "fcfs", "minivllm.plugins.scheduler.spec:FCFS"),
    ("strategy", "parallel", "minivllm.plugins.strategy.spec:PARALLEL"),
    ("strategy", "single", "minivllm.plugins.strategy.spec:SINGLE"),
)
