"""Parameters of the generator for known kinds of traffic: ``synthetic:like=azure-conversation,requests=1000``.

A preset matches the published medians or means of a trace, not its whole distribution.  Use the trace itself where you
have it.
"""

from __future__ import annotations

from collections.abc import Mapping

# The expected prompt is ``depth * node`` tokens of shared prefix, and the questions and answers of the turns so far.
PRESETS: Mapping[str, Mapping[str, float]] = {
    # median prompt 1,020 and median answer 129 tokens: Azure's traces of 2023 (Patel et al., "Splitwise", ISCA 2024)
    "azure-conversation": {
        "rate": 5,
        "burst": 1,
        "turns": 1,
        "depth": 0,
        "question": 1020,
        "answer": 129,
        "spread": 0.9,
    },
    # median prompt 1,500 and median answer 13 tokens, in bursts: also Azure's traces of 2023
    "azure-code": {"rate": 2.5, "burst": 6, "turns": 1, "depth": 0, "question": 1500, "answer": 13, "spread": 0.8},
    # mean prompt 12,035 and mean answer 343 tokens, sessions of several turns: the README of Mooncake's traces
    "mooncake-conversation": {
        "rate": 1.2,
        "burst": 1,
        "turns": 3,
        "think": 90,
        "depth": 1,
        "fan": 200,
        "node": 4000,
        "question": 3000,
        "answer": 250,
        "longest": 120_000,
    },
    # median of 33 turns, contexts of 12,000 to 80,000 tokens, 131 input tokens for each output token, tool calls that
    # take seconds: a post of the vLLM project about 610 agentic sessions
    "agent": {
        "rate": 0.05,
        "burst": 1,
        "turns": 33,
        "think": 8,
        "depth": 1,
        "fan": 4,
        "node": 11000,
        "question": 1300,
        "answer": 350,
        "longest": 200_000,
    },
    # short questions after one of a few system prompts, several turns: an assumption about chats, without a source
    "chat": {
        "rate": 3,
        "burst": 2,
        "turns": 4,
        "think": 30,
        "depth": 1,
        "fan": 8,
        "node": 600,
        "question": 60,
        "answer": 250,
    },
    # like ``chat``, but small enough for the packaged model on a CPU
    "pocket": {
        "rate": 8,
        "burst": 1,
        "turns": 2,
        "think": 2,
        "depth": 1,
        "fan": 8,
        "node": 60,
        "question": 40,
        "answer": 40,
        "spread": 0.6,
        "longest": 1000,
    },
}
