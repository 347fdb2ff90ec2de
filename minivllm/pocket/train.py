"""Trains pocket and its draft: `python -m minivllm.pocket.train --out DIR --minutes 9`.

One process drives one GPU (or, for a smoke test, the CPU) while worker processes write the batches.  The learning
rate warms up, stays, and falls to zero over the last part of the run (`--decay`); a run with `--decay 0` leaves a
checkpoint that `--resume` goes on from, with the batches that follow.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from . import checkpoint
from . import tokenizer as tok
from .data import ANSWER, batches
from .muon import Optimizer
from .net import SHAPES, Net, documents_mask


def prepare(data: np.ndarray, device: str) -> tuple:
    """What `loss_of` takes, from a batch: the tokens, those that follow, the weights of these, the mask.

    The mask is made here and not in the compiled loss: made inside (torch 2.11), the gradients came out wrong.
    """
    tokens, doc, weight = torch.from_numpy(data).to(device, non_blocking=True).long()
    mask = documents_mask(doc[:, :-1].contiguous(), flex=device == "cuda")
    weight = weight[:, 1:] * (doc[:, 1:] == doc[:, :-1])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten(), weight.flatten().float(), mask


def loss_of(net: Net, teacher: Net | None, tokens: Tensor, target: Tensor, weight: Tensor, mask) -> tuple:
    """The weighted loss of a batch, and for the log the plain loss on the answers of tasks.

    With a teacher the loss is the cross-entropy with its predictions rather than with the tokens.
    """
    logits = net(tokens, mask).float().flatten(0, 1)
    nll = F.cross_entropy(logits, target, reduction="none")
    answers = (weight == ANSWER).float()
    answer_loss = (nll.detach() * answers).sum() / answers.sum().clamp(min=1)
    if teacher is not None:
        with torch.no_grad():
            soft = teacher(tokens, mask).float().flatten(0, 1).softmax(-1)
        nll = F.cross_entropy(logits, soft, reduction="none")
    return (nll * weight).sum() / weight.sum().clamp(min=1), answer_loss


def rate_at(progress: float, step: int, warmup: int, decay: float) -> float:
    """The share of the learning rate at this progress (0 to 1) of the run: up, flat, down."""
    down = min(1.0, (1.0 - progress) / decay) if decay else 1.0
    return max(0.0, min(1.0, step / warmup, down))


class Run:
    """A training run: the model, its optimizer, the batches and the clock."""

    def __init__(self, args: argparse.Namespace):
        self.begin = time.monotonic()
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer_folder = args.tokenizer or args.out
        if not (self.tokenizer_folder / "tokenizer.json").exists():
            tok.save(tok.train(), self.tokenizer_folder)
        self.net = Net(SHAPES[args.model], args.seed).to(self.device)
        self.optimizer = Optimizer(self.net, args.matrix_rate, args.other_rate)
        self.teacher = None
        if args.teacher:
            self.teacher = checkpoint.load_net(args.teacher, "pocket").to(self.device).requires_grad_(False)
        self.step = 0
        if args.resume:
            self.step = checkpoint.restore(args.resume, self.net, self.optimizer)["step"]
        self.first = self.step

    def progress(self) -> float:
        """How much of the run is done, by steps or by the clock, whichever is further."""
        by_clock = (time.monotonic() - self.begin) / (60 * self.args.minutes)
        by_steps = (self.step - self.first) / self.args.steps if self.args.steps else 0.0
        return max(by_clock, by_steps)

    def go(self) -> None:
        """Train to the end of the run, then write the checkpoint and the model."""
        args = self.args
        loss = torch.compile(loss_of, dynamic=False) if self.device == "cuda" else loss_of
        source = batches(
            str(self.tokenizer_folder), args.seed, self.step, args.rows, args.length, args.ramp, args.workers
        )
        per_batch, mark, waited = args.rows * args.length, (time.monotonic(), self.step), 0.0
        while (progress := self.progress()) < 1.0:
            before = time.monotonic()
            data: np.ndarray = next(source)
            waited += time.monotonic() - before
            self.step += 1
            total, answer = loss(self.net, self.teacher, *prepare(data, self.device))
            total.backward()
            rate = rate_at(progress, self.step, args.warmup, args.decay)
            self.optimizer.step(rate, self.step)
            if self.step % args.log == 0 or self.step == self.first + 1:
                shown = f"loss {total.item():.4f} answers {answer.item():.4f} rate {rate:.3f}"
                now = time.monotonic()
                speed = (self.step - mark[1]) * per_batch / (now - mark[0])
                print(
                    f"step {self.step} {shown} {speed / 1e6:.3f} Mtok/s waited {waited / (now - mark[0]):.0%} "
                    f"at {now - self.begin:.0f} s",
                    flush=True,
                )
                mark, waited = (now, self.step), 0.0
        source.close()
        checkpoint.export(args.out, self.net, self.tokenizer_folder)
        if args.checkpoint:
            checkpoint.save(args.checkpoint, self.net, self.optimizer, {"step": self.step, "model": args.model})
        print(f"{self.step} steps, {self.step * per_batch / 1e6:.0f} M tokens; wrote {args.out}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="the model directory to write")
    p.add_argument("--model", choices=SHAPES, default="pocket")
    p.add_argument("--tokenizer", type=Path, help="where tokenizer.json is (else it is trained into --out)")
    p.add_argument("--checkpoint", type=Path, help="write a checkpoint to this folder at the end")
    p.add_argument("--resume", type=Path, help="go on from this checkpoint")
    p.add_argument("--teacher", type=Path, help="a pocket directory to learn from (for the draft)")
    p.add_argument("--minutes", type=float, default=9.0, help="the run ends after so many minutes at the latest")
    p.add_argument("--steps", type=int, default=0, help="or after so many steps")
    p.add_argument("--rows", type=int, default=32, help="rows of a batch")
    p.add_argument("--length", type=int, default=4096, help="tokens of a row")
    p.add_argument("--ramp", type=int, default=800, help="batches until needle documents have their full length")
    p.add_argument("--warmup", type=int, default=100, help="steps until the learning rate is up")
    p.add_argument("--decay", type=float, default=0.35, help="the part of this run in which the learning rate falls")
    p.add_argument("--matrix-rate", type=float, default=0.02)
    p.add_argument("--other-rate", type=float, default=0.004)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--workers", type=int, help="processes that write batches (0: none; else one a core but one)")
    p.add_argument("--log", type=int, default=50, help="steps from one line of the log to the next")
    return p


def main(argv: list[str] | None = None) -> None:
    """Train as the command line says."""
    torch.set_float32_matmul_precision("high")
    Run(parser().parse_args(argv)).go()


if __name__ == "__main__":
    main()
