"""docs/claims.md equals what is computed now, so it cannot become outdated when a
formula, a data sheet or the planner changes.
"""

import re
from dataclasses import replace
from pathlib import Path

from deskside.report.study_claims import claims_markdown
from deskside.study.claims.claim_results import judge
from deskside.study.results import Results
from tests.study import made

DOCUMENT = Path(__file__).parents[2] / "docs" / "claims.md"


def entries(document: str) -> dict[str, set[str]]:
    """Return the rows and bullets of each section, with the wrapping undone."""
    parts = re.split(r"^## (.*)$", document, flags=re.MULTILINE)
    return {
        title: {" ".join(entry.split()) for entry in re.split(r"\n(?=- |\| )|\n\n", body)}
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def computed() -> Results:
    """Return a study without trials, with the claims that need no measurement."""
    judged = judge(made.results())
    return replace(judged, claims=[claim for claim in judged.claims if claim.basis])


def test_computed_claims_stand_in_the_document_as_they_are_computed_now() -> None:
    now, written = entries(claims_markdown(computed())), entries(DOCUMENT.read_text("utf-8"))
    verdicts = now.keys() - {"How this was measured", "Machine"}
    assert len(verdicts) >= 4
    assert {title: stale for title in verdicts if (stale := now[title] - written[title])} == {}
