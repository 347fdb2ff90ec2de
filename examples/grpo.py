"""Reinforcement learning (GRPO) with an engine that samples, in one file of plain torch.

    python examples/grpo.py --batches 40

            ┌────────── update_weights ◄──────────┐
    prompts ─► engine: groups of answers ─► reward ─► loss, AdamW (a copy of the model in transformers)
                       and log-probabilities

The reward is the number of full stops per word, at most 1, which short sentences raise.  Each prompt has a group of
answers.  The advantage of an answer is its reward less the mean of its group, over the standard deviation
(arXiv:2402.03300).  The loss is PPO's clipped ratio of the copy's probabilities to those of the engine, which come from
the logits that drew the tokens.

Every line of the output has the mean reward, the largest difference between the log-probabilities of the engine and of
the copy, which have the same weights, and the version of the weights that drew the answers.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import minivllm.pocket
from minivllm import LLM, SamplingParams

POCKET = Path(minivllm.pocket.__file__).parent / "model"
PROMPTS = (
    "Once upon a time there was a fox",
    "One day a cat went to the forest",
    "Lily had a red ball",
    "The owl was sad because",
    "In the garden there was a small box",
    "Tom and his dog went to the lake",
    "The little bear wanted to help",
    "It was a cold day",
)


@dataclass
class Answer:
    """An answer of the engine, and what was learned about it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # of the tokens, when they were drawn
    version: int  # of the weights that drew them
    reward: float
    advantage: float = 0.0


def reward_of(text: str) -> float:
    """Return the full stops per word of a text, at most 1."""
    return min(1.0, text.count(".") / max(len(text.split()), 1))


def sample(llm: LLM, prompts: list[str], group: int, tokens: int, seed: int) -> list[Answer]:
    """Draw a group of answers to each prompt, and set their advantages."""
    params = SamplingParams(n=group, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, seed=seed)
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        members = []
        for one in output.outputs:
            drawn = [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
            ids = list(one.token_ids)
            members.append(Answer(output.prompt_token_ids, ids, drawn, one.weights_version, reward_of(one.text)))
        rewards = torch.tensor([member.reward for member in members])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for member, advantage in zip(members, advantages, strict=True):
            member.advantage = float(advantage)
        answers += members
    return answers


def padded(rows: list[list], value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different lengths as a tensor, filled with a value at the end."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows], dtype=dtype)


def scores(model: torch.nn.Module, answers: list[Answer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's log-probabilities of the tokens of answers [N, T], and a mask that is 1 at tokens."""
    ids = padded([a.prompt + a.tokens for a in answers], 0, torch.long)
    known = padded([[1] * len(a.prompt + a.tokens) for a in answers], 0, torch.long)
    every = F.log_softmax(model(input_ids=ids, attention_mask=known).logits[:, :-1].float(), dim=-1)
    of_tokens = every.gather(2, ids[:, 1:, None])[:, :, 0]
    mask = padded([[0] * (len(a.prompt) - 1) + [1] * len(a.tokens) for a in answers], 0, torch.float)
    return of_tokens, mask


def loss_of(model: torch.nn.Module, answers: list[Answer], clip: float) -> tuple[torch.Tensor, float]:
    """Return the loss of GRPO, and the largest difference of log-probabilities to those of the engine."""
    now, mask = scores(model, answers)
    before = padded([[0.0] * (len(a.prompt) - 1) + a.logprobs for a in answers], 0.0, torch.float)
    advantage = torch.tensor([[a.advantage] for a in answers])
    change = (now - before) * mask
    ratio = change.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = -(gain * mask).sum() / mask.sum()
    return loss, float(change.detach().abs().max())


def train(args: argparse.Namespace) -> list[tuple[float, float]]:
    """Run the loop, and return the mean reward and the difference of log-probabilities of each batch."""
    torch.manual_seed(args.seed)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    curve = []
    with LLM(model="pocket", dtype="float32", max_num_seqs=args.prompts * args.group, max_model_len=256) as llm:
        for batch in range(args.batches):
            prompts = [PROMPTS[(batch * args.prompts + i) % len(PROMPTS)] for i in range(args.prompts)]
            answers = sample(llm, prompts, args.group, args.tokens, args.seed + batch)
            assert all(answer.version == batch for answer in answers)  # each batch has its own weights
            gap = 0.0
            for epoch in range(args.epochs):
                loss, difference = loss_of(model, answers, args.clip)
                gap = difference if epoch == 0 else gap  # later epochs have other weights than the engine
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            llm.update_weights(model.state_dict())
            mean = sum(answer.reward for answer in answers) / len(answers)
            curve.append((mean, gap))
            print(f"batch {batch:3}  reward {mean:.3f}  difference {gap:.1e}  weights {answers[0].version}", flush=True)
        print(llm.generate(PROMPTS[0], SamplingParams(max_tokens=32, temperature=0), use_tqdm=False)[0].text)
    return curve


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a batch")
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--epochs", type=int, default=2, help="steps of the optimizer for each batch")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


if __name__ == "__main__":
    train(arguments())
