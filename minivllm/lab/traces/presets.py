"""Parameters of the generator for known kinds of traffic: ``synthetic:like=azure-conversation,requests=1000``.

They are like the traces in their medians, not in their whole distributions; whoever has the trace itself uses that.
"""

from __future__ import annotations

from collections.abc import Mapping

# What is shared is drawn as a tree of beginnings, so a preset's prompt is depth * node + questions and answers so far.
PRESETS: Mapping[str, Mapping[str, float]] = {
    # median prompt 1,020 and answer 129 tokens: Patel et al., "Splitwise", ISCA 2024, of Azure's traces of 2023
    "azure-conversation": dict(rate=5, burst=1, turns=1, depth=0, question=1020, answer=129, spread=0.9),
    # median prompt 1,500 and answer 13 tokens, in bursts: the same
    "azure-code": dict(rate=2.5, burst=6, turns=1, depth=0, question=1500, answer=13, spread=0.8),
    # prompts of 12,035 and answers of 343 tokens in the mean, sessions that go on: the README of its traces
    "mooncake-conversation": dict(
        rate=1.2, burst=1, turns=3, think=90, depth=1, fan=200, node=4000, question=3000, answer=250, longest=120_000
    ),
    # a median of 33 turns, contexts from 12 thousand to 80 thousand tokens, 131 tokens in for each out, tools answer
    # within seconds: what vLLM's post says of 610 agentic sessions
    "agent": dict(
        rate=0.05, burst=1, turns=33, think=8, depth=1, fan=4, node=11000, question=1300, answer=350, longest=200_000
    ),
    # short questions after one of few system prompts, many turns: what a chat of today looks like
    "chat": dict(rate=3, burst=2, turns=4, think=30, depth=1, fan=8, node=600, question=60, answer=250),
    # as ``chat``, of a size that the packaged model serves on a CPU
    "pocket": dict(
        rate=8, burst=1, turns=2, think=2, depth=1, fan=8, node=60, question=40, answer=40, spread=0.6, longest=1000
    ),
}
