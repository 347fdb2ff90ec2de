"""Tests of attention over many rows, heads and keys, which may exceed a grid, a mask or a table of partial sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .base import since

ROWS = 40  # number of rows of a step
PROMPT = 1100  # tokens of a long prompt
CONTEXT = 9000  # tokens of a long context
WINDOWS = (33, 64, 100, 130)  # tokens


class AttentionSizes:
    """The tests of large sizes, a base class of ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        plain: Any
        run: Any
        space: Any

    @since(1, 0)
    def test_many_rows_of_a_step_get_their_own(self) -> None:
        """Check a step of 32 decode rows and 8 chunks of different lengths: each row gets its own result."""
        decode = [(1 + 7 * i % 45, 1) for i in range(ROWS - 8)]
        chunks = [(5 * i % 23, 2 + i % 7) for i in range(8)]
        self.run(self.plain(), decode + chunks)

    @since(1, 0)
    def test_many_heads_have_keys_of_their_own(self) -> None:
        """Check 8 KV heads, which most models have, and 20 and 33 KV heads."""
        found = [self.space.plain(kv_heads=n) for n in (8, 20, 33)]
        if not any(found):
            pytest.skip("no setting with 8 KV heads is claimed")
        for setting in filter(None, found):
            self.run(setting, [(0, 9), (21, 1), (13, 3)])

    @since(1, 0)
    def test_long_prompts_and_contexts(self) -> None:
        """Check a prompt of 1,100 tokens, a chunk of 600 tokens after 90 others, and a decode row of 9,000 keys."""
        setting = self.plain(kv_heads=1)
        self.run(setting, [(0, PROMPT), (3, 1)])
        self.run(setting, [(90, 600), (2, 2)])
        self.run(setting, [(CONTEXT, 1), (5, 1)])

    @since(1, 0)
    def test_a_window_of_any_length_is_exact(self) -> None:
        """Check windows of 33 to 130 tokens in longer rows (``window``), so that a window may start within a tile."""
        if not self.claims("window"):
            pytest.skip("not claimed: window")
        for window in WINDOWS:
            rows = [(300, 1), (129, 3), (0, 150), (window - 1, 1)]
            self.run(self.plain(kv_heads=1, window=window), rows)
