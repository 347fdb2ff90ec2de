"""The optimizer of pocket: Muon for the stacked matrices, Adam for the embedding and the norms.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix.  A few steps of a
Newton-Schulz iteration find it.  With the layers' weights stacked, these steps are a few batched matrix products for
the whole model.
"""

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Return approximately the orthogonal factor of each matrix in a stack (n, rows, columns), in float32."""
    a, b, c = COEFFICIENTS
    x = g.bfloat16()
    flipped = x.shape[1] > x.shape[2]
    if flipped:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if flipped else x).float()


class Optimizer:
    """The optimizer of a `Net`: it updates parameters of three dimensions by Muon and all others by Adam."""

    def __init__(
        self,
        net: nn.Module,
        matrix_rate: float = 0.02,
        other_rate: float = 0.004,
        momentum: float = 0.95,
        decay: float = 0.02,
    ):
        self.matrix_rate = matrix_rate
        self.other_rate = other_rate
        self.momentum = momentum
        self.decay = decay
        self.matrices: dict[str, nn.Parameter] = {}
        self.others: dict[str, nn.Parameter] = {}
        for name, p in net.named_parameters():
            of_kind = self.matrices if p.ndim == 3 else self.others
            of_kind[name] = p
        self.state = {}
        for name, p in self.matrices.items():
            self.state[f"{name}.momentum"] = torch.zeros_like(p)
        for name, p in self.others.items():
            self.state[f"{name}.mean"] = torch.zeros_like(p)
            self.state[f"{name}.square"] = torch.zeros_like(p)
        on_gpu = next(net.parameters()).is_cuda
        self.orthogonalize = torch.compile(orthogonalize) if on_gpu else orthogonalize

    @torch.no_grad()
    def step(self, rate: float, count: int) -> None:
        """Update the parameters and drop their gradients.

        `rate` scales both learning rates.  `count` is the number of the step, from 1.
        """
        matrix_rate = rate * self.matrix_rate
        for name, p in self.matrices.items():
            buffer = self.state[f"{name}.momentum"]
            buffer.lerp_(p.grad, 1 - self.momentum)
            direction = p.grad.lerp(buffer, self.momentum)
            update = self.orthogonalize(direction)
            rows, columns = p.shape[1:]
            scale = max(1.0, rows / columns) ** 0.5
            p.mul_(1 - matrix_rate * self.decay)
            p.add_(update, alpha=-matrix_rate * scale)
            p.grad = None
        other_rate = rate * self.other_rate
        for name, p in self.others.items():
            mean = self.state[f"{name}.mean"]
            square = self.state[f"{name}.square"]
            mean.lerp_(p.grad, 0.1)
            square.lerp_(p.grad.square(), 0.02)
            unbiased_square = square / (1 - 0.98**count)
            root = unbiased_square.sqrt_().add_(1e-10)
            unbiased_mean = mean / (1 - 0.9**count)
            p.addcdiv_(unbiased_mean, root, value=-other_rate)
            p.grad = None
