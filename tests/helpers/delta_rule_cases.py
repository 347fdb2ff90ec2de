"""Comparison of the Triton kernels of the gated delta rule with the reference functions in torch, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minivllm.core.interfaces.states import COPIES, UNUSABLE, StepStates
from minivllm.device.layers import delta_net

# (key heads, value heads, key dim, value dim, width of the convolution)
SHAPES = ((1, 1, 16, 16, 4), (2, 4, 8, 12, 4), (2, 2, 32, 40, 3), (1, 3, 16, 8, 2))
LONG_SHAPES = ((1, 2, 64, 64, 4), (2, 2, 128, 64, 4), (1, 3, 64, 128, 2))  # shapes of long rows in 16 bits


def make_step(
    device: str, rows: int, most: int, places: int, taps: int, seed: int, least: int = 0
) -> tuple[StepStates, int]:
    """Return a step of random rows, with drafts, copies, tokens to fold and unusable states, and its tokens."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape or (rows,), generator=g)  # noqa: E731
    most_folded = places - taps
    n = draw(least, most + 1)
    start = draw(0, 40) * (draw(0, 4) > 0)
    behind = torch.minimum(draw(0, most_folded + 1), start)
    drafts = (draw(0, 2) > 0) & (n <= most_folded)
    behind = torch.where(draw(0, 8) == 0, UNUSABLE, behind)
    drafts &= (start > 0) & (behind >= 0)  # for other rows the memory before drafts is never read
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


def make_memory(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], places: int, rows: int, tokens: int, seed: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Return (x, ab, weight, rates, dt_bias) for ``tokens`` tokens and two that belong to no row, and random states."""
    key_heads, heads, key_dim, value_dim, width = shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    torch.manual_seed(seed)
    make = lambda *size, dtype=dtype: torch.randn(size, device=device).to(dtype)  # noqa: E731
    x, ab = make(tokens + 2, channels + 6)[:, :channels], make(tokens + 2, 2 * heads)
    memory = {
        "state": make(4 * rows, heads, key_dim, value_dim, dtype=torch.float32),
        "ring": make(4 * rows, places, channels),
        "gates": make(4 * rows, places, 2 * heads),
    }
    weight, rates = make(channels, width), make(heads, dtype=torch.float32).exp()
    return (x, ab, weight, rates, make(heads, dtype=torch.float32)), memory


def check_one(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, tolerance: float, **tile: int
) -> None:
    """Compare a step whose rows have at most one token each, which one launch computes, with the torch functions."""
    from minivllm.device.kernels import delta_rule

    rows, sizes, eps = 5, shape[:4], 1e-5
    step, _ = make_step(device, rows, 1, shape[4], shape[4] - 1, seed)
    step.behind.clamp_(max=0)
    step.drafts.zero_()
    at = step.save_at
    at.copy_(torch.where(at >= 0, step.start[:, None] + 1 + (at % 2), at))  # so that many copies are due in this step
    tokens = int(step.cu_q[-1])
    given, memory = make_memory(device, dtype, shape, shape[4], rows, tokens, seed)
    x, ab, *weights = given
    x, ab = torch.cat([x] * 3)[:rows], torch.cat([ab] * 3)[:rows]
    wide = torch.randn(rows, shape[1] * shape[3] + 6, device=device).to(dtype)
    z, norm = wide[:, : shape[1] * shape[3]], torch.randn(shape[3], device=device).to(dtype)
    copy = {name: tensor.clone() for name, tensor in memory.items()}
    o = delta_net.scan(x, ab, *weights, copy, sizes, step)
    want = delta_net.gated_norm(o, z, norm, eps)
    got = delta_rule.scan_one(x, ab, z, tuple(weights), norm, eps, memory, sizes, step, **tile)
    assert not got[tokens:].any()
    compare(got, want, memory, copy, tolerance, dtype)


def check_long(device: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, tolerance: float) -> None:
    """Compare a step with long and short rows, of which the long ones are computed in chunks."""
    from minivllm.device.kernels import delta_chunks, delta_rule

    rows, places = 4, shape[4] + seed % 3
    step, tokens = make_step(device, rows, 150, places, shape[4] - 1, seed, least=40 * (seed % 2))
    row = torch.repeat_interleave(torch.arange(rows), step.cu_q.diff().cpu())
    if seed % 2:
        step.shortest = 40
        step.behind.clamp_(max=0)  # without places for drafts no state lacks tokens
    step.row, step.longest = torch.cat([row, row.new_zeros(2)]).to(device), tokens
    given, memory = make_memory(device, dtype, shape, places, rows, tokens, seed)
    copy = {name: tensor.clone() for name, tensor in memory.items()}
    want = delta_net.scan(*given, copy, shape[:4], step)
    got = delta_rule.scan(*given, memory, shape[:4], step)
    assert True in step.chunks and delta_chunks.takes(dtype, shape[:4])
    compare(got, want, memory, copy, tolerance, dtype)


def compare(
    got: torch.Tensor,
    want: torch.Tensor,
    memory: dict[str, torch.Tensor],
    copy: dict[str, torch.Tensor],
    tolerance: float,
    dtype: torch.dtype,
) -> None:
    """Compare outputs and states within ``tolerance`` times their size, and rings exactly."""
    for mine, theirs in ((got, want), (memory["state"], copy["state"])):
        assert torch.equal(mine.isnan(), theirs.isnan())
        size = theirs.nan_to_num().float().square().mean().sqrt()
        far = (mine.nan_to_num().float() - theirs.nan_to_num().float()).square().mean().sqrt()
        assert far <= tolerance * size, (far / size).item()
    assert torch.equal(memory["ring"], copy["ring"]) and torch.equal(memory["gates"], copy["gates"])


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
    rows, sizes = 5, shape[:4]
    places = shape[4] + seed % 4
    step, tokens = make_step(device, rows, 9, places, shape[4] - 1, seed)
    given, memory = make_memory(device, dtype, shape, places, rows, tokens, seed)
    copy = {name: tensor.clone() for name, tensor in memory.items()}
    want = delta_net.scan(*given, copy, sizes, step)
    got = scan(*given, memory, sizes, step)
    close = {"atol": tolerance, "rtol": tolerance, "equal_nan": True}
    torch.testing.assert_close(got, want, **close)
    torch.testing.assert_close(memory["state"], copy["state"], **close)
    assert torch.equal(memory["ring"], copy["ring"]) and torch.equal(memory["gates"], copy["gates"])


def check_gated_norm(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Compare the gated norm, with a gate whose rows are not adjacent."""
    torch.manual_seed(3)
    from minivllm.device.kernels import delta_rule

    o, weight = torch.randn(7, 3, 12, device=device).to(dtype), torch.randn(12, device=device).to(dtype)
    z = torch.randn(7, 50, device=device).to(dtype)[:, 4:40]
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    got, want = delta_rule.gated_norm(o, z, weight, 1e-5, cu_q), delta_net.gated_norm(o, z, weight, 1e-5)
    want[5:] = 0
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
