"""The tasks that measure pocket: needle, copy, sums, JSON, stories and echo.

`draw(task, rng, held_out)` makes one `TaskCase`, `cases(task, n)` a list of held-out cases.  `score` says whether an
answer is right.  No case is in both the training set and the held-out set: a checksum of the case's key decides which
of the two it belongs to, and a case of the wrong set is drawn again.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

from . import lexicon as lex
from .world import NOUNS, PRONOUNS, Teller, Wish, capital, where

HELD_OUT_SHARE = 16
"""One of this many keys is held out."""

PIECES = re.compile(r"\w+|[^\w\s]+")
"""Matches words and runs of signs.  No tokenizer of this project makes fewer tokens of a text than matches."""

WORD_LISTS = (
    lex.OBJECTS,
    lex.ANIMALS,
    lex.PEOPLE,
    lex.TRAITS,
    lex.LOOKS,
    lex.COLORS,
    lex.CONTAINERS,
    lex.HOBBIES,
    lex.DRINKS,
)
WORDS = tuple(dict.fromkeys(word for words in WORD_LISTS for word in words))


@dataclass
class TaskCase:
    """A question to the model.  `messages` ends with a user's message; `answer` is the right answer.  `meta["key"]`
    decides between training set and held-out set."""

    task: str
    messages: list[dict[str, str]]
    answer: str
    meta: dict = field(default_factory=dict)


def user(content: str) -> list[dict[str, str]]:
    """Return a conversation of one user message."""
    return [{"role": "user", "content": content}]


def is_held_out(key: str) -> bool:
    """Return whether a case with this key belongs to the held-out set."""
    return crc32(key.encode()) % HELD_OUT_SHARE == 0


# ---------------------------------------------------------------- needle


def needle_text(color: str, container: str, thing: str) -> str:
    """Return the sentence that is hidden in a long story, which is also the right answer."""
    return f"The {color} {container} held {lex.article(thing)}."


def needle_question(color: str, container: str) -> str:
    """Return the question about a needle."""
    return f"What did the {color} {container} hold?"


def needle(rng: Random, pieces: tuple[int, int] = (2060, 2200), needles: tuple[int, int] = (24, 24)) -> TaskCase:
    """Draw a case with sentences about the content of containers (needles) in stories, and a question about one.

    `pieces` bounds the words and signs of the user's message, which has at least the drawn number, and few more.
    `needles` bounds the number of needles.  The depth of each needle is uniform, from 0 to 1.  `meta["depth"]` is the
    depth of the needle in the question.
    """
    count = rng.randint(*needles)
    containers = len(lex.CONTAINERS)
    pairs = range(len(lex.COLORS) * containers)
    facts = []
    for pair in rng.sample(pairs, count):
        color = lex.COLORS[pair // containers]
        container = lex.CONTAINERS[pair % containers]
        thing = rng.choice(NOUNS)
        facts.append((color, container, thing))
    around = rng.randint(*pieces) - 7 * count - 7
    sentences = _sentences(rng, around)
    depths = sorted((rng.random(), i) for i in range(count))
    hidden: dict[int, list[str]] = {}  # index of a sentence -> the needles in front of it
    for depth, i in depths:
        place = int(depth * (len(sentences) + 1))
        in_front = hidden.setdefault(place, [])
        in_front.append(needle_text(*facts[i]))
    text = []
    for i in range(len(sentences) + 1):
        text += hidden.get(i, [])
        text += sentences[i : i + 1]
    story = " ".join(text)
    depth, chosen = rng.choice(depths)
    color, container, thing = facts[chosen]
    question = needle_question(color, container)
    answer = needle_text(color, container, thing)
    meta = {"key": story, "depth": depth, "needles": facts, "asked": chosen}
    return TaskCase("needle", user(f"{story}\n\n{question}"), answer, meta)


def _sentences(rng: Random, pieces: int) -> list[str]:
    """Return sentences of stories which have at least `pieces` words and signs together."""
    teller = Teller(rng)
    sentences: list[str] = []
    while pieces > 0:
        for sentence in teller.tell().sentences:
            pieces -= len(PIECES.findall(sentence))
            sentences.append(sentence)
            if pieces <= 0:
                break
    return sentences


# ---------------------------------------------------------------- copy and sums


def copy(rng: Random, words: tuple[int, int] = (12, 40), made_up: float = 0.0) -> TaskCase:
    """Draw a case with a row of words to repeat.  A word may occur twice.  `made_up` is the share of made-up words."""
    count = rng.randint(*words)
    row = []
    for _ in range(count):
        invented = rng.random() < made_up
        word = lex.coined(rng) if invented else rng.choice(WORDS)
        row.append(word)
    return _copy_case("copy", row)


def _copy_case(task: str, words: list[str]) -> TaskCase:
    """Return a case with words to repeat."""
    text = " ".join(words)
    messages = user(f"Copy these words:\n{text}")
    return TaskCase(task, messages, text, {"key": text})


def echo(rng: Random, words: tuple[int, int] = (20, 32), different: int = 4) -> TaskCase:
    """Draw a case with a row of words to repeat that has only a few different words.

    Training has no such rows.  The last words hardly show the present position in the row, so the task is at the limit
    of the model.  It is the first task to fail when precision is lost or the cache is damaged.
    """
    few = rng.sample(WORDS, different)
    count = rng.randint(*words)
    row = [rng.choice(few) for _ in range(count)]
    return _copy_case("echo", row)


def number(rng: Random) -> int:
    """Draw a number of one to four digits."""
    digits = rng.choice((1, 2, 2, 3, 3, 3, 4, 4))
    smallest = 0
    if digits > 1:
        smallest = 10 ** (digits - 1)
    return rng.randrange(smallest, 10**digits)


def sums(rng: Random) -> TaskCase:
    """Draw a case with two numbers of one to four digits to add.  The case's key is the same in both orders."""
    a = number(rng)
    b = number(rng)
    low, high = sorted((a, b))
    messages = user(f"What is {a} + {b}?")
    answer = f"{a} + {b} = {a + b}"
    return TaskCase("sums", messages, answer, {"key": f"{low}+{high}"})


# ---------------------------------------------------------------- JSON


Fact = tuple[object, str]  # (value, sentence that states it)


def person(rng: Random) -> tuple[list[str], dict]:
    """Draw sentences about a person and their values by key.  The first sentence has the name and the job."""
    gender = rng.choice(("she", "he"))
    name = rng.choice(lex.NAMES[gender])
    job = rng.choice(lex.JOBS)
    they = PRONOUNS[gender]["They"]
    their = PRONOUNS[gender]["Their"]
    age = rng.randint(6, 99)
    brothers = rng.randint(2, 9)
    tea = rng.random() < 0.5
    town = rng.choice(lex.TOWNS)
    pet = rng.choice(lex.PETS)
    color = rng.choice(lex.COLORS)
    day = rng.choice(lex.DAYS)
    hobbies = rng.sample(lex.HOBBIES, rng.randint(2, 3))
    *others, last = hobbies
    liked = ", ".join(others) + " and " + last
    living = rng.choice((f"{they} lives in {town}.", f"{their} house is in {town}."))
    facts: dict[str, Fact] = {
        "age": (age, f"{they} is {age} years old."),
        "town": (town, living),
        "pet": (pet, f"{they} has {lex.article(pet)}."),
        "color": (color, f"{their} favorite color is {color}."),
        "brothers": (brothers, f"{they} has {brothers} brothers."),
        "tea": (tea, f"{they} likes tea." if tea else f"{they} does not like tea."),
        "hobbies": (hobbies, f"{their} hobbies are {liked}."),
        "day": (day, f"{they} comes every {day}."),
    }
    count = rng.randint(3, 7)
    keys = rng.sample(list(facts), count)
    first = f"{name} is {lex.article(job)}."
    return _with_facts(first, {"name": name, "job": job}, facts, keys)


def goods(rng: Random) -> tuple[list[str], dict]:
    """Draw sentences about a thing that is for sale, and their values by key."""
    thing = rng.choice(NOUNS)
    color = rng.choice(lex.COLORS)
    town = rng.choice(lex.TOWNS)
    price = rng.randint(2, 99)
    left = rng.randint(2, 60)
    used = rng.random() < 0.5
    facts: dict[str, Fact] = {}
    facts["price"] = price, rng.choice((f"It costs {price} coins.", f"The price is {price} coins."))
    facts["left"] = left, f"There are {left} left."
    facts["town"] = town, rng.choice((f"The shop is in {town}.", f"One can buy it in {town}."))
    facts["used"] = used, "It is used." if used else "It is not used."
    count = rng.randint(2, 4)
    keys = rng.sample(list(facts), count)
    first = f"The shop sells {lex.article(color)} {thing}."
    return _with_facts(first, {"item": thing, "color": color}, facts, keys)


def _with_facts(first: str, values: dict, facts: dict[str, Fact], keys: list[str]) -> tuple[list[str], dict]:
    """Return the first sentence and the sentences of `keys`, and all values in these sentences."""
    sentences = [first]
    values = dict(values)
    for key in keys:
        value, sentence = facts[key]
        sentences.append(sentence)
        values[key] = value
    return sentences, values


JSON_TYPES = {str: "string", int: "integer", bool: "boolean", list: "list"}


def schema_for(values: dict) -> dict:
    """Return the JSON schema of an object with values of these types."""
    kinds: dict[str, dict] = {}
    for key, value in values.items():
        kinds[key] = {"type": JSON_TYPES[type(value)]}
        if isinstance(value, list):
            kinds[key] = {"type": "array", "items": {"type": "string"}}
    return {"type": "object", "properties": kinds, "required": list(values), "additionalProperties": False}


def json_task(rng: Random) -> TaskCase:
    """Draw a case with a short text and keys to answer with.  The answer must fit the JSON schema `meta["schema"]`."""
    make = person if rng.random() < 0.6 else goods
    sentences, known = make(rng)
    count = rng.randint(2, min(5, len(known)))
    values, described = {}, []
    for key in rng.sample(list(known), count):
        value = known[key]
        values[key] = value
        described.append(f"{key} ({JSON_TYPES[type(value)]})")
    text = " ".join(sentences)
    content = f"{text}\n\nAnswer in JSON with these keys: {', '.join(described)}."
    answer = json.dumps(values)
    meta = {"key": content, "schema": schema_for(values), "values": values}
    return TaskCase("json", user(content), answer, meta)


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
    """Draw a case with the request for a story.  The story must contain the words `meta["words"]`.

    With `made_up` the hero and the thing are mostly made-up words.
    """
    wish = Wish()
    form = rng.choice(("hero thing", "hero thing", "hero", "thing", "name", "two", "place", "named thing"))
    kinds = lex.ANIMALS + lex.PEOPLE
    hero = _noun(rng, kinds, made_up)
    if "name" in form:
        gender = lex.GENDER.get(hero) or rng.choice(("she", "he"))
        wish.name = rng.choice(lex.NAMES[gender])
    if form != "thing":
        wish.hero = hero
    if "thing" in form:
        wish.thing = _noun(rng, NOUNS, made_up)
    if form == "two":
        others = [other for other in kinds if other != hero]
        wish.helper = rng.choice(others)
    if form == "place":
        wish.place = rng.choice(lex.HOMES)
    text = Teller(rng).tell(wish).text
    wished = (wish.hero, wish.name, wish.thing, wish.helper, wish.place)
    words = [word for word in wished if word]
    request = rng.choice(ASK)
    content = request.format(_subject(wish))
    return TaskCase("story", user(content), text, {"key": "+".join(words), "words": words})


def _noun(rng: Random, nouns: Sequence[str], made_up: bool) -> str:
    """Draw one of some nouns; with `made_up`, it is a made-up word in 7 of 10 draws."""
    if made_up and rng.random() < 0.7:
        return lex.coined(rng)
    return rng.choice(nouns)


def _subject(wish: Wish) -> str:
    """Return the subject of a story in words: 'a fox named Mia and a lantern'."""
    about = lex.article(wish.hero) if wish.hero else ""
    if wish.name:
        about += f" named {wish.name}"
    if wish.place:
        about += f" {where(wish.place)}"
    second = wish.thing or wish.helper
    if not second:
        return about
    noun = lex.article(second)
    return f"{about} and {noun}" if about else noun


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
    """Draw a case of a task from the training set or the held-out set.  `options` are those of the task's function."""
    while True:
        case = TASKS[task](rng, **options)
        if is_held_out(case.meta["key"]) == held_out:
            return case


def cases(task: str, n: int = 500, seed: int = 0, **options) -> list[TaskCase]:
    """Return `n` different held-out cases of a task."""
    rng = Random(f"held-out {task} {seed}")
    found: dict[str, TaskCase] = {}
    while len(found) < n:
        case = draw(task, rng, held_out=True, **options)
        content = json.dumps(case.messages)
        found.setdefault(content, case)
    return list(found.values())


def fits(value: object, schema: dict) -> bool:
    """Return whether a value fits a schema of `schema_for`."""
    kind = schema["type"]
    if kind == "object":
        if not isinstance(value, dict) or set(value) != set(schema["required"]):
            return False
        properties = schema["properties"]
        return all(fits(value[key], inner) for key, inner in properties.items())
    if kind == "array":
        if not isinstance(value, list):
            return False
        return all(fits(item, schema["items"]) for item in value)
    wanted = {"string": str, "integer": int, "boolean": bool}
    return type(value) is wanted[kind]


def parsed(text: str) -> object:
    """Return the value of a JSON text, None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits_schema(case: TaskCase, text: str) -> bool:
    """Return whether an answer is JSON that fits the schema of its case, with any values."""
    return fits(parsed(text), case.meta["schema"])


def is_story(case: TaskCase, text: str) -> bool:
    """Return whether a text is a finished story with all required words, six sentences or more, and none twice."""
    stripped = text.strip()
    sentences = re.split(r"(?<=[.!?])\s+", stripped)
    if len(sentences) < 6 or len(set(sentences)) < len(sentences):
        return False
    if not stripped.endswith((".", '"', "!")):
        return False
    words = case.meta["words"]
    return all(re.search(rf"\b{word}\b", text) for word in words)


def score(case: TaskCase, text: str) -> bool:
    """Return whether a text is a right answer.

    A JSON answer must have the right values, a story must satisfy `is_story`, any other answer must be equal.
    """
    if case.task == "json":
        return fits_schema(case, text) and parsed(text) == case.meta["values"]
    if case.task == "story":
        return is_story(case, text)
    return text.strip() == case.answer


def plain_story(rng: Random, held_out: bool = False) -> str:
    """Draw a story without a question from the training set or the held-out set."""
    teller = Teller(rng)
    while True:
        text = teller.tell().text
        if is_held_out(text) == held_out:
            return capital(text)
