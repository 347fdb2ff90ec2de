"""The example of reinforcement learning: the reward rises, and both copies of the model agree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

FILE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


def test_the_reward_rises(monkeypatch):
    spec = importlib.util.spec_from_file_location("grpo", FILE)
    grpo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "grpo", grpo)
    spec.loader.exec_module(grpo)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        options = ["--batches", "6", "--group", "6", "--tokens", "24", "--lr", "1e-3"]
        curve = grpo.train(grpo.arguments(options))
    finally:
        torch.set_num_threads(threads)
    rewards = [reward for reward, _ in curve]
    assert sum(rewards[-2:]) > 1.5 * sum(rewards[:2]), rewards
    assert max(difference for _, difference in curve) < 1e-3
