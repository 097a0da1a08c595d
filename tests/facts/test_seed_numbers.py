"""Every number in the documents that the project started from is a claim, or has a reason why it is not."""

import dataclasses
from pathlib import Path

import pytest

from deskside.facts.claims import claims
from tests.facts import seed_numbers

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"
# The lines with these phrases contain no number.
WITHOUT_NUMBER = {"fp8-memory", "mxfp8-fails", "rmsnorm-speed", "window-without-fa3"}


def test_every_row_names_claims_that_exist_or_a_reason() -> None:
    known = {one.id for one in claims()}
    for row in seed_numbers.rows():
        place = f"{row.document}:{row.line}"
        assert row.document in seed_numbers.DOCUMENTS and row.line > 0 and all(row.numbers), place
        assert bool(row.claims) != bool(row.reason), place
        assert set(row.claims) <= known, place
        assert not row.reason or row.reason in seed_numbers.REASONS, place


def test_every_claim_is_where_its_document_says_it() -> None:
    titles = {one.id: one.source for one in claims()}
    found = {id for row in seed_numbers.rows() for id in row.claims}
    assert titles.keys() - found == WITHOUT_NUMBER
    in_document = {(id, row.document) for row in seed_numbers.rows() for id in row.claims}
    begins = {"verdict": "Feasibility Verdict", "guide": "Optimization Guide", "fp8": "FP8 Training on"}
    begins |= {"pipeline": "Optimization Pipeline", "budget": "Compute Budget"}
    for id in sorted(found):
        assert any(words in titles[id] and (id, name) in in_document for name, words in begins.items()), id


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("RTX 5090 in FP8 beats H100, A100 and GPT-2 d26 on sm_90", ()),
        ("2-3\u00d7 faster, 16x2048 rows, 24GB of 32 GB", ("2", "3\u00d7", "16x2048", "24GB", "32 GB")),
        (
            "$2,000-2,500, ~$0.50/hr, < 80\u00b0C, lr 1.35e-04",
            ("$2,000", "2,500", "~$0.50", "80\u00b0C", "1.35e-04"),
        ),
        ("+5-10k tokens/sec, 196k tok/s, -7x, 95%+", ("+5", "10k tokens/sec", "196k tok/s", "-7x", "95%")),
    ],
)
def test_numbers_are_found_with_their_units_and_names_are_not(line: str, numbers: tuple[str, ...]) -> None:
    assert seed_numbers.numbers(line) == numbers


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the documents are not part of the repository")
def test_no_numbered_line_of_the_documents_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seed_numbers.unmapped(SEEDS) == []
    table = seed_numbers.rows()
    changed = [dataclasses.replace(table[0], numbers=("7",)), *table[2:]]
    monkeypatch.setattr(seed_numbers, "rows", lambda: changed)
    assert len(seed_numbers.unmapped(SEEDS)) == 2
