"""A small world and its stories, written from a seed.

`Teller(random.Random(seed))` makes up stories about a hero, a thing, a helper and a few places.  The plots and their
sentences are in `plots.py` and `beats.py`, the words in `lexicon.py`; this file casts the roles and keeps a story
coherent: the same names, the same thing, the right pronouns from the first sentence to the last.
"""

from dataclasses import dataclass, field
from random import Random

from . import beats, plots
from .lexicon import ANIMALS, GENDER, HOMES, LOOKS, NAMES, OBJECTS, PEOPLE, PLACES, SKILLS, TRAITS, article

PRONOUNS = {
    "she": {"they": "she", "They": "She", "them": "her", "their": "her", "Their": "Her", "self": "herself"},
    "he": {"they": "he", "They": "He", "them": "him", "their": "his", "Their": "His", "self": "himself"},
}
TIMES = (
    "one day",
    "one morning",
    "one evening",
    "one night",
    "one summer day",
    "one winter day",
    "early one morning",
    "late one evening",
    "one fine day",
    "one autumn day",
)
NOUNS = tuple(OBJECTS)
PLAIN = ("", "")


@dataclass
class Role:
    """Somebody in a story: what they are, what they are called and how they are spoken of."""

    kind: str
    gender: str
    name: str = ""
    trait: str = ""

    def intro(self) -> str:
        """The first mention: 'a brave fox named Mia'."""
        noun = f"{self.trait} {self.kind}" if self.trait else self.kind
        return article(noun) + (f" named {self.name}" if self.name else "")

    def short(self, rng: Random) -> str:
        """A later mention: the name, or now and then the kind."""
        if self.name and rng.random() < 0.75:
            return self.name
        return f"the {self.kind}"


@dataclass
class Wish:
    """What a story has to be about; whatever is left empty the teller chooses."""

    hero: str = ""
    name: str = ""
    thing: str = ""
    helper: str = ""
    place: str = ""
    plot: str = ""


@dataclass
class Story:
    """A finished story and the facts in it."""

    text: str
    plot: str
    hero: Role
    helper: Role
    thing: str
    place: str
    sentences: list[str] = field(default_factory=list)


def where(place: str) -> str:
    """Being at a place: 'in the forest'."""
    return f"{PLACES[place]} {place}"


def capital(text: str) -> str:
    """The text with a capital letter in front."""
    return text[:1].upper() + text[1:]


class Teller:
    """Makes up one story after the other from a random number generator."""

    def __init__(self, rng: Random):
        self.rng = rng

    def role(self, kind: str = "", name: str = "", taken: tuple[str, ...] = (), named: float = 0.6) -> Role:
        """Cast somebody of this kind (or of any kind not taken yet)."""
        rng = self.rng
        gender = next((g for g, names in NAMES.items() if name in names), "")
        while not kind:
            kind = rng.choice(ANIMALS if rng.random() < 0.65 else PEOPLE)
            if kind in taken or (gender and GENDER.get(kind, gender) != gender):
                kind = ""
        gender = gender or GENDER.get(kind) or rng.choice(("she", "he"))
        if not name and rng.random() < named:
            name = rng.choice(NAMES[gender])
            if name in taken:
                name = ""
        trait = rng.choice(TRAITS) if rng.random() < 0.7 else ""
        return Role(kind, gender, name, trait)

    def plot_for(self, wish: Wish) -> str:
        """A plot in which the thing that is wished for makes sense."""
        if wish.plot:
            return wish.plot
        while True:
            plot = self.rng.choice(tuple(plots.PLOTS))
            if plot == "tool" and wish.thing and not OBJECTS.get(wish.thing, PLAIN)[0]:
                continue
            if plot == "learn" and wish.thing and wish.thing not in SKILLS:
                continue
            return plot

    def thing_for(self, plot: str) -> str:
        """A thing that the plot can use."""
        if plot == "learn":
            return self.rng.choice(tuple(SKILLS))
        while True:
            thing = self.rng.choice(NOUNS)
            if plot != "tool" or OBJECTS[thing][0]:
                return thing

    def tell(self, wish: Wish | None = None) -> Story:
        """A new story about what is wished for."""
        rng, wish = self.rng, wish or Wish()
        plot = self.plot_for(wish)
        thing = wish.thing or self.thing_for(plot)
        hero = self.role(wish.hero, wish.name, taken=(wish.helper,))
        helper = self.role(wish.helper, taken=(hero.kind, hero.name))
        third = self.role(taken=(hero.kind, hero.name, helper.kind, helper.name), named=0.3)
        home = wish.place or rng.choice(HOMES)
        others = rng.sample([p for p in PLACES if p != home], 2)
        fields = self.fields(hero, helper, third, thing, (home, *others))
        sentences = []
        for beat in plots.PLOTS[plot]:
            template = rng.choice(beat)
            if template is None:
                continue
            if template in ("{trouble}", "{rescue}"):
                template = rng.choice(beats.TROUBLE[OBJECTS[thing][0]][template == "{rescue}"])
            for key, who in (("h", hero), ("k", helper), ("x", third)):
                fields[key] = short = who.short(rng)
                fields[key.upper()] = capital(short)
            sentences.append(capital(template.format_map(fields)))
        return Story(" ".join(sentences), plot, hero, helper, thing, home, sentences)

    def fields(self, hero: Role, helper: Role, third: Role, thing: str, places: tuple[str, ...]) -> dict[str, str]:
        """Everything that a sentence of a plot may name."""
        rng = self.rng
        look = rng.choice(LOOKS)
        give, swap = rng.sample([n for n in rng.sample(NOUNS, 4) if n != thing], 2)
        when = rng.choice(TIMES)
        fields = {
            "ah": hero.intro(),
            "ak": helper.intro(),
            "ax": third.intro(),
            "o": thing,
            "ao": article(thing),
            "lo": f"{look} {thing}",
            "alo": article(f"{look} {thing}"),
            "y": give,
            "ay": article(give),
            "z": swap,
            "az": article(swap),
            "when": when,
            "When": capital(when),
            "use": OBJECTS.get(thing, PLAIN)[1],
            "skill": SKILLS.get(thing, ""),
            **PRONOUNS[hero.gender],
        }
        for i, place in enumerate(places):
            n = str(i + 1) if i else ""
            fields |= {f"p{n}": place, f"at{n}": where(place), f"At{n}": capital(where(place)), f"to{n}": f"to {place}"}
        return fields
