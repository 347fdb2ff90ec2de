"""The Triton kernels of the gated delta rule on a device, against the functions in torch that they stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.core.interfaces.states import COPIES, UNUSABLE, StepStates
from minivllm.device.layers import delta_net

# (key heads, value heads, key dim, value dim, width of the convolution)
SHAPES = ((1, 1, 16, 16, 4), (2, 4, 8, 12, 4), (2, 2, 32, 40, 3), (1, 3, 16, 8, 2))


def make_step(device: str, rows: int, most: int, places: int, taps: int, seed: int) -> tuple[StepStates, int]:
    """Return a step of random rows, with drafts, copies, tokens to fold and unusable states, and its tokens."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape or (rows,), generator=g)  # noqa: E731
    most_folded = places - taps
    n = draw(0, most + 1)
    start = draw(0, 40) * (draw(0, 4) > 0)
    behind = torch.minimum(draw(0, most_folded + 1), start)
    drafts = (draw(0, 2) > 0) & (n <= most_folded)
    behind = torch.where(draw(0, 8) == 0, UNUSABLE, behind)
    drafts &= (start > 0) & (behind >= 0)  # elsewhere what is stored before drafts is never read
    cu_q = torch.zeros(rows + 1, dtype=torch.int32)
    cu_q[1:] = n.cumsum(0)
    states = torch.randperm(4 * rows, generator=g)
    save_at = start[:, None] - behind.clamp(min=0)[:, None] + draw(0, most + 3, rows, COPIES)
    save_at = torch.where(draw(0, 2, rows, COPIES) > 0, save_at, -1)
    step = StepStates(
        states[:rows].to(device),
        start.int().to(device),
        behind.int().to(device),
        cu_q.to(device),
        drafts.to(device),
        save_at.int().to(device),
        states[rows : 3 * rows].view(rows, COPIES).to(device),
        lambda: None,
    )
    return step, int(cu_q[-1])


def check_scan(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    seed: int,
    tolerance: float,
    scan: Callable[..., torch.Tensor] | None = None,
) -> None:
    """Compare outputs, states, rings and copies of a step; ``scan`` None means the Triton kernel."""
    if scan is None:
        from minivllm.device.kernels import delta_rule

        scan = delta_rule.scan
    key_heads, heads, key_dim, value_dim, width = shape
    channels, taps, rows = 2 * key_heads * key_dim + heads * value_dim, width - 1, 5
    places = taps + 1 + seed % 4
    step, tokens = make_step(device, rows, 9, places, taps, seed)
    torch.manual_seed(seed)
    make = lambda *size, dtype=dtype: torch.randn(size, device=device).to(dtype)  # noqa: E731
    x, ab = make(tokens + 2, channels + 6)[:, :channels], make(tokens + 2, 2 * heads)
    memory = {
        "state": make(4 * rows, heads, key_dim, value_dim, dtype=torch.float32),
        "ring": make(4 * rows, places, channels),
        "gates": make(4 * rows, places, 2 * heads),
    }
    weight, rates = make(channels, width), make(heads, dtype=torch.float32).exp()
    given = (x, ab, weight, rates, make(heads, dtype=torch.float32))
    sizes = (key_heads, heads, key_dim, value_dim)
    copy = {name: tensor.clone() for name, tensor in memory.items()}
    want = delta_net.scan(*given, copy, sizes, step)
    got = scan(*given, memory, sizes, step)
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(memory["state"], copy["state"], **close)
    assert torch.equal(memory["ring"], copy["ring"]) and torch.equal(memory["gates"], copy["gates"])


def check_gated_norm(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compare the gated norm, of a gate whose rows lie apart."""
    torch.manual_seed(3)
    from minivllm.device.kernels import delta_rule

    o, weight = torch.randn(7, 3, 12, device=device).to(dtype), torch.randn(12, device=device).to(dtype)
    z = torch.randn(7, 50, device=device).to(dtype)[:, 4:40]
    got, want = delta_rule.gated_norm(o, z, weight, 1e-5), delta_net.gated_norm(o, z, weight, 1e-5)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
