"""A small world and its stories, written from a seed.

`Teller(random.Random(seed))` invents stories about a hero, a thing, a helper and a few places.  The plots and their
sentences are in `plots.py` and `beats.py`, the words in `lexicon.py`.  This file chooses the roles and keeps a story
coherent: the same names, the same thing and the right pronouns in all sentences.
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
    """A person or animal in a story.  `gender`, "she" or "he", decides the pronouns; name and trait may be ""."""

    kind: str
    gender: str
    name: str = ""
    trait: str = ""

    def intro(self) -> str:
        """Return the text of the first mention: 'a brave fox named Mia'."""
        noun = article(f"{self.trait} {self.kind}" if self.trait else self.kind)
        return f"{noun} named {self.name}" if self.name else noun

    def short(self, rng: Random) -> str:
        """Return the text of a later mention: mostly the name, sometimes the kind."""
        if self.name and rng.random() < 0.75:
            return self.name
        return f"the {self.kind}"


@dataclass
class Wish:
    """The wanted subject of a story.  The teller chooses the fields that are empty."""

    hero: str = ""
    name: str = ""
    thing: str = ""
    helper: str = ""
    place: str = ""
    plot: str = ""


@dataclass
class Story:
    """A finished story and its facts."""

    text: str
    plot: str
    hero: Role
    helper: Role
    thing: str
    place: str
    sentences: list[str] = field(default_factory=list)


def where(place: str) -> str:
    """Return a place with its preposition: 'in the forest'."""
    return f"{PLACES[place]} {place}"


def capital(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


class Teller:
    """Invents stories with a random number generator."""

    def __init__(self, rng: Random):
        self.rng = rng

    def role(self, kind: str = "", name: str = "", taken: tuple[str, ...] = (), named: float = 0.6) -> Role:
        """Choose a role of a kind, or of any kind that is not in `taken`.

        A name is chosen with probability `named`, unless `name` is given.
        """
        rng = self.rng
        gender = next((gender for gender, names in NAMES.items() if name in names), "")
        while not kind:
            kinds = ANIMALS if rng.random() < 0.65 else PEOPLE
            kind = rng.choice(kinds)
            of_kind = GENDER.get(kind, gender)
            if kind in taken or (gender and of_kind != gender):
                kind = ""
        if not gender:
            gender = GENDER.get(kind) or rng.choice(("she", "he"))
        if not name and rng.random() < named:
            name = rng.choice(NAMES[gender])
            if name in taken:
                name = ""
        trait = ""
        if rng.random() < 0.7:
            trait = rng.choice(TRAITS)
        return Role(kind, gender, name, trait)

    def plot_for(self, wish: Wish) -> str:
        """Return a plot that can use the thing of the wish."""
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
        """Return a thing that a plot can use."""
        if plot == "learn":
            return self.rng.choice(tuple(SKILLS))
        while True:
            thing = self.rng.choice(NOUNS)
            if plot != "tool" or OBJECTS[thing][0]:
                return thing

    def tell(self, wish: Wish | None = None) -> Story:
        """Tell a new story about the subject of a wish."""
        rng = self.rng
        wish = wish or Wish()
        plot = self.plot_for(wish)
        thing = wish.thing or self.thing_for(plot)
        hero = self.role(wish.hero, wish.name, taken=(wish.helper,))
        helper = self.role(wish.helper, taken=(hero.kind, hero.name))
        third = self.role(taken=(hero.kind, hero.name, helper.kind, helper.name), named=0.3)
        home = wish.place or rng.choice(HOMES)
        away = [place for place in PLACES if place != home]
        places = (home, *rng.sample(away, 2))
        fields = self.fields(hero, helper, third, thing, places)
        roles = {"h": hero, "k": helper, "x": third}
        sentences = []
        for beat in plots.PLOTS[plot]:
            template = rng.choice(beat)
            if template is None:
                continue
            if template in ("{trouble}", "{rescue}"):
                use = OBJECTS[thing][0]
                trouble, rescue = beats.TROUBLE[use]
                template = rng.choice(rescue if template == "{rescue}" else trouble)
            for key, role in roles.items():
                mention = role.short(rng)
                fields[key] = mention
                fields[key.upper()] = capital(mention)
            sentence = template.format_map(fields)
            sentences.append(capital(sentence))
        text = " ".join(sentences)
        return Story(text, plot, hero, helper, thing, home, sentences)

    def fields(self, hero: Role, helper: Role, third: Role, thing: str, places: tuple[str, ...]) -> dict[str, str]:
        """Return the fields that the sentences of plots use, by name."""
        rng = self.rng
        look = rng.choice(LOOKS)
        things = [other for other in rng.sample(NOUNS, 4) if other != thing]
        given, received = rng.sample(things, 2)
        when = rng.choice(TIMES)
        looking = f"{look} {thing}"
        fields = {"ah": hero.intro(), "ak": helper.intro(), "ax": third.intro()}
        fields |= {"o": thing, "ao": article(thing)}
        fields |= {"lo": looking, "alo": article(looking)}
        fields |= {"y": given, "ay": article(given)}
        fields |= {"z": received, "az": article(received)}
        fields |= {"when": when, "When": capital(when)}
        fields["use"] = OBJECTS.get(thing, PLAIN)[1]
        fields["skill"] = SKILLS.get(thing, "")
        fields |= PRONOUNS[hero.gender]
        for number, place in zip(("", "2", "3"), places, strict=True):
            at = where(place)
            fields[f"p{number}"] = place
            fields[f"at{number}"] = at
            fields[f"At{number}"] = capital(at)
            fields[f"to{number}"] = f"to {place}"
        return fields
