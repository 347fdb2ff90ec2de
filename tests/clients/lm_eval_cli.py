# /// script
# dependencies = ["lm-eval[api]>=0.4.9,<0.5", "torch==2.13.0"]
# ///
"""lm-evaluation-harness over its ``local-completions`` model, offline: log-likelihoods of given continuations."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

print("version lm-eval", version("lm-eval"))
rows = [
    {"question": f"What is {a} + {b}?", "choices": [str(a + b), str(a + b + 11)], "answer": 0}
    for a in range(2, 6)
    for b in (1, 3)
]
Path("sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
Path("sums.yaml").write_text(
    """task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: sums.jsonl
output_type: multiple_choice
test_split: test
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
)
arguments = ",".join(
    (
        f"model={os.environ['MODEL']}",
        f"base_url={os.environ['BASE_URL']}/v1/completions",
        "tokenizer_backend=remote",
        f"auth_token={os.environ['API_KEY']}",
        "num_concurrent=4",
        "max_length=512",
    )
)
done = subprocess.run(
    [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks",
     "sums", "--include_path", ".", "--output_path", "out"],
    env={**os.environ, "OPENAI_API_KEY": os.environ["API_KEY"], "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    capture_output=True, text=True, timeout=500,
)  # fmt: skip
assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
results = json.loads(next(Path("out").rglob("results_*.json")).read_text())["results"]["sums"]
assert 0.0 <= results["acc,none"] <= 1.0, results
print("ok log-likelihoods of", len(rows), "questions, accuracy", results["acc,none"])
