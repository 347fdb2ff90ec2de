"""The tasks that put a number on pocket: needle, copy, sums, JSON, stories and echo.

`draw(task, rng, held_out)` makes one `TaskCase`, `cases(task, n)` a list of held-out ones, `score` says whether an
answer is right.  Training and held-out cases are disjoint by construction: each case has a key, a checksum of the
key says on which side it falls, and a generator throws away what falls on the other.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from . import lexicon as lex
from .world import NOUNS, PRONOUNS, Teller, Wish, capital, where

HELD_OUT_SHARE = 16
"""One key in so many is held out."""

PIECES = re.compile(r"\w+|[^\w\s]+")
"""A text has at least as many tokens as it has words and runs of signs, whatever the tokenizer merges."""

WORDS = tuple(
    dict.fromkeys(
        [
            *lex.OBJECTS,
            *lex.ANIMALS,
            *lex.PEOPLE,
            *lex.TRAITS,
            *lex.LOOKS,
            *lex.COLORS,
            *lex.CONTAINERS,
            *lex.HOBBIES,
            *lex.DRINKS,
        ]
    )
)


@dataclass
class TaskCase:
    """One question to the model: the messages so far (the last is the user's) and the answer that is right."""

    task: str
    messages: list[dict[str, str]]
    answer: str
    meta: dict = field(default_factory=dict)


def user(content: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": content}]


def is_held_out(key: str) -> bool:
    """Whether a case with this key is kept from training."""
    return crc32(key.encode()) % HELD_OUT_SHARE == 0


# ---------------------------------------------------------------- needle


def needle_text(color: str, container: str, thing: str) -> str:
    """The sentence that is hidden in a long story, and the answer that is asked for."""
    return f"The {color} {container} held {lex.article(thing)}."


def needle_question(color: str, container: str) -> str:
    """What is asked about a needle."""
    return f"What did the {color} {container} hold?"


def needle(rng: Random, pieces: tuple[int, int] = (2060, 2200), needles: tuple[int, int] = (24, 24)) -> TaskCase:
    """Sentences about what boxes held, far apart in a row of stories, and a question about one of them.

    `pieces` bounds the words and signs of the user's message from below (and nearly from above), `needles` how many
    there are.  All needles lie at uniform depths; `meta["depth"]` is that of the one asked for.
    """
    count = rng.randint(*needles)
    keys = rng.sample(range(len(lex.COLORS) * len(lex.CONTAINERS)), count)
    facts = [
        (lex.COLORS[k // len(lex.CONTAINERS)], lex.CONTAINERS[k % len(lex.CONTAINERS)], rng.choice(NOUNS)) for k in keys
    ]
    room = rng.randint(*pieces) - 7 * count - 7
    sentences: list[str] = []
    teller = Teller(rng)
    while room > 0:
        for sentence in teller.tell().sentences:
            room -= len(PIECES.findall(sentence))
            sentences.append(sentence)
            if room <= 0:
                break
    places = sorted((rng.random(), i) for i in range(count))
    slots: dict[int, list[str]] = {}
    for depth, i in places:
        slots.setdefault(int(depth * (len(sentences) + 1)), []).append(needle_text(*facts[i]))
    text = []
    for i in range(len(sentences) + 1):
        text += slots.get(i, [])
        text += sentences[i : i + 1]
    story = " ".join(text)
    depth, asked = rng.choice(places)
    content = f"{story}\n\n{needle_question(*facts[asked][:2])}"
    return TaskCase(
        "needle",
        user(content),
        needle_text(*facts[asked]),
        {"key": story, "depth": depth, "needles": facts, "asked": asked},
    )


# ---------------------------------------------------------------- copy and sums


def copy(rng: Random, words: tuple[int, int] = (12, 40), made_up: float = 0.0) -> TaskCase:
    """A row of words to be written once more; a word may come twice, and a share of them may be made up."""
    row = (lex.coined(rng) if rng.random() < made_up else rng.choice(WORDS) for _ in range(rng.randint(*words)))
    text = " ".join(row)
    return TaskCase("copy", user(f"Copy these words:\n{text}"), text, {"key": text})


def echo(rng: Random, words: tuple[int, int] = (20, 32), different: int = 4) -> TaskCase:
    """A row of words to be written once more in which only a few words come, again and again.

    Training has no such rows.  The words before hardly tell where in the row one is, so the model is at the edge of
    what it can do, and this task is the first to fall when precision or the cache is damaged.
    """
    few = rng.sample(WORDS, different)
    text = " ".join(rng.choice(few) for _ in range(rng.randint(*words)))
    return TaskCase("echo", user(f"Copy these words:\n{text}"), text, {"key": text})


def number(rng: Random) -> int:
    """A number of one to four digits."""
    digits = rng.choice((1, 2, 2, 3, 3, 3, 4, 4))
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def sums(rng: Random) -> TaskCase:
    """Two numbers of one to four digits to be added."""
    a, b = number(rng), number(rng)
    low, high = sorted((a, b))
    return TaskCase("sums", user(f"What is {a} + {b}?"), f"{a} + {b} = {a + b}", {"key": f"{low}+{high}"})


# ---------------------------------------------------------------- JSON


def person(rng: Random) -> tuple[list[str], dict]:
    """Sentences about a person, and what they say as values; the first is about the name."""
    gender = rng.choice(("she", "he"))
    name, job = rng.choice(lex.NAMES[gender]), rng.choice(lex.JOBS)
    say = PRONOUNS[gender]
    age, brothers, tea = rng.randint(6, 99), rng.randint(2, 9), rng.random() < 0.5
    town, pet, color, day = (rng.choice(x) for x in (lex.TOWNS, lex.PETS, lex.COLORS, lex.DAYS))
    hobbies = rng.sample(lex.HOBBIES, rng.randint(2, 3))
    liked = ", ".join(hobbies[:-1]) + " and " + hobbies[-1]
    more = {
        "age": (age, f"{say['They']} is {age} years old."),
        "town": (town, rng.choice((f"{say['They']} lives in {town}.", f"{say['Their']} house is in {town}."))),
        "pet": (pet, f"{say['They']} has {lex.article(pet)}."),
        "color": (color, f"{say['Their']} favorite color is {color}."),
        "brothers": (brothers, f"{say['They']} has {brothers} brothers."),
        "tea": (tea, f"{say['They']} likes tea." if tea else f"{say['They']} does not like tea."),
        "hobbies": (hobbies, f"{say['Their']} hobbies are {liked}."),
        "day": (day, f"{say['They']} comes every {day}."),
    }
    keys = rng.sample(list(more), rng.randint(3, 7))
    values = {"name": name, "job": job} | {k: more[k][0] for k in keys}
    return [f"{name} is {lex.article(job)}."] + [more[k][1] for k in keys], values


def goods(rng: Random) -> tuple[list[str], dict]:
    """Sentences about something that is for sale, and what they say as values."""
    thing, color, town = rng.choice(NOUNS), rng.choice(lex.COLORS), rng.choice(lex.TOWNS)
    price, left, used = rng.randint(2, 99), rng.randint(2, 60), rng.random() < 0.5
    more = {
        "price": (price, rng.choice((f"It costs {price} coins.", f"The price is {price} coins."))),
        "left": (left, f"There are {left} left."),
        "town": (town, rng.choice((f"The shop is in {town}.", f"One can buy it in {town}."))),
        "used": (used, "It is used." if used else "It is not used."),
    }
    keys = rng.sample(list(more), rng.randint(2, 4))
    values = {"item": thing, "color": color} | {k: more[k][0] for k in keys}
    return [f"The shop sells {lex.article(color)} {thing}."] + [more[k][1] for k in keys], values


JSON_TYPES = {str: "string", int: "integer", bool: "boolean", list: "list"}


def schema_for(values: dict) -> dict:
    """The JSON schema of an object with such values."""
    kinds = {
        k: {"type": "array", "items": {"type": "string"}} if isinstance(v, list) else {"type": JSON_TYPES[type(v)]}
        for k, v in values.items()
    }
    return {"type": "object", "properties": kinds, "required": list(values), "additionalProperties": False}


def json_task(rng: Random) -> TaskCase:
    """A short text and the keys to answer with; `meta["schema"]` is the JSON schema that the answer must fit."""
    sentences, values = (person if rng.random() < 0.6 else goods)(rng)
    asked = rng.sample(list(values), rng.randint(2, min(5, len(values))))
    values = {k: values[k] for k in asked}
    keys = ", ".join(f"{k} ({JSON_TYPES[type(v)]})" for k, v in values.items())
    content = f"{' '.join(sentences)}\n\nAnswer in JSON with these keys: {keys}."
    return TaskCase(
        "json", user(content), json.dumps(values), {"key": content, "schema": schema_for(values), "values": values}
    )


# ---------------------------------------------------------------- stories

ASK = (
    "Tell me a story about {}.",
    "Tell me a short story about {}.",
    "Write a story about {}.",
    "Please tell me a story about {}.",
    "Can you tell me a story about {}?",
    "I would like to hear a story about {}.",
    "Write a short story about {}.",
)


def story(rng: Random, made_up: bool = False) -> TaskCase:
    """A wish for a story; `meta["words"]` are the words that it must contain.  The hero or the thing may be made up."""
    wish = Wish()
    form = rng.choice(("hero thing", "hero thing", "hero", "thing", "name", "two", "place", "named thing"))
    kind = lex.coined(rng) if made_up and rng.random() < 0.7 else rng.choice(lex.ANIMALS + lex.PEOPLE)
    if "name" in form:
        wish.name = rng.choice(lex.NAMES[lex.GENDER.get(kind) or rng.choice(("she", "he"))])
    if form != "thing":
        wish.hero = kind
    if "thing" in form:
        wish.thing = lex.coined(rng) if made_up and rng.random() < 0.7 else rng.choice(NOUNS)
    if form == "two":
        wish.helper = rng.choice([k for k in lex.ANIMALS + lex.PEOPLE if k != kind])
    if form == "place":
        wish.place = rng.choice(lex.HOMES)
    about = lex.article(wish.hero) if wish.hero else ""
    about += f" named {wish.name}" if wish.name else ""
    about += f" {where(wish.place)}" if wish.place else ""
    last = wish.thing or wish.helper
    about += (" and " if about and last else "") + (lex.article(last) if last else "")
    told = Teller(rng).tell(wish)
    words = [w for w in (wish.hero, wish.name, wish.thing, wish.helper, wish.place) if w]
    return TaskCase("story", user(rng.choice(ASK).format(about)), told.text, {"key": "+".join(words), "words": words})


# ---------------------------------------------------------------- drawing and scoring

TASKS: dict[str, Callable[..., TaskCase]] = {
    "needle": needle,
    "copy": copy,
    "sums": sums,
    "json": json_task,
    "story": story,
    "echo": echo,
}


def draw(task: str, rng: Random, held_out: bool = False, **options) -> TaskCase:
    """One case of the task, from the training side or the held-out side."""
    while True:
        case = TASKS[task](rng, **options)
        if is_held_out(case.meta["key"]) == held_out:
            return case


def cases(task: str, n: int = 500, seed: int = 0, **options) -> list[TaskCase]:
    """`n` held-out cases of the task, all different."""
    rng = Random(f"held-out {task} {seed}")
    found: dict[str, TaskCase] = {}
    while len(found) < n:
        case = draw(task, rng, held_out=True, **options)
        found.setdefault(json.dumps(case.messages), case)
    return list(found.values())


def fits(value: object, schema: dict) -> bool:
    """Whether a value fits a schema of the kind that `schema_for` writes."""
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(value) == set(schema["required"])
            and all(fits(value[k], s) for k, s in schema["properties"].items())
        )
    if kind == "array":
        return isinstance(value, list) and all(fits(v, schema["items"]) for v in value)
    wanted = {"string": str, "integer": int, "boolean": bool}[kind]
    return type(value) is wanted


def parsed(text: str) -> object:
    """The text as JSON, or None where it is not."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits_schema(case: TaskCase, text: str) -> bool:
    """Whether a JSON answer parses and fits the schema of its case, whatever its values."""
    return fits(parsed(text), case.meta["schema"])


def is_story(case: TaskCase, text: str) -> bool:
    """Whether a text is a finished story that has all the words that were asked for and no sentence twice."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    return (
        all(re.search(rf"\b{word}\b", text) for word in case.meta["words"])
        and len(sentences) >= 6
        and text.rstrip().endswith((".", '"', "!"))
        and len(set(sentences)) == len(sentences)
    )


def score(case: TaskCase, text: str) -> bool:
    """Whether the text answers the case: exactly, or for JSON with equal values, or for a story as `is_story` says."""
    if case.task == "json":
        return fits_schema(case, text) and parsed(text) == case.meta["values"]
    if case.task == "story":
        return is_story(case, text)
    return text.strip() == case.answer


def plain_story(rng: Random, held_out: bool = False) -> str:
    """A story without any question, from the training side or the held-out side."""
    teller = Teller(rng)
    while True:
        text = teller.tell().text
        if is_held_out(text) == held_out:
            return capital(text)
