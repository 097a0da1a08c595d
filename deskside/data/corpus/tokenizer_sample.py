"""The text that a tokenizer is trained on: a sample of all training text, or one of each language.

A tokenizer that is trained on the text as it is spends most of its vocabulary on the largest language and cuts the
words of small ones into many tokens; Petrov et al. 2023 (arXiv 2305.15425) measure this for published tokenizers. With
a temperature T, a language with n bytes of text gets a share of the sample in proportion to n^(1/T), as XLM-R and mT5
do (see `data.reading.mixing`). A language with less text than its share is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deskside.data.corpus.analyze import CorpusOptions, TextSampler, documents_of
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.heldout import Holdout
from deskside.data.corpus.sources import Source
from deskside.data.reading.mixing import temperature_weights
from deskside.data.reading.tags import UNKNOWN_LANGUAGE
from deskside.utils.errors import UsageError
from deskside.utils.progress import ProgressBar

_ALL = ""  # the key, in place of a language, of the only sampler if there is no temperature


@dataclass
class TokenizerSample:
    """Samplers by language. shares: bytes that a language should have in the sample over the bytes of its text."""

    samplers: dict[str, TextSampler]
    shares: dict[str, float] = field(default_factory=dict)

    def sampler_of(self, language: str) -> TextSampler:
        """Return the sampler of a document's language; "" is an unknown one."""
        return self.samplers[language or UNKNOWN_LANGUAGE] if self.shares else self.samplers[_ALL]

    def texts(self, holdout: Holdout) -> Iterator[str]:
        """Yield the sample in a fixed order, without validation text."""
        for language, sampler in self.samplers.items():
            pieces = list(sampler.texts(holdout))
            repeats, part = divmod(max(1.0, self.shares.get(language, 1.0)), 1.0)
            for _ in range(int(repeats)):
                yield from pieces
            yield from pieces[: round(part * len(pieces))]

    def describe_languages(self) -> str:
        """Return each language's part of the sample, such as "hi 12.5 MB, ta 8.1 MB", or "" if there is one part."""
        return ", ".join(
            f"{language} {sampler.size * max(1.0, self.shares.get(language, 1.0)) / 1e6:,.1f} MB"
            for language, sampler in self.samplers.items()
            if language != _ALL
        )


def check_temperature(options: CorpusOptions) -> None:
    """Raise UsageError for an invalid temperature, or one given with an existing tokenizer."""
    if (temperature := options.tokenizer_temperature) is None:
        return
    if not 1 <= temperature <= 1000:
        raise UsageError(f"--tokenizer-temperature {temperature:g}: give 1 to 1000.")
    if options.tokenizer is not None:
        raise UsageError(
            "--tokenizer-temperature: is for training a tokenizer, but --tokenizer gives one; remove one of them."
        )


def plan_sample(sources: Sequence[Source], options: CorpusOptions) -> TokenizerSample:
    """Return empty samplers. With a temperature, read the sources once to measure how much text each language has.

    Bad input is left out here, and counted or refused by `analyze`. Raises UsageError for a temperature without effect,
    because all documents have the same language.
    """
    if options.tokenizer_temperature is None:
        return TokenizerSample({_ALL: TextSampler(options.sample_bytes, options.seed)})
    sizes: dict[str, int] = {}
    with ProgressBar("measure languages", None, "MB", quiet=options.quiet) as bar:
        for document in documents_of(sources, BadInputLog(), options):
            language = document.lang or UNKNOWN_LANGUAGE
            sizes[language] = sizes.get(language, 0) + len(document.data)
            bar.advance(len(document.data) / 1e6)
    if not sizes:  # `analyze` says why
        return TokenizerSample({_ALL: TextSampler(options.sample_bytes, options.seed)})
    if len(sizes) == 1:
        raise UsageError(
            f"--tokenizer-temperature: all documents have the language {next(iter(sizes))}; remove it, or give "
            "documents their languages (--lang-field, LANG=SOURCE)."
        )
    sizes = dict(sorted(sizes.items()))
    weights = temperature_weights(np.array(list(sizes.values())), options.tokenizer_temperature)
    total = min(options.sample_bytes, sum(sizes.values()))
    wanted = {
        language: total * weight / sum(weights) for language, weight in zip(sizes, weights, strict=True)
    }
    return TokenizerSample(
        {language: TextSampler(max(1, round(size)), options.seed) for language, size in wanted.items()},
        {language: size / sizes[language] for language, size in wanted.items()},
    )
