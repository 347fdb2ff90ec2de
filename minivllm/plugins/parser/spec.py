"""Specs of the built-in parsers of replies."""

from minivllm.registration.spec import Spec

HERE = "minivllm.plugins.parser"


def _spec(target: str, summary: str) -> Spec:
    """Return the spec of a parser of this package."""
    impl = f"{HERE}.{target}"
    return Spec(impl, (1, 0), summary)


DEEPSEEK_R1 = _spec("deepseek_r1:DeepSeekR1", "DeepSeek R1 and V3: <think>, and calls as blocks of JSON")
DEEPSEEK_V31 = _spec("deepseek_r1:DeepSeekV31", "DeepSeek V3.1: <think>, and calls as JSON between tags")
GEMMA = _spec("gemma:Gemma", 'Gemma 4: the channel thought, and calls as call:NAME{key:<|"|>text<|"|>}')
GLM4 = _spec("glm4:Glm4Parser", "GLM 4.5: <think>, and arguments as <arg_key> and <arg_value>")
GPT_OSS = _spec("gpt_oss:GptOssParser", "gpt-oss (harmony): the channels analysis, commentary and final")
HERMES = _spec("hermes:Hermes", "Hermes and Qwen 2.5: calls as JSON in <tool_call>")
JSON = _spec("json:Json", "an answer that is nothing but a call, or a list of calls, in JSON")
LLAMA3_JSON = _spec("llama3_json:Llama3Json", "Llama 3: a call in JSON, with or without <|python_tag|>")
MISTRAL = _spec("mistral:MistralParser", "Mistral: [THINK], and calls after [TOOL_CALLS]")
PYTHONIC = _spec("pythonic:Pythonic", 'a list of calls in Python: [f(a=1), g(b="x")]')
QWEN3 = _spec("qwen3:Qwen3Parser", "Qwen3: <think>, and calls as JSON in <tool_call>")
QWEN3_CODER = _spec("qwen3_coder:Qwen3Coder", "Qwen3-Coder and Qwen3.5: <think>, and arguments as <parameter=KEY>")
