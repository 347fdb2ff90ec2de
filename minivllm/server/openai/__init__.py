"""OpenAI's API with the extensions of vLLM: bodies become requests of the engine, and its tokens become answers."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
Warnings = list[dict[str, str]]  # the warnings of an answer, each with a field and a message
