"""Training of pocket and its draft: `python -m minivllm.pocket.train --out DIR --minutes 9`.

One process uses one GPU, or the CPU for a smoke test, and worker processes write the batches.  The learning rate rises,
stays constant, and falls to zero in the last part of the run (`--decay`).  A run with `--decay 0` can write a
checkpoint from which `--resume` continues with the batches that follow.
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
    """Return the arguments of `loss_of` for a batch: input tokens, target tokens, weights of the targets, and the mask.

    The mask is not made in the compiled loss, because torch 2.11 then computes wrong gradients.
    """
    batch = torch.from_numpy(data).to(device, non_blocking=True)
    tokens, doc, weight = batch.long()
    inputs = tokens[:, :-1].contiguous()
    targets = tokens[:, 1:].flatten()
    doc_of_input = doc[:, :-1].contiguous()
    same_document = doc[:, 1:] == doc_of_input
    weights = weight[:, 1:] * same_document
    mask = documents_mask(doc_of_input, flex=device == "cuda")
    return inputs, targets, weights.flatten().float(), mask


def loss_of(net: Net, teacher: Net | None, tokens: Tensor, target: Tensor, weight: Tensor, mask) -> tuple:
    """Return the weighted loss of a batch, and the mean loss on answers of tasks for the log.

    With a teacher the weighted loss is the cross-entropy with the teacher's predictions instead of the tokens.
    """
    logits = net(tokens, mask).float().flatten(0, 1)
    nll = F.cross_entropy(logits, target, reduction="none")
    of_answers = (weight == ANSWER).float()
    answer_loss = _weighted_mean(nll.detach(), of_answers)
    if teacher is not None:
        with torch.no_grad():
            taught = teacher(tokens, mask).float().flatten(0, 1)
            soft = taught.softmax(-1)
        nll = F.cross_entropy(logits, soft, reduction="none")
    return _weighted_mean(nll, weight), answer_loss


def _weighted_mean(losses: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean of losses, 0 if all weights are 0."""
    total = (losses * weight).sum()
    return total / weight.sum().clamp(min=1)


def rate_at(progress: float, step: int, warmup: int, decay: float) -> float:
    """Return the factor of the learning rate, 0 to 1, at this progress (0 to 1) of the run."""
    up = step / warmup
    down = 1.0
    if decay:
        down = (1.0 - progress) / decay
    return max(0.0, min(1.0, up, down))


class Run:
    """A training run: the model, its optimizer, the batches and the clock."""

    def __init__(self, args: argparse.Namespace):
        self.begin = time.monotonic()
        self.args = args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer_folder = args.tokenizer or args.out
        file = self.tokenizer_folder / "tokenizer.json"
        if not file.exists():
            tok.save(tok.train(), self.tokenizer_folder)
        net = Net(SHAPES[args.model], args.seed)
        self.net = net.to(self.device)
        self.optimizer = Optimizer(self.net, args.matrix_rate, args.other_rate)
        self.teacher = None
        if args.teacher:
            teacher = checkpoint.load_net(args.teacher, "pocket")
            self.teacher = teacher.to(self.device).requires_grad_(False)
        self.step = 0
        if args.resume:
            facts = checkpoint.restore(args.resume, self.net, self.optimizer)
            self.step = facts["step"]
        self.first = self.step  # the step at which this run began

    def progress(self) -> float:
        """Return the finished share of the run by steps or by the clock, whichever is larger."""
        args = self.args
        seconds = time.monotonic() - self.begin
        by_clock = seconds / (60 * args.minutes)
        by_steps = 0.0
        if args.steps:
            by_steps = (self.step - self.first) / args.steps
        return max(by_clock, by_steps)

    def go(self) -> None:
        """Train to the end of the run, then write the model and the checkpoint."""
        args = self.args
        loss = torch.compile(loss_of, dynamic=False) if self.device == "cuda" else loss_of
        folder = str(self.tokenizer_folder)
        source = batches(folder, args.seed, self.step, args.rows, args.length, args.ramp, args.workers)
        batch_tokens = args.rows * args.length
        logged_at, logged_step = time.monotonic(), self.step
        waited = 0.0  # seconds of waiting for batches since the last log line
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
                losses = f"loss {total.item():.4f} answers {answer.item():.4f} rate {rate:.3f}"
                now = time.monotonic()
                seconds = now - logged_at
                speed = (self.step - logged_step) * batch_tokens / seconds
                print(
                    f"step {self.step} {losses} {speed / 1e6:.3f} Mtok/s waited {waited / seconds:.0%} "
                    f"at {now - self.begin:.0f} s",
                    flush=True,
                )
                logged_at, logged_step = now, self.step
                waited = 0.0
        source.close()
        checkpoint.export(args.out, self.net, self.tokenizer_folder)
        if args.checkpoint:
            checkpoint.save(args.checkpoint, self.net, self.optimizer, {"step": self.step, "model": args.model})
        print(f"{self.step} steps, {self.step * batch_tokens / 1e6:.0f} M tokens; wrote {args.out}", flush=True)


OPTIONS: dict[str, dict] = {
    "--out": {"type": Path, "required": True, "help": "the model directory to write"},
    "--model": {"choices": SHAPES, "default": "pocket"},
    "--tokenizer": {"type": Path, "help": "directory of tokenizer.json (default: train one into --out)"},
    "--checkpoint": {"type": Path, "help": "write a checkpoint to this folder at the end"},
    "--resume": {"type": Path, "help": "continue from this checkpoint"},
    "--teacher": {"type": Path, "help": "a pocket directory to learn from (for the draft)"},
    "--minutes": {"type": float, "default": 9.0, "help": "end the run after at most this many minutes"},
    "--steps": {"type": int, "default": 0, "help": "end the run after this many steps (0: no limit)"},
    "--rows": {"type": int, "default": 32, "help": "rows of a batch"},
    "--length": {"type": int, "default": 4096, "help": "tokens of a row"},
    "--ramp": {"type": int, "default": 800, "help": "batches until needle documents have their full length"},
    "--warmup": {"type": int, "default": 100, "help": "steps in which the learning rate rises"},
    "--decay": {"type": float, "default": 0.35, "help": "share of the run in which the learning rate falls"},
    "--matrix-rate": {"type": float, "default": 0.02},
    "--other-rate": {"type": float, "default": 0.004},
    "--seed": {"type": int, "default": 0},
    "--workers": {"type": int, "help": "processes that write batches (0: none; default: cores - 1)"},
    "--log": {"type": int, "default": 50, "help": "steps between lines of the log"},
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    for name, settings in OPTIONS.items():
        made.add_argument(name, **settings)
    return made


def main(argv: list[str] | None = None) -> None:
    """Train with the options of the command line.  `argv` None means the arguments of the process."""
    torch.set_float32_matmul_precision("high")
    Run(parser().parse_args(argv)).go()


if __name__ == "__main__":
    main()
