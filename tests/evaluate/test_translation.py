"""Scores of translations: those of sacrebleu, also for translations without any match."""

import pytest
from sacrebleu.metrics import BLEU, CHRF

from deskside.evaluate.translation import corpus_scores

REFERENCES = [
    ("the cat sat on the mat",),
    ("a dog barked at it", "it was a dog that barked"),
    ("nobody came",),
]


def test_scores_are_those_of_sacrebleu() -> None:
    texts = ["the cat sat on a mat", "a dog that barked", "none came"]
    found = corpus_scores(texts, REFERENCES, "13a")
    streams = [[first for first, *_ in REFERENCES], [None, REFERENCES[1][1], None]]
    chrf = CHRF()
    expected = chrf.corpus_score(texts, streams, n_bootstrap=1000)
    assert found["chrf"] == pytest.approx(expected.score, abs=1e-4)
    assert (found["low"] + found["high"]) / 2 == pytest.approx(expected._mean, abs=1e-4)
    assert (found["high"] - found["low"]) / 2 == pytest.approx(expected._ci, abs=1e-4)
    assert found["chrf++"] == CHRF(word_order=2).corpus_score(texts, streams).score
    assert found["bleu"] == BLEU(force=True).corpus_score(texts, streams).score
    assert found["signatures"][0] == str(chrf.get_signature())


@pytest.mark.parametrize("right", [0, 1])
def test_translations_without_any_match(right: int) -> None:
    """The resampled sentences have no match at all in some or all of the samples."""
    texts = [*(reference[0] for reference in REFERENCES[:right]), *[""] * (3 - right)]
    found = corpus_scores(texts, REFERENCES, "13a")
    assert 0 <= found["low"] <= found["chrf"] <= found["high"] <= 100
    assert (found["chrf"] == 0) == (right == 0) == (found["high"] == 0)
