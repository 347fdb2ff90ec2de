"""Every built-in plug-in under the conformance kit: the fast profile here, the long one in ``bash .ci/full``."""

from __future__ import annotations

import pytest

from minivllm.testing.session import builtins, run


@pytest.mark.parametrize(("seam", "plugin"), builtins(), ids=["-".join(b).replace("minivllm/", "") for b in builtins()])
def test_built_in_plugin_conforms(seam, plugin):
    outcomes = run([(seam, plugin)])
    failed = [f"{o.test}: {o.text}" for o in outcomes if o.status == "failed"]
    assert outcomes and not failed, "\n".join(failed)
