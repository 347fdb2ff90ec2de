"""The words of the small world: its people and animals, their things and their places.

`world` and `tasks` write only with these words.  So a vocabulary of two thousand tokens has one token for nearly every
word.
"""

from random import Random


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


def article(noun: str) -> str:
    """Return a noun with its indefinite article: 'a fox', 'an owl'."""
    return ("an " if noun[0] in "aeiouAEIOU" else "a ") + noun


def coined(rng: Random) -> str:
    """Return an invented word.  With such words the model learns to use nouns that it has not seen in training."""
    count = rng.randint(1, 3)
    syllables = []
    for _ in range(count):
        onset = rng.choice(ONSETS)
        syllables.append(onset + rng.choice("aeiou"))
    return "".join(syllables) + rng.choice("nrtlkmsx")


ONSETS = words("b bl br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh sk sp st t th tr v w z")
ANIMALS = words(
    "fox rabbit bear owl mouse hedgehog badger otter squirrel crow frog duck goat cat dog hen mole deer wolf "
    "turtle donkey goose sparrow beaver"
)
PEOPLE = words(
    "girl boy baker miller sailor farmer shepherd weaver fisher gardener clockmaker tailor painter potter knight "
    "queen king teacher doctor juggler"
)
GENDER = {"girl": "she", "queen": "she", "hen": "she", "boy": "he", "king": "he"}
"""Kinds with only one pronoun.  All other kinds may have either."""

NAMES = {
    "she": words(
        "Mia Lena Ada Nora Rosa Ivy Elsa Tilda Wren June Pia Greta Olive Hazel Clara Mabel Ruth Vera Dora Anna"
    ),
    "he": words("Tom Finn Oskar Leo Hugo Emil Jonas Ned Otto Max Theo Felix Sam Ben Anton Karl Jack Milo Paul Axel"),
}

TRAITS = words(
    "brave shy clever gentle curious stubborn cheerful quiet kind sleepy proud careful restless lonely patient "
    "hungry young old small merry"
)

PLACES = {
    "the forest": "in",
    "the village": "in",
    "the valley": "in",
    "the garden": "in",
    "the old mill": "at",
    "the market": "at",
    "the harbor": "at",
    "the river": "by",
    "the lake": "by",
    "the sea": "by",
    "the well": "by",
    "the hill": "on",
    "the mountain": "on",
    "the bridge": "on",
    "the island": "on",
    "the meadow": "in",
    "the orchard": "in",
    "the tower": "in",
    "the castle": "in",
    "the barn": "in",
    "the cave": "in",
    "the town": "in",
    "the swamp": "in",
    "the crossroads": "at",
}
"""Each place with its preposition: in the forest, by the river."""

HOMES = (
    "the forest",
    "the village",
    "the valley",
    "the meadow",
    "the town",
    "the old mill",
    "the hill",
    "the lake",
    "the sea",
    "the river",
    "the orchard",
    "the castle",
    "the island",
    "the harbor",
)

OBJECTS = {
    "lantern": ("light", "lit the lantern"),
    "candle": ("light", "lit the candle"),
    "lamp": ("light", "lit the lamp"),
    "torch": ("light", "lit the torch"),
    "bell": ("sound", "rang the bell"),
    "whistle": ("sound", "blew the whistle"),
    "drum": ("sound", "beat the drum"),
    "flute": ("sound", "played the flute"),
    "horn": ("sound", "blew the horn"),
    "fiddle": ("sound", "played the fiddle"),
    "blanket": ("warm", "spread out the blanket"),
    "coat": ("warm", "took out the coat"),
    "scarf": ("warm", "unrolled the scarf"),
    "shawl": ("warm", "unfolded the shawl"),
    "apple": ("food", "cut the apple in two"),
    "pear": ("food", "cut the pear in two"),
    "pie": ("food", "cut the pie in two"),
    "cake": ("food", "cut the cake in two"),
    "plum": ("food", "cut the plum in two"),
    "pumpkin": ("food", "cut the pumpkin in two"),
    "rope": ("climb", "tied the rope to a tree"),
    "ladder": ("climb", "leaned the ladder on the side"),
    "net": ("climb", "let the net down"),
    "chain": ("climb", "let the chain down"),
    "map": ("guide", "opened the map"),
    "compass": ("guide", "looked at the compass"),
    "telescope": ("guide", "looked through the telescope"),
    "umbrella": ("rain", "opened the umbrella"),
    "tent": ("rain", "put up the tent"),
    "ring": ("", ""),
    "crown": ("", ""),
    "coin": ("", ""),
    "mirror": ("", ""),
    "pearl": ("", ""),
    "shell": ("", ""),
    "button": ("", ""),
    "feather": ("", ""),
    "stone": ("", ""),
    "clock": ("", ""),
    "book": ("", ""),
    "letter": ("", ""),
    "key": ("", ""),
    "cup": ("", ""),
    "teapot": ("", ""),
    "kite": ("", ""),
    "ball": ("", ""),
    "doll": ("", ""),
    "hat": ("", ""),
    "spoon": ("", ""),
    "brush": ("", ""),
    "hammer": ("", ""),
    "wheel": ("", ""),
    "bucket": ("", ""),
    "broom": ("", ""),
    "needle": ("", ""),
    "acorn": ("", ""),
    "seed": ("", ""),
    "glove": ("", ""),
    "sled": ("", ""),
    "flag": ("", ""),
    "comb": ("", ""),
    "chair": ("", ""),
    "shovel": ("", ""),
    "nail": ("", ""),
}
"""Each thing with its use ("" for none; see `beats.TROUBLE`) and a phrase for using it."""

LOOKS = words("little big old new shiny plain pretty heavy light strange lovely fine worn smooth")
COLORS = words(
    "red blue green yellow white black brown gray purple orange pink golden silver copper violet scarlet ivory "
    "teal crimson amber"
)
CONTAINERS = words("box jar chest sack drawer crate pot trunk")
"""Containers of needles.  Stories do not use them, so that no story can answer a question about a needle."""

SKILLS = {
    "flute": "play",
    "drum": "play",
    "fiddle": "play",
    "horn": "play",
    "kite": "fly",
    "sled": "steer",
    "ball": "catch",
    "brush": "use",
    "hammer": "use",
    "needle": "use",
}
"""Things that a hero can learn to use, with the verb for using them."""

JOBS = words(
    "baker miller sailor farmer shepherd weaver fisher gardener clockmaker tailor painter potter teacher doctor"
)
PETS = words("cat dog rabbit hen goat duck turtle mouse donkey")
TOWNS = words("Oakton Ashford Elmwood Millbrook Redhill Stonebay Greenfield Fernley Lakeside Norbury Westport Highmoor")
HOBBIES = words("painting sailing fishing reading singing dancing cooking swimming running drawing knitting climbing")
DRINKS = words("tea milk cocoa coffee juice")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
