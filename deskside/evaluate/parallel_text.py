"""Parallel text: how well a model predicts the same sentences in several languages, such as those of FLORES-200.

Bits per byte cannot be compared between languages, because scripts differ in bytes per character, and languages in
length. Translations say the same thing, so the bits that a model needs for a whole sentence can be compared (Cotterell
et al. 2018, arXiv 1806.03743; Mielke et al. 2019, arXiv 1906.04726). More bits mean that the model knows less of the
language. Each sentence is evaluated alone, after the start token; its end is not predicted.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import Source
from deskside.evaluate.bpb import BitsPerByte, evaluate_text
from deskside.evaluate.text_bpb import HF_SEQUENCE_LENGTH
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded


@dataclass(frozen=True)
class ParallelText:
    """A text with its translations. texts: the sentences by language, in the same order in each."""

    source: str
    texts: dict[str, list[str]]

    @classmethod
    def read(cls, source: str, languages: Sequence[str]) -> "ParallelText":
        """Read records that have a sentence in the field of each language.

        Raises UsageError for fewer than two languages, a repeated one, and a record without a text in one of them.
        """
        if len(languages) < 2 or len(set(languages)) < len(languages):
            raise UsageError(
                f"--languages {','.join(languages)}: give at least two different fields, such as en,hi"
            )
        strict = BadInputLog("refuse", remedy="Fix the file, or leave the language out of --languages.")
        texts: dict[str, list[str]] = {language: [] for language in languages}
        for record in iter_records(Source.parse(source), languages, strict):
            for language in languages:
                value = record.fields[language]
                if not isinstance(value, str) or not value.strip():
                    raise UsageError(f"--parallel {record.origin}: the field {language!r} holds no text")
                texts[language].append(value)
        if not texts[languages[0]]:
            raise UsageError(f"--parallel {source}: holds no record")
        return cls(source, texts)

    @property
    def sentences(self) -> int:
        """Number of sentences in each language."""
        return len(next(iter(self.texts.values())))


@dataclass(frozen=True)
class ParallelResult:
    """Bits per byte of each language of a parallel text, in the given order of languages."""

    text: ParallelText
    by_language: dict[str, BitsPerByte]

    def bits_per_sentence(self, language: str) -> float:
        """Mean bits of a sentence in a language."""
        return self.by_language[language].nats / math.log(2) / self.text.sentences

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON. relative: bits per sentence divided by those of the first language."""
        first = self.bits_per_sentence(next(iter(self.by_language)))
        return {
            "source": self.text.source,
            "sentences": self.text.sentences,
            "languages": {
                language: {
                    "bits_per_sentence": self.bits_per_sentence(language),
                    "relative": self.bits_per_sentence(language) / first,
                    "bpb": one.bpb,
                    "loss": one.loss,
                    "tokens": one.tokens,
                    "bytes": one.bytes,
                }
                for language, one in self.by_language.items()
            },
        }


def measure_parallel(loaded: Loaded, text: ParallelText, batch_tokens: int) -> ParallelResult:
    """Measure every sentence in every language. batch_tokens: tokens per forward pass."""

    def documents() -> Iterator[tuple[str, str]]:
        for language, sentences in text.texts.items():
            for sentence in sentences:
                yield language, sentence

    result = evaluate_text(
        loaded.model,
        loaded.tokenizer,
        loaded.start_token,
        documents(),
        sequence_length=min(loaded.config.max_position_embeddings, HF_SEQUENCE_LENGTH),
        batch_tokens=batch_tokens,
    )
    return ParallelResult(text, {language: result.by_language[language] for language in text.texts})
