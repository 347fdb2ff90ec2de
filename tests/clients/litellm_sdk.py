# /// script
# dependencies = ["litellm>=1.70,<2"]
# ///
"""LiteLLM: three of its providers, a stream, and the error that it maps by the words of the message."""

import os
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

print("version litellm", version("litellm"))
URL, MODEL, KEY = os.environ["BASE_URL"] + "/v1", os.environ["MODEL"], os.environ["API_KEY"]
more = dict(api_base=URL, api_key=KEY, temperature=0, max_tokens=16)
ASK = [{"role": "user", "content": "What is 2 + 3?"}]
texts = []
for provider in ("hosted_vllm", "openai"):
    answer = litellm.completion(model=f"{provider}/{MODEL}", messages=ASK, **more)
    texts.append(answer.choices[0].message.content)
    assert answer.usage.completion_tokens > 0
    print("ok", provider)
assert texts[0] == texts[1]
chunks = litellm.completion(model=f"hosted_vllm/{MODEL}", messages=ASK, stream=True, **more)
assert "".join(c.choices[0].delta.content or "" for c in chunks) == texts[0]
print("ok streamed")
plain = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="The cat", **more)
assert plain.choices[0].text
print("ok text completion")
try:
    litellm.completion(model=f"hosted_vllm/{MODEL}", messages=[{"role": "user", "content": "word " * 20000}], **more)
except litellm.ContextWindowExceededError:
    print("ok context window")
else:
    raise AssertionError("a prompt that is too long")
