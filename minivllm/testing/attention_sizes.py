"""Attention beyond the sizes at which a grid, a mask or a table of partial sums would end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from .base import since

ROWS = 40  # of a step
PROMPT, CONTEXT = 1100, 9000  # tokens
WINDOWS = (33, 64, 100, 130)  # tokens


class AttentionSizes:
    """Part of ``AttentionConformance``."""

    if TYPE_CHECKING:
        claims: Any
        plain: Any
        run: Any
        space: Any

    @since(1, 0)
    def test_many_rows_of_a_step_get_their_own(self) -> None:
        """32 rows that decode and 8 chunks, of any lengths."""
        rows = [(1 + 7 * i % 45, 1) for i in range(ROWS - 8)] + [(5 * i % 23, 2 + i % 7) for i in range(8)]
        self.run(self.plain(), rows)

    @since(1, 0)
    def test_many_heads_have_keys_of_their_own(self) -> None:
        """8 KV heads as most models have them, and 20 and 33."""
        found = [self.space.plain(kv_heads=n) for n in (8, 20, 33)]
        if not any(found):
            pytest.skip("no setting with 8 KV heads is claimed")
        for setting in filter(None, found):
            self.run(setting, [(0, 9), (21, 1), (13, 3)])

    @since(1, 0)
    def test_long_prompts_and_contexts(self) -> None:
        """A prompt of 1,100 tokens in one step, a chunk of 600 behind others, and 9,000 keys of a row that decodes."""
        setting = self.plain(kv_heads=1)
        self.run(setting, [(0, PROMPT), (3, 1)])
        self.run(setting, [(90, 600), (2, 2)])
        self.run(setting, [(CONTEXT, 1), (5, 1)])

    @since(1, 0)
    def test_a_window_of_any_length_is_exact(self) -> None:
        """``window``: of 33 to 130 tokens too, in rows that are longer; it ends within a tile too."""
        if not self.claims("window"):
            pytest.skip("not claimed: window")
        for window in WINDOWS:
            self.run(self.plain(kv_heads=1, window=window), [(300, 1), (129, 3), (0, 150), (window - 1, 1)])
