"""JSON schemas that constrain answers: made by a seeded generator, and ones that are known to be hard."""

import datetime
import enum
import random
import uuid
from typing import Any, Literal

from pydantic import BaseModel, Field

Schema = dict[str, Any]

NAMES = (
    "name",
    "id",
    "höhe",
    "a b",
    'quote"d',
    "back\\slash",
    "new\nline",
    "東京",
    "",
    "$ref",
    "x-1",
    "😀",
    "</a>",
)
PATTERNS = (
    "^[a-z]{2,5}$",
    "[0-9]",
    "^(ab|c)+$",
    r"^\d{3}-\d{4}$",
    r"^[^\s]{1,4}$",
    "^é?ü*$",
    r"^\w+@\w+\.org$",
)
FORMATS = ("date", "email", "uuid", "ipv4", "ipv6")


def random_schemas(count: int, seed: int) -> list[Schema]:
    """Return schemas of objects and other values, up to three levels deep."""
    rng = random.Random(seed)
    return [{**_schema(rng, 3), "$defs": {"in/ner": _schema(rng, 1)}} for _ in range(count)]


def _schema(rng: random.Random, depth: int) -> Schema:
    """Return a schema. Containers are rarer at deeper levels, so that the answers end."""
    simple = (_string, _integer, _number, _constant)
    compound = (_object, _object, _object, _array, _array, _union, _combined)
    return rng.choice(compound if depth > 1 and rng.random() < 0.7 else simple)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        low = rng.randrange(4)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(20)}
    if kind == 1:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 2:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string"}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-2000, 2000)
    bounds = rng.choice(
        (
            {},
            {"minimum": low, "maximum": low + rng.randrange(500)},
            {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(50)},
            {"minimum": low},
            {"multipleOf": rng.randrange(2, 30), "minimum": 0},
        )
    )
    return {"type": "integer", **bounds}


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-50, 50), rng.randrange(4))
    bounds = rng.choice(
        (
            {},
            {"minimum": low, "maximum": round(low + rng.uniform(0.01, 9), 3)},
            {"exclusiveMinimum": low},
            {"exclusiveMaximum": low, "minimum": low - 1},
            {"multipleOf": rng.choice((0.5, 0.25, 3))},
        )
    )
    return {"type": "number", **bounds}


def _constant(rng: random.Random, depth: int) -> Schema:
    values: list[Any] = [
        None,
        True,
        False,
        0,
        -1.5,
        "",
        "a\tb",
        'say "hi"',
        "नमस्ते",
        [],
        [1, {"a": None}],
        {"k": [2]},
    ]
    return rng.choice(
        (
            {"const": rng.choice(values)},
            {"enum": rng.sample(values, rng.randrange(1, 6))},
            {"type": "boolean"},
            {"type": ["null", rng.choice(("string", "boolean"))]},
        )
    )


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(rng, depth)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [_schema(rng, 0) for _ in range(rng.randrange(1, 4))]
        schema["items"] = rng.choice((False, {"type": "integer"}))
    low = rng.randrange(3)
    if schema["items"] is not False:
        schema |= {"minItems": low, "maxItems": low + rng.randrange(4)}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randrange(1, 6))
    schema: Schema = {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": rng.choice((False, False, {"type": "boolean"})),
    }
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^p[0-9]$": {"type": "null"}}
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"anyOf": [_schema(rng, depth) for _ in range(rng.randrange(1, 4))]}
    return {
        "oneOf": [
            _integer(rng, 0),
            _string(rng, 0),
            {"type": "array", "items": _schema(rng, 0), "maxItems": 2},
        ]
    }


def _combined(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"type": "array", "items": {"$ref": "#/$defs/in~1ner"}, "maxItems": 2}
    parts = [{"properties": {name: _schema(rng, 0)}, "required": [name]} for name in rng.sample(NAMES, 2)]
    return {"type": "object", "allOf": parts, "additionalProperties": True, "maxProperties": 4}


# Schemas that are known to be hard


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float = Field(gt=0, le=10)


class Box(BaseModel):
    kind: Literal["box"]
    size: tuple[int, int]


class Picture(BaseModel):
    """Most of what pydantic writes: references, defaults, optional fields, unions
    with a discriminator, and formats.
    """

    title: str = Field(max_length=12, description="of the picture")
    colour: Colour = Colour.RED
    shapes: list[Circle | Box] = Field(max_length=3)
    first: Circle | Box | None = Field(default=None, discriminator="kind")
    day: datetime.date | None = None
    number: uuid.UUID
    counts: dict[str, int] = Field(max_length=2)


class Folder(BaseModel):
    name: str = Field(pattern="^[a-z]{1,6}$")
    folders: "list[Folder]" = Field(max_length=2)


def hard_schemas() -> list[Schema]:
    """Return schemas on which engines of structured output are known to differ or fail."""
    listed: Schema = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    node = {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": listed},
        "required": ["v", "next"],
    }
    closed = {"additionalProperties": False}
    return [
        {},
        {"type": "object"},
        {"type": "array"},
        Picture.model_json_schema(),
        Folder.model_json_schema(),
        {"$ref": "#/$defs/node", "$defs": {"node": {**node, **closed}}},
        {"enum": [f"value {n}" for n in range(2000)]},
        {"type": "object", "properties": {f"p{n}": {"type": "boolean"} for n in range(60)}, **closed},
        {"type": "object", "properties": {n: {"const": 1} for n in NAMES}, "required": list(NAMES), **closed},
        {"type": "number", "minimum": 0.1, "maximum": 0.15},
        {"type": "number", "exclusiveMinimum": -1e-3, "maximum": 0},
        {"type": "integer", "minimum": -10, "maximum": 9999999999},
        {"type": "string", "minLength": 200, "maxLength": 210},
        {"type": "string", "pattern": "^(?:[01]\\d|2[0-3]):[0-5]\\d$"},
        {"type": "string", "pattern": "a", "maxLength": 5},
        {
            "type": "array",
            "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3, "maxItems": 3},
            "minItems": 3,
            "maxItems": 3,
        },
        {
            "type": "array",
            "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "null"}],
            "items": False,
            "minItems": 2,
        },
        {
            "type": "object",
            "patternProperties": {"^[a-z]$": {"type": "integer"}, "^[A-Z]$": {"type": "string"}},
            **closed,
        },
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"type": "integer", "minimum": 5}, "b": {"maximum": 7}},
        },
        {"$ref": "#/$defs/text", "maxLength": 3, "$defs": {"text": {"type": "string", "minLength": 2}}},
        {"const": {"a": [1, 2.5, "x", None, {"b": {}}]}},
        {"type": ["integer", "null", "array"], "items": {"type": "boolean"}, "maxItems": 2},
        {"type": "string", "enum": ["a", 1, "b", None]},
        {
            "anyOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], **closed},
                {
                    "type": "object",
                    "properties": {"a": {"type": "string", "maxLength": 2}, "b": {"type": "null"}},
                    "required": ["a", "b"],
                    **closed,
                },
            ]
        },
    ]
