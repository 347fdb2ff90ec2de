"""Random functions with schemas, for the grammars of calls."""

HOSTILE = (
    'a"b', "a\\", "<tool_call>", "</parameter>", "a\nb", "}", "[TOOL_CALLS]", "日本", "a b", "<[5]>", '"', "%json",
    "</arg_value>", '<|"|>', "null", "12", "true", "{", "a'", "start: x", "/x/", "~", "\u2028", "é",
)  # fmt: skip
STRINGS = (
    {}, {"minLength": 2, "maxLength": 5}, {"pattern": "^[a-c]+$"}, {"format": "date"}, {"maxLength": 3},
    {"format": "uuid"},
)  # fmt: skip
NUMBERS = (
    {"type": "integer"}, {"type": "integer", "minimum": 3, "maximum": 120}, {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"},
)  # fmt: skip
TYPES = (
    ["string", "null"], ["integer", "null"], ["string", "integer"], "null", ["string", "object"],
    ["boolean", "string", "null"],
)  # fmt: skip
REFERENCES = ({}, {"$ref": "#/$defs/D"}, {"allOf": [{"$ref": "#/$defs/D"}], "description": "x"})
OPTIONAL = ({"type": "string"}, {"$ref": "#/$defs/D"}, {"type": "array"}, {"type": "string", "enum": ["on", "off"]})
DEFINITIONS = (
    {"type": "string", "enum": ["x", "y"]},
    {"type": "integer"},
    {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"], "additionalProperties": False},
)
NAMES = ("a", "b", "key_2", "z")
# kinds of values without parts: each is a function of the source of random numbers
FLAT = (
    lambda rng: {"type": "string", **rng.choice(STRINGS)},
    lambda rng: rng.choice(NUMBERS),
    lambda rng: {"enum": rng.sample([*HOSTILE, "red", "blue", 1, 2.5, None, True], 4)},
    lambda rng: {"type": "string", "enum": rng.sample([*HOSTILE, "red", "blue"], 3)},
    lambda rng: {"type": rng.choice(TYPES)},
    lambda rng: rng.choice([*REFERENCES, {"const": rng.choice([*HOSTILE, 7])}]),
    lambda rng: {"anyOf": [rng.choice(OPTIONAL), {"type": "null"}], "default": None},
)


def schema(rng, depth=2, names=NAMES):
    """Return a random schema of a value."""
    if not depth or rng.random() < 0.7:
        return rng.choice(FLAT)(rng)
    kind = rng.randrange(4)
    if kind == 0:
        size = rng.choice([{}, {"minItems": 1, "maxItems": 3}])
        return {"type": "array", "items": schema(rng, depth - 1, names), **size}
    if kind == 1:
        return {"anyOf": [schema(rng, depth - 1, names), schema(rng, depth - 1, names)]}
    return parameters(rng, depth - 1, names)


def parameters(rng, depth=2, names=NAMES):
    """Return a random schema of an object that is closed."""
    properties = {name: schema(rng, depth, names) for name in rng.sample(names, rng.randrange(min(len(names), 3) + 1))}
    required = [name for name in properties if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def functions(rng, names=NAMES):
    """Return one to three functions with random schemas."""
    definitions = {"D": rng.choice(DEFINITIONS)}
    chosen = rng.sample(("f", "get_weather", "write-file.v2"), rng.randrange(1, 4))
    return {name: {**parameters(rng, 2, names), "$defs": definitions} for name in chosen}
