"""BLEU and chrF of generated translations, through sacrebleu, so that they are comparable with published ones.

BLEU: Papineni et al. 2002 (aclanthology.org/P02-1040), as Post 2018 (arXiv 1804.08771) defines it. chrF2: Popović 2015
(aclanthology.org/W15-3049); chrF2++: Popović 2017 (aclanthology.org/W17-4770), with words and pairs of words too.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from deskside.utils.errors import UsageError
from deskside.utils.parsing import json_value

if TYPE_CHECKING:
    from sacrebleu.metrics import CHRF

RESAMPLES = 1000  # of the sentences, for the interval (Koehn 2004, aclanthology.org/W04-3250)


def check_sacrebleu(names: Sequence[str]) -> None:
    """Raise UsageError if sacrebleu is missing. names: of the tasks that need it."""
    try:
        import sacrebleu  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(
            f"--tasks {','.join(names)}: needs sacrebleu; install it: pip install 'deskside[bleu]'"
        ) from None


def corpus_scores(
    texts: Sequence[str], references: Sequence[tuple[str, ...]], tokenize: str
) -> dict[str, Any]:
    """Return BLEU, chrF2 and chrF2++ of all texts together, from 0 to 100.

    low and high: 95 % interval of chrF2 over resampled sentences. signatures: sacrebleu's descriptions of the metrics.
    """
    from sacrebleu.metrics import BLEU, CHRF

    # Of the first references, of the second ones (None if missing), ...
    streams = list(zip_longest(*references))
    bleu, chrf, words = BLEU(tokenize=tokenize, force=True), _chrf_of_floats(), CHRF(word_order=2)
    resampled = chrf.corpus_score(texts, streams, n_bootstrap=RESAMPLES)
    score = json_value(resampled.format(width=4, is_json=True, signature=str(chrf.get_signature())))
    # sacrebleu writes no interval around a mean of 0.
    middle, half = float(score.get("confidence_mean", 0)), float(score.get("confidence_var", 0))
    return {
        "chrf": float(score["score"]),
        "low": max(0.0, middle - half),
        "high": min(100.0, middle + half),
        "chrf++": words.corpus_score(texts, streams).score,
        "bleu": bleu.corpus_score(texts, streams).score,
        "signatures": [str(metric.get_signature()) for metric in (chrf, words, bleu)],
    }


def _chrf_of_floats() -> "CHRF":
    """Return the metric chrF2, whose scores are all Python's floats.

    sacrebleu's own are numpy's unless they are 0, and its interval takes no mean of both kinds.
    """
    from sacrebleu.metrics import CHRF
    from sacrebleu.metrics.chrf import CHRFScore

    class FloatChrf(CHRF):
        def _compute_score_from_stats(self, stats: list[int]) -> CHRFScore:
            found = super()._compute_score_from_stats(stats)
            found.score = float(found.score)
            return found

    return FloatChrf()


def sentence_chrf(text: str, references: tuple[str, ...]) -> float:
    """Return chrF2 of one translation, from 0 to 100."""
    from sacrebleu.metrics import CHRF

    return float(CHRF().sentence_score(text, list(references)).score)
