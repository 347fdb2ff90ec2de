"""Training data: documents of every kind, packed into rows by worker processes.

Batch number n depends only on the seed and n, so that a resumed run goes on where the last one stopped, however many
workers there are.  A batch is one array (3, rows, length + 1): tokens, document numbers and the weights of the loss.
"""

import multiprocessing
import os
from collections.abc import Iterator
from random import Random

import numpy as np

from . import tasks
from .tokenizer import Encoder, load

FILLER, TEXT, ANSWER = 2, 10, 40
"""Weights of the loss, in tenths: the stories around needles, stories for their own sake, answers."""

SYSTEM = ("You are a helpful assistant.", "You are pocket, a small model.", "Answer in one line.", "Be kind and brief.")
TALK = (
    ("Hello!", "Hello! I am pocket, a very small model. Ask me for a story."),
    ("Hi!", "Hi! I am pocket. I can tell a story, add small numbers or copy words."),
    ("Who are you?", "I am pocket, a very small language model that lives in a small world."),
    (
        "What can you do?",
        "I can tell stories, find a thing in a long text, copy words, add small numbers and answer in JSON.",
    ),
    ("Thank you!", "You are welcome!"),
    ("How are you?", "I am fine, thank you. Shall I tell you a story?"),
    ("Good morning!", "Good morning! Shall I tell you a story?"),
    ("Goodbye!", "Goodbye! Come back soon."),
)
SIGNS = "äöüßéèñçøåαβγδλπωбгджяшщ中文字日本語猫犬狐森林한국어漢शनم😀🦊🌲🌙🔥✨🎵→≤∞€½"

Document = tuple[list[int], list[int]]


class Writer:
    """Writes documents as token ids with the weight of each."""

    def __init__(self, encoder: Encoder, rng: Random):
        self.encoder, self.rng = encoder, rng

    def chat(self, messages: list[dict[str, str]], answer: str, filler: int = 0, weight: int = ANSWER) -> Document:
        """A conversation as the chat template writes it, with the loss on the assistant's turns."""
        e, ids, weights = self.encoder, [], []
        if self.rng.random() < 0.1:
            messages = [{"role": "system", "content": self.rng.choice(SYSTEM)}, *messages]
        for message in [*messages, {"role": "assistant", "content": answer}]:
            head, body = e.heads[message["role"]], e.encode(message["content"])
            ids += [*head, *body, e.turn_end, *e.tail]
            own, end = (weight, weight) if message["role"] == "assistant" else (filler, 0)
            weights += [0] * len(head) + [own] * len(body) + [end] + [0] * len(e.tail)
        return ids, weights

    def needle(self, longest: int) -> Document:
        """Needles in stories of any length up to `longest`, with several questions one after the other."""
        rng = self.rng
        pieces = 0 if longest < 60 else rng.randint(40, longest)
        case = tasks.draw("needle", rng, pieces=(pieces, pieces), needles=(2, 32 if pieces > 400 else 12))
        facts, asked = case.meta["needles"], case.meta["asked"]
        messages, answer = case.messages, case.answer
        others = [i for i in range(len(facts)) if i != asked]
        for i in rng.sample(others, min(len(others), rng.randint(0, 5))):
            question, reply = tasks.needle_question(*facts[i][:2]), tasks.needle_text(*facts[i])
            messages = [*messages, {"role": "assistant", "content": answer}, *tasks.user(question)]
            answer = reply
        return self.chat(messages, answer, filler=FILLER)

    def several(self, task: str, most: int) -> Document:
        """A few cases of one task in one conversation, with made-up words in some of them."""
        rng = self.rng

        def options() -> dict:
            if task == "story":
                return {"made_up": rng.random() < 0.15}
            return {"words": (3, 40), "made_up": rng.choice((0.0, 0.0, 0.1, 0.5))} if task == "copy" else {}

        first, *rest = (tasks.draw(task, self.rng, **options()) for _ in range(self.rng.randint(1, most)))
        messages, answer = first.messages, first.answer
        for case in rest:
            messages = [*messages, {"role": "assistant", "content": answer}, *case.messages]
            answer = case.answer
        return self.chat(messages, answer, weight=TEXT if task == "story" else ANSWER)

    def plain(self) -> Document:
        """A story without a conversation around it."""
        ids = [*self.encoder.encode(tasks.plain_story(self.rng)), self.encoder.end_of_text]
        return ids, [TEXT] * len(ids)

    def talk(self) -> Document:
        """Small talk, or a few signs from other scripts to copy."""
        if self.rng.random() < 0.6:
            question, answer = self.rng.choice(TALK)
            return self.chat(tasks.user(question), answer, weight=TEXT)
        text = "".join(self.rng.choice(SIGNS + " ") for _ in range(self.rng.randint(2, 12))).strip() or "ä"
        return self.chat(tasks.user(f"Copy these words:\n{text}"), text, weight=TEXT)

    def short(self) -> Document:
        """A document of any kind but the long ones."""
        kind = self.rng.choices(
            ("plain", "story", "sums", "copy", "json", "dense", "needle", "talk"), (12, 14, 20, 16, 10, 8, 4, 3)
        )[0]
        if kind == "plain":
            return self.plain()
        if kind == "talk":
            return self.talk()
        if kind in ("dense", "needle"):
            return self.needle(0 if kind == "dense" else 400)
        return self.several(kind, {"story": 2, "sums": 8, "copy": 4, "json": 3}[kind])

    def row(self, size: int, longest: int, share: float) -> np.ndarray:
        """A row of `size` tokens: with probability `share` a long needle document, then short ones to the end."""
        row = np.zeros((3, size), dtype=np.int16)
        at = number = 0
        while at < size:
            document = self.needle(longest) if not at and self.rng.random() < share else self.short()
            if len(document[0]) > size - at:
                if at == 0:
                    continue
                document = self.plain()
            ids, weights = document
            end = min(size, at + len(ids))
            row[0, at:end], row[1, at:end], row[2, at:end] = ids[: end - at], number, weights[: end - at]
            at, number = end, number + 1
        return row


def batch(encoder: Encoder, seed: int, index: int, rows: int, length: int, ramp: int) -> np.ndarray:
    """Batch number `index`; needle documents grow to the full length over the first `ramp` batches."""
    writer = Writer(encoder, Random(f"batch {seed} {index}"))
    grown = min(1.0, (index + 1) / max(1, ramp))
    longest = int(200 + grown * max(0, length * 0.88 - 200))
    share = 0.3 + 0.35 * grown
    return np.stack([writer.row(length + 1, longest, share) for _ in range(rows)], axis=1)


def work(queue, folder: str, seed: int, start: int, stride: int, rows: int, length: int, ramp: int) -> None:
    """A worker's life: every `stride`-th batch from `start` on, into its own queue."""
    encoder = Encoder(load(folder))
    index = start
    while True:
        queue.put(batch(encoder, seed, index, rows, length, ramp))
        index += stride


def batches(
    folder: str, seed: int, start: int, rows: int, length: int, ramp: int, workers: int | None = None
) -> Iterator[np.ndarray]:
    """All batches from number `start` on, in order, made by worker processes (0 workers: in this one)."""
    workers = max(1, (os.cpu_count() or 2) - 1) if workers is None else workers
    if workers == 0:
        encoder = Encoder(load(folder))
        while True:
            yield batch(encoder, seed, start, rows, length, ramp)
            start += 1
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(maxsize=4) for _ in range(workers)]
    crew = [
        context.Process(target=work, args=(q, folder, seed, start + i, workers, rows, length, ramp), daemon=True)
        for i, q in enumerate(queues)
    ]
    for process in crew:
        process.start()
    try:
        while True:
            for queue in queues:
                yield queue.get()
    finally:
        for process in crew:
            process.terminate()
