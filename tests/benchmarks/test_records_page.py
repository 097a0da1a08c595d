"""The page of records is generated from the table of records."""

from benchmarks.records_page import PAGE, page
from deskside.facts.records import MINUTES, corpora, records


def test_the_page_is_the_tables() -> None:
    text = PAGE.read_text("utf-8")
    assert text == page(), "python -m benchmarks.records_page writes the page again"
    assert all(f"{record.mean:.4f}" in text and record.name in text for record in records())
    measured = {(record.corpus, record.minutes) for record in records()}
    assert text.count("Not measured yet.") == len(corpora()) * len(MINUTES) - len(measured)
