"""Scripts of ``benchmarks/``, each with a small load on the CPU.

A script reads private parts of the engine, so a change there can break it without a failure of any other test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACE = "synthetic:requests=40,rate=4"

# script: arguments; {tmp} is an empty folder
SMALL = {
    "attacks": "--seconds 1 --connections 1 --only unknown",
    "blocks": "--blocks 100 --total 4096 --seconds 1",
    "compression_quality": "--cases 2 --scorers knorm streaming",
    "cpu_steps": "--prompt 16 --out 8 --batch 1 --repeat 1",
    "cpu_vs_transformers": "--requests 2 --prompt 8 --out 8 --repeat 1",
    "decoders": "--rows 8 --draws 4096",
    "drafted_host": "--rows 4 --k 2 --tokens 16",
    "drafted_steps": "--model pocket --head pocket-mtp --device cpu --real --stories 1 --turns 1 --k 2 --batches 1",
    "early_tokens": f"--model pocket --trace {TRACE} --rounds 1",
    "embeddings": "--model pocket --texts 2 --tokens 16 --device cpu --repeat 1",
    "equality": "--heads gqa --dtypes float32",
    "evictors": "--blocks 2000 lru cost-aware",
    "first_token": "--repeat 1",
    "hooks": "--rows 4 --steps 20 --rounds 1",
    "host_step": "logprobs --rows 8 --tokens 16 --rounds 1",
    "http_offline": "--streams 2 --prompt 8 --tokens 8 --turns 1",
    "image_checkpoint": "{tmp}/image --tiny",
    "live_page": "--executor sim --rows 4 --pairs 1 --seconds 1",
    "partial_hits": f"{TRACE} --requests 20 --block 64 --tokens 20000",
    "plan_step": "--policy fcfs --rows 16 --waiting 0 --steps 20",
    "plugin_overhead": "--steps 200",
    "predicted_lengths": f"{TRACE} --requests 20",
    "process_step": "--rows 1 --steps 20 --rounds 1",
    "prompt_lengths": "--lengths 16 --repeat 1",
    "rank_deaths": "--times 1 --ranks 2 --faults Ctrl-C",
    "rank_equality": "--only qwen3 --ranks 1 2 --prompts 2 --tokens 4",
    "ranks_speed": "--shape tiny --device cpu --ranks 1 2 --rows 1 --prompt 16 --steps 4",
    "replicas": "speed --replicas 2 --rounds 1",
    "reply_parsers": "",
    "routers": f"{TRACE} prefix --replicas 2 --blocks 2000",
    "serving": "--model pocket --streams 2 --rounds 1 --tokens 8 --prompt 8 --offline",
    "sessions": "--seeds 1 --requests 40",
    "soak": "--minutes 0.1 --clients 2 --every 2 --csv {tmp}/soak.csv",
    "speculate": "--batches 1 --turns 1 --max-tokens 16",
    "startup": "--plugins 2 --repeat 1",
    "tier_choices": "--choices 2 --repeats 1 --speeds 100 --prompts 40 80",
    "tier_speed": "--parts prefix --model pocket --prompt 256 --count 2 --turns 1 --bytes 1e8",
    "tier_turns": "--model minivllm/pocket/model --cases device tier --users 2 --turns 2 --begin 1 --new 8 --output 8",
    "tokenizer_pool": "--prompts 4 --characters 400 --rounds 1",
    "validate_simulator": "--seconds 2 --requests 10 --repeats 1 --skip ranking",
    "weights": "--model minivllm/pocket/model --dtype float32 --device cpu --repeat 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_with_a_small_load(name, tmp_path):
    command = [sys.executable, f"benchmarks/{name}.py", *SMALL[name].format(tmp=tmp_path).split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
