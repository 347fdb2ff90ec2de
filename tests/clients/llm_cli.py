# /// script
# dependencies = ["llm>=0.26,<1"]
# ///
"""The ``llm`` command line: a prompt, a stream, a schema, a completion model."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

print("version llm", version("llm"))
folder = Path.home() / "llm"
folder.mkdir()
(folder / "extra-openai-models.yaml").write_text(
    "\n".join(
        f"- model_id: {name}\n  model_name: {os.environ['MODEL']}\n  api_base: {os.environ['BASE_URL']}/v1\n"
        f"  api_key_name: mini\n  {extra}"
        for name, extra in (("mini", "supports_schema: true"), ("mini-text", "completion: true"))
    )
)
environ = {**os.environ, "LLM_USER_PATH": str(folder)}


def llm(*args):
    done = subprocess.run(
        [sys.executable, "-m", "llm", *args], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


llm("keys", "set", "mini", "--value", os.environ["API_KEY"])
options = ["-o", "temperature", "0", "-o", "max_tokens", "60"]
whole = llm("-m", "mini", "--no-stream", *options, "What is 2 + 3?")
assert whole
print("ok prompt")
assert llm("-m", "mini", *options, "What is 2 + 3?") == whole
print("ok stream")
schema = {
    "type": "object", "required": ["total", "even"], "additionalProperties": False,
    "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 99}, "even": {"type": "boolean"}},
}  # fmt: skip
shaped = llm("-m", "mini", "--no-stream", *options, "--schema", json.dumps(schema), "Add.")
assert set(json.loads(shaped)) == {"total", "even"}
print("ok schema")
short = llm(
    "-m", "mini", "--no-stream", *options, "--schema", "even bool, odd bool", "Add."
)  # which leaves others open
assert set(json.loads(short)) == {"even", "odd"}
print("ok schema in short")
assert llm("-m", "mini-text", *options, "The cat")
print("ok completion")
