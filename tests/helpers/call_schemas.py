"""Random functions with schemas, for the grammars of calls."""

HOSTILE = (
    'a"b', "a\\", "<tool_call>", "</parameter>", "a\nb", "}", "[TOOL_CALLS]", "日本", "a b", "<[5]>", '"', "%json",
    "</arg_value>", '<|"|>', "null", "12", "true", "{", "a'", "start: x", "/x/", "~", "\u2028", "é",
)  # fmt: skip


def schema(rng, depth=2, names=("a", "b", "key_2", "z")):
    """Return a random schema of a value."""
    kind = rng.randrange(13 if depth else 9)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        return {
            "type": "string",
            **rng.choice(
                [
                    {"minLength": 2, "maxLength": 5},
                    {"pattern": "^[a-c]+$"},
                    {"format": "date"},
                    {"maxLength": 3},
                    {"format": "uuid"},
                ]
            ),
        }
    if kind == 2:
        return {"type": "integer", **rng.choice([{}, {"minimum": 3, "maximum": 120}])}
    if kind == 3:
        return rng.choice([{"type": "number"}, {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}])
    if kind == 4:
        return {"enum": rng.sample([*HOSTILE, "red", "blue", 1, 2.5, None, True], 4)}
    if kind == 5:
        return {"type": "string", "enum": rng.sample([*HOSTILE, "red", "blue"], 3)}
    if kind == 6:
        return {
            "type": rng.choice(
                [
                    ["string", "null"],
                    ["integer", "null"],
                    ["string", "integer"],
                    "null",
                    ["string", "object"],
                    ["boolean", "string", "null"],
                ]
            )
        }
    if kind == 7:
        return rng.choice(
            [
                {},
                {"$ref": "#/$defs/D"},
                {"allOf": [{"$ref": "#/$defs/D"}], "description": "x"},
                {"const": rng.choice([*HOSTILE, 7])},
            ]
        )
    if kind == 8:
        return {
            "anyOf": [
                rng.choice(
                    [
                        {"type": "string"},
                        {"$ref": "#/$defs/D"},
                        {"type": "array"},
                        {"type": "string", "enum": ["on", "off"]},
                    ]
                ),
                {"type": "null"},
            ],
            "default": None,
        }
    if kind == 9:
        return {
            "type": "array",
            "items": schema(rng, depth - 1, names),
            **rng.choice([{}, {"minItems": 1, "maxItems": 3}]),
        }
    if kind == 10:
        return {"anyOf": [schema(rng, depth - 1, names), schema(rng, depth - 1, names)]}
    return parameters(rng, depth - 1, names)


def parameters(rng, depth=2, names=("a", "b", "key_2", "z")):
    """Return a random schema of an object that is closed."""
    properties = {name: schema(rng, depth, names) for name in rng.sample(names, rng.randrange(min(len(names), 3) + 1))}
    required = [name for name in properties if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def functions(rng, names=("a", "b", "key_2", "z")):
    """Return one to three functions with random schemas."""
    definitions = {
        "D": rng.choice(
            [
                {"type": "string", "enum": ["x", "y"]},
                {"type": "integer"},
                {
                    "type": "object",
                    "properties": {"t": {"type": "string"}},
                    "required": ["t"],
                    "additionalProperties": False,
                },
            ]
        )
    }
    chosen = rng.sample(("f", "get_weather", "write-file.v2"), rng.randrange(1, 4))
    return {name: {**parameters(rng, 2, names), "$defs": definitions} for name in chosen}
