"""Training data: documents of all kinds, packed into rows by worker processes.

Batch number n depends only on the seed and n.  So a resumed run continues with the batches that follow, with any number
of workers.  A batch is an array (3, rows, length + 1) of tokens, document numbers and weights of the loss.
"""

import multiprocessing
from collections.abc import Iterator
from random import Random

import numpy as np

from minivllm.limits import usable_cores

from . import tasks
from .tokenizer import Encoder, load

FILLER, TEXT, ANSWER = 2, 10, 40
"""Weights of the loss, in tenths: for stories around needles, for other stories, and for answers."""

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

Document = tuple[list[int], list[int]]  # token ids, and the weight of each token in the loss
KINDS = {"plain": 12, "story": 14, "sums": 20, "copy": 16, "json": 10, "dense": 8, "needle": 4, "talk": 3}
"""Kinds of short documents with their relative frequencies."""

MOST_CASES = {"story": 2, "sums": 8, "copy": 4, "json": 3}
"""Cases of a task in one document, at most."""


class Writer:
    """Draws training documents with a random number generator."""

    def __init__(self, encoder: Encoder, rng: Random):
        self.encoder = encoder
        self.rng = rng

    def chat(self, messages: list[dict[str, str]], answer: str, filler: int = 0, weight: int = ANSWER) -> Document:
        """Return a conversation in the form of the chat template.

        The tokens of the assistant have `weight`, the content of other messages has `filler`.  One conversation in ten
        gets a system message.
        """
        encoder = self.encoder
        turns = [*messages, {"role": "assistant", "content": answer}]
        if self.rng.random() < 0.1:
            system = {"role": "system", "content": self.rng.choice(SYSTEM)}
            turns.insert(0, system)
        ids: list[int] = []
        weights: list[int] = []
        for turn in turns:
            head = encoder.heads[turn["role"]]
            body = encoder.encode(turn["content"])
            ids += [*head, *body, encoder.turn_end, *encoder.tail]
            of_assistant = turn["role"] == "assistant"
            weights += [0] * len(head)
            weights += [weight if of_assistant else filler] * len(body)
            weights.append(weight if of_assistant else 0)
            weights += [0] * len(encoder.tail)
        return ids, weights

    def needle(self, longest: int) -> Document:
        """Return a conversation with needles in stories of up to `longest` words and signs, and 1 to 6 questions."""
        rng = self.rng
        pieces = 0 if longest < 60 else rng.randint(40, longest)
        most = 32 if pieces > 400 else 12
        case = tasks.draw("needle", rng, pieces=(pieces, pieces), needles=(2, most))
        facts = case.meta["needles"]
        asked = case.meta["asked"]
        messages = case.messages
        answer = case.answer
        others = [i for i in range(len(facts)) if i != asked]
        count = min(len(others), rng.randint(0, 5))
        for i in rng.sample(others, count):
            color, container, _ = facts[i]
            question = tasks.needle_question(color, container)
            messages = [*messages, {"role": "assistant", "content": answer}, *tasks.user(question)]
            answer = tasks.needle_text(*facts[i])
        return self.chat(messages, answer, filler=FILLER)

    def several(self, task: str, most: int) -> Document:
        """Return one to `most` cases of a task in one conversation.  Some cases contain invented words."""
        rng = self.rng

        def options() -> dict:
            if task == "story":
                return {"made_up": rng.random() < 0.15}
            if task == "copy":
                return {"words": (3, 40), "made_up": rng.choice((0.0, 0.0, 0.1, 0.5))}
            return {}

        messages: list[dict[str, str]] = []
        answer = ""
        for number in range(rng.randint(1, most)):
            case = tasks.draw(task, rng, **options())
            if number:
                messages = [*messages, {"role": "assistant", "content": answer}]
            messages = [*messages, *case.messages]
            answer = case.answer
        return self.chat(messages, answer, weight=TEXT if task == "story" else ANSWER)

    def plain(self) -> Document:
        """Return a story without a conversation around it."""
        text = tasks.plain_story(self.rng)
        ids = [*self.encoder.encode(text), self.encoder.end_of_text]
        return ids, [TEXT] * len(ids)

    def talk(self) -> Document:
        """Return small talk, or a few characters beyond ASCII to copy."""
        rng = self.rng
        if rng.random() < 0.6:
            question, answer = rng.choice(TALK)
            return self.chat(tasks.user(question), answer, weight=TEXT)
        count = rng.randint(2, 12)
        signs = [rng.choice(SIGNS + " ") for _ in range(count)]
        text = "".join(signs).strip() or "ä"
        messages = tasks.user(f"Copy these words:\n{text}")
        return self.chat(messages, text, weight=TEXT)

    def short(self) -> Document:
        """Return a document of a random kind; a needle document among them has stories of at most 400 words and
        signs.
        """
        kind = self.rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
        if kind == "plain":
            return self.plain()
        if kind == "talk":
            return self.talk()
        if kind == "dense":
            return self.needle(0)
        if kind == "needle":
            return self.needle(400)
        return self.several(kind, MOST_CASES[kind])

    def row(self, size: int, longest: int, share: float) -> np.ndarray:
        """Return a row of `size` tokens, an array (3, size).

        With probability `share` it begins with a needle document of up to `longest` words and signs.  Short documents
        follow; the last one is a plain story that is cut off at the end of the row.
        """
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
            row[0, at:end] = ids[: end - at]
            row[1, at:end] = number
            row[2, at:end] = weights[: end - at]
            at = end
            number += 1
        return row


def batch(encoder: Encoder, seed: int, index: int, rows: int, length: int, ramp: int) -> np.ndarray:
    """Return batch number `index`.  Needle documents grow to their full length over the first `ramp` batches."""
    rng = Random(f"batch {seed} {index}")
    writer = Writer(encoder, rng)
    grown = min(1.0, (index + 1) / max(1, ramp))
    growth = max(0, length * 0.88 - 200)
    longest = int(200 + grown * growth)
    share = 0.3 + 0.35 * grown
    written = [writer.row(length + 1, longest, share) for _ in range(rows)]
    return np.stack(written, axis=1)


def work(queue, folder: str, seed: int, start: int, stride: int, rows: int, length: int, ramp: int) -> None:
    """Put every `stride`-th batch from number `start` on into a queue, without end.  Runs in a worker process."""
    encoder = Encoder(load(folder))
    index = start
    while True:
        queue.put(batch(encoder, seed, index, rows, length, ramp))
        index += stride


def batches(
    folder: str, seed: int, start: int, rows: int, length: int, ramp: int, workers: int | None = None
) -> Iterator[np.ndarray]:
    """Yield all batches from number `start` on, in order.

    `workers` processes make them; 0 means this process, None one for each core but one.
    """
    if workers is None:
        workers = max(1, usable_cores() - 1)
    if workers == 0:
        encoder = Encoder(load(folder))
        while True:
            yield batch(encoder, seed, start, rows, length, ramp)
            start += 1
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue(maxsize=4) for _ in range(workers)]
    processes = []
    for i, queue in enumerate(queues):
        args = (queue, folder, seed, start + i, workers, rows, length, ramp)
        process = context.Process(target=work, args=args, daemon=True)
        process.start()
        processes.append(process)
    try:
        while True:
            for queue in queues:
                yield queue.get()
    finally:
        for process in processes:
            process.terminate()
