"""The parts of a suite that the author of an attention back end may override: KV formats, and the reader of a
layout.
"""

from __future__ import annotations

import pytest

from minivllm.testing import AttentionConformance

pytestmark = pytest.mark.slow


class TestOverALossyKVFormat(AttentionConformance):
    plugin = "wrong.attention:AnyFormat"

    def formats(self):
        return ["wrong.kvformats:Int8"]


class TestALayoutOfItsOwn(AttentionConformance):
    plugin = "wrong.attention:HeadsFirst"

    def load(self, backend, layer, blocks):
        return tuple(x[blocks].transpose(1, 2).flatten(0, 1).float() for x in layer.cache.values())
