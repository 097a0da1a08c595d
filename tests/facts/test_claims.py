"""Claims as data: refused entries, their wording, and the completeness of the file."""

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from deskside.facts.claims import VALUE_DIRECTIONS, claims, parse_claim
from deskside.facts.gpus import gpus

ROOT = Path(__file__).parents[2]
SOURCES = {"book": "A Book"}
ENTRY: dict[str, Any] = {
    "id": "x",
    "text": "X is faster",
    "source": ["book", "Chapter"],
    "kind": "measured",
    "quantity": "tokens_per_second",
    "group": "g",
    "arm": {"f": "on"},
    "against": {"f": "off"},
    "direction": "higher",
    "size": 0.05,
    "claimed_on": "RTX 5090",
}
ARITHMETIC: dict[str, Any] = {
    "id": "y",
    "text": "450 W",
    "source": ["book", "Chapter"],
    "kind": "arithmetic",
    "quantity": "watts",
    "formula": "f",
    "direction": "about",
    "value": 450,
    "unit": "W",
    "claimed_on": "RTX 5090",
}
OPEN: dict[str, Any] = {
    "id": "z",
    "text": "It stays cool",
    "source": ["book", "Chapter"],
    "kind": "open",
    "claimed_on": "RTX 5090",
    "why": "It needs a card.",
}


def test_the_file_is_whole() -> None:
    found = claims()
    assert len(found) >= 30
    assert len({one.id for one in found}) == len(found)
    plain = tomllib.loads(resources.files("deskside.facts").joinpath("claims.toml").read_text("utf-8"))
    assert len(plain["claim"]) == len(found)
    cited = {one.source.rsplit(", ", 1)[0] for one in found}
    assert cited == set(plain["sources"].values())
    cards = {gpu.name for gpu in gpus()}
    for one in found:
        assert re.fullmatch(r"[a-z0-9.-]+", one.id)
        assert one.text and not one.text.endswith(".")
        assert "/" not in one.source  # a document and its section, never a path
        assert all(need in ("gpu", "fp8", "fp4") or need in cards for need in one.needs), one.id
        assert 0 <= one.tolerance <= 1
        for sentence in (one.note, one.explanation, one.why):
            assert not sentence or sentence.endswith("."), one.id


def test_every_claim_that_the_issue_names_is_there() -> None:
    by_id = {one.id: one for one in claims()}
    sizes = {
        "qk-norm-perplexity": 152 / 632 - 1,
        "gqa4-speed": 0.05,
        "gqa4-quality": 0.05,
        "mqa-quality": 6.0,
        "swiglu-speed": -0.05,
        "swiglu-quality": -0.10,
        "rope-speed": -0.06,
        "window-speed": -0.30,
        "mlp-fusion-speed": -0.42,
        "qkv-fusion-speed": 0.84,
        "sdpa-speed": 9.0,
        "fp8-small": 0.754 - 1,
        "fp8-large": 0.24,
    }
    for name, size in sizes.items():
        assert by_id[name].size == pytest.approx((size, size), abs=1e-4), name
    ranges = {
        "weight-cache": (5 / 186, 10 / 186),
        "fp4-memory": (-0.75, -0.60),
        "gqa-memory": (-0.40, -0.25),
    }
    for name, size_range in ranges.items():
        assert by_id[name].size == pytest.approx(size_range, abs=1e-3), name
    assert by_id["accumulation-fusion"].size == pytest.approx((-10 / 196,) * 2, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "+5 %"),
        ({"size": [0.05, 0.1]}, "+5 % to +10 %"),
        ({"direction": "lower", "size": [-0.75, -0.6]}, "-60 % to -75 %"),
        ({"size": 0.84, "show": "times"}, "1.84 times"),
        ({"direction": "lower", "size": -0.246, "show": "times"}, "0.754 times"),
        ({"size": None}, "more"),
        ({"direction": "lower", "size": None}, "less"),
        ({"direction": "none", "size": None, "tolerance": 0.015}, "no change (within 1.5 %)"),
    ],
)
def test_a_claimed_change_reads_as_it_was_meant(changes: dict[str, Any], words: str) -> None:
    entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    assert parse_claim(entry, SOURCES).claimed_text == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "450 W"),
        ({"direction": "at most"}, "at most 450 W"),
        ({"value": [50, 100], "unit": "tokens/s"}, "50 to 100 tokens/s"),
        ({"value": 185000, "unit": "tokens/s"}, "185,000 tokens/s"),
        ({"value": 3.78, "unit": "$"}, "$3.78"),
    ],
)
def test_a_claimed_value_reads_as_it_was_meant(changes: dict[str, Any], words: str) -> None:
    assert parse_claim({**ARITHMETIC, **changes}, SOURCES).claimed_text == words


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "size": -0.05},  # opposite to its direction
        {**ENTRY, "size": [0.1, 0.05]},  # falls
        {**ENTRY, "direction": "lower", "size": -1.0},  # nothing is left
        {**ENTRY, "direction": "none"},  # no change, of 5 %
        {**ENTRY, "direction": "sideways"},
        {**ENTRY, "kind": "guessed"},
        {**ENTRY, "show": "furlongs"},
        {**ENTRY, "tolerance": -0.1},
        {**ENTRY, "group": ""},
        {**ENTRY, "against": ENTRY["arm"]},
        {**ENTRY, "formula": "f"},
        {**ENTRY, "direction": "about"},  # of nothing
        {**ENTRY, "value": 3, "unit": "W"},
        {**ARITHMETIC, "formula": ""},
        {**ARITHMETIC, "unit": ""},
        {**ARITHMETIC, "group": "g", "arm": {"f": "on"}},
        {**ARITHMETIC, "direction": "higher"},
        {**OPEN, "why": ""},
        {**OPEN, "formula": "f"},
        {**ARITHMETIC, "why": "It needs a card."},
        {**ENTRY, "quantity": ""},
    ],
)
def test_what_cannot_be_judged_is_refused_by_its_id(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"claim {entry['id']}: "):
        parse_claim(entry, SOURCES)


def test_an_entry_with_an_unknown_key_or_source_is_refused() -> None:
    with pytest.raises(TypeError):
        parse_claim({**ENTRY, "colour": "red"}, SOURCES)
    with pytest.raises(KeyError):
        parse_claim({**ENTRY, "source": ["film", "Scene"]}, SOURCES)


def test_a_claim_of_a_value_has_one_and_no_other() -> None:
    for one in claims():
        assert one.kind == "open" or (one.value is not None) == (one.direction in VALUE_DIRECTIONS)
        assert (one.kind == "arithmetic") == bool(one.formula)


def test_the_document_lists_every_claim() -> None:
    document = " ".join((ROOT / "docs" / "claims.md").read_text("utf-8").split())
    told = document.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("\\", "")
    assert not [one.id for one in claims() if f"| {one.text} |" not in told]
    assert f"{len(claims())} claims:" in told
