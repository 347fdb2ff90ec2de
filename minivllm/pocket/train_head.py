"""Training of pocket's head for next-token prediction (MTP): `python -m minivllm.pocket.train_head --out DIR`.

The head reads the state of the model behind its last norm and the embedding of the next token, and learns the model's
own predictions of the token after that.  The second draft reads the head's state of the first, so both are trained.
The model does not change.  The files have the names of Qwen3.5's heads, which the drafter `mtp` reads.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from . import checkpoint
from .data import batches
from .net import HF_NAMES, Net, documents_mask, rms_norm

DRAFTS = 2  # drafts of a chain that are trained


def weights_of(net: Net, layer: int) -> dict[str, Tensor]:
    """Return the weights of one layer by name."""
    weights = {name: stacked[layer] for name, stacked in net.mats.items()}
    for name, stacked in net.gains.items():
        weights[name] = stacked[layer]
    return weights


def states_of(net: Net, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the states (rows, length, hidden) behind the last norm, in float32."""
    x = F.embedding(tokens, net.embed)
    for i in range(net.shape.layers):
        weights = weights_of(net, i)
        x = net.layer(x, weights, mask)
    return rms_norm(x, net.norm, net.shape.eps)


class TrainedHead(nn.Module):
    """The head of a model `net`.  Its layer starts with the weights of the model's last layer."""

    def __init__(self, net: Net):
        super().__init__()
        shape = net.shape
        self.body = Net(replace(shape, layers=1))
        last = weights_of(net, shape.layers - 1)
        with torch.no_grad():
            for name, weight in weights_of(self.body, 0).items():
                weight.copy_(last[name])
            self.body.norm.copy_(net.norm)
        hidden = shape.hidden
        same = torch.eye(hidden)
        self.fc = nn.Parameter(torch.cat([same * 0.1, same], dim=1))
        self.embedding_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))

    def forward(self, embedding: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Return the head's states (rows, length, hidden).

        Each place of a row has the embedding of a token, and in ``states`` the state of the token before.
        """
        body = self.body
        eps = body.shape.eps
        embedding = rms_norm(embedding, self.embedding_norm, eps)
        states = rms_norm(states, self.hidden_norm, eps)
        both = torch.cat([embedding, states], dim=-1)
        x = F.linear(both, self.fc)
        x = body.layer(x, weights_of(body, 0), mask)
        return rms_norm(x, body.norm, eps)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under the names of a checkpoint."""
        named = {
            "fc": self.fc,
            "pre_fc_norm_embedding": self.embedding_norm,
            "pre_fc_norm_hidden": self.hidden_norm,
            "norm": self.body.norm,
        }
        for name, weight in weights_of(self.body, 0).items():
            named[f"layers.0.{HF_NAMES[name]}"] = weight
        found = {}
        for name, weight in named.items():
            found[f"mtp.{name}.weight"] = weight.detach().bfloat16().contiguous()
        return found


def loss_of(head: TrainedHead, net: Net, tokens: Tensor, doc: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss of a batch, and for each draft how often it is the model's likeliest token.

    `tokens` and `doc` (rows, length) are the tokens and the numbers of their documents."""
    with torch.no_grad():
        mask = documents_mask(doc, flex=False)
        states = states_of(net, tokens, mask)
        logits = F.linear(states, net.embed)
    embedding = F.embedding(tokens, net.embed)
    length = tokens.shape[1]
    total = torch.zeros(())
    right = []
    for draft in range(1, DRAFTS + 1):
        # pair i has the state of token i, and the token after all earlier drafts
        n = length - draft
        later = doc[:, draft:].contiguous()
        mask = documents_mask(later, flex=False)
        states = head(embedding[:, draft:], states[:, :n], mask)
        guess = F.linear(states, net.embed)
        target = logits[:, draft:]
        same = later == doc[:, :n]
        count = same.sum()
        soft = target.flatten(0, 1).softmax(-1)
        guessed = guess.flatten(0, 1)
        nll = F.cross_entropy(guessed, soft, reduction="none")
        summed = (nll * same.flatten()).sum()
        total = total + summed / count
        hits = guess.argmax(-1) == target.argmax(-1)
        hits &= same
        share = hits.sum() / count
        right.append(float(share))
    return total / DRAFTS, right


def train(args: argparse.Namespace) -> None:
    """Train a head, and write it with a config.json."""
    net = checkpoint.load_net(args.model, "pocket")
    net = net.float().requires_grad_(False)
    head = TrainedHead(net)
    optimizer = torch.optim.AdamW(head.parameters(), args.rate, (0.9, 0.95), weight_decay=0.0)
    source = batches(str(args.model), args.seed, 0, args.rows, args.length, 1, 0)
    begin = time.monotonic()
    for step in range(1, args.steps + 1):
        spent = (time.monotonic() - begin) / (60 * args.minutes)
        progress = max(spent, step / args.steps)
        rising = min(1.0, step / 20)
        falling = max(0.02, 1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = args.rate * rising * falling
        batch = torch.from_numpy(next(source))
        tokens, doc, _ = batch.long()
        loss, right = loss_of(head, net, tokens, doc)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log == 0 or progress >= 1:
            shares = " ".join(f"{share:.3f}" for share in right)
            seconds = time.monotonic() - begin
            print(f"step {step} loss {loss.item():.4f} right {shares} at {seconds:.0f} s", flush=True)
        if progress >= 1:
            break
    args.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((args.model / "config.json").read_text())
    config["num_hidden_layers"] = 1
    config["mtp_num_hidden_layers"] = 1
    text = json.dumps(config, indent=2)
    (args.out / "config.json").write_text(text + "\n")
    save_file(head.tensors(), args.out / "model.safetensors", {"format": "pt"})


OPTIONS: dict[str, dict] = {
    "--out": {"type": Path, "required": True, "help": "the directory to write"},
    "--model": {"type": Path, "default": Path(__file__).parent / "model", "help": "a pocket directory"},
    "--minutes": {"type": float, "default": 12.0, "help": "end the run after at most this many minutes"},
    "--steps": {"type": int, "default": 2000, "help": "end the run after at most this many steps"},
    "--rows": {"type": int, "default": 4, "help": "rows of a batch"},
    "--length": {"type": int, "default": 511, "help": "tokens of a row but one"},
    "--rate": {"type": float, "default": 2e-3, "help": "the largest learning rate"},
    "--seed": {"type": int, "default": 1},
    "--log": {"type": int, "default": 20, "help": "steps between lines of the log"},
}


def main(argv: list[str] | None = None) -> None:
    """Train with the options of the command line.  `argv` None means the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, settings in OPTIONS.items():
        parser.add_argument(name, **settings)
    train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
