"""Pinned memory of pages: the way back to torch's own where a system cannot register memory."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from minivllm.device.worker import pinned


def test_memory_that_cuda_did_not_register_is_not_unregistered(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append("register") or 1,
        cudaHostUnregister=lambda *args: calls.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned, "TorchSlab", lambda size: ("torch", size))
    monkeypatch.setattr(pinned, "_forget_error", lambda: calls.append("forget"))
    assert pinned.allocate(1 << 20) == ("torch", 1 << 20)
    assert calls == ["register", "forget"]
