"""Encoding of text by the fastest library that gives the tokens of `tokenizers`.

fastokens, which NVIDIA Dynamo uses, encodes text about a hundred times as fast as tokenizers. But tokenizers
defines what a tokenizer.json means, and another library may read a normalizer, a split pattern or an added token
differently. So `choose_encoder` has both encode difficult texts and samples of the text at hand. fastokens is used only
if all tokens are equal, and `EncoderInfo` says which library is used and why.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt

from deskside.config.base import Part
from deskside.data.tokenizer import spans

if TYPE_CHECKING:
    import fastokens
    from tokenizers import Tokenizer

_BATCH = 64  # texts that are compared at once
_MIXTURES = 100  # mixtures of random characters to compare

# Texts on which tokenizers have differed: contractions (the long s and the Kelvin sign are letters of (?i:'s|k) too),
# white space of all kinds, digits, marks without a letter, joiners, composed and decomposed letters, emoji, control
# characters, and words longer than any token.
_DIFFICULT = (
    "I'm you'RE they'Ve '\u017f '\u212a 's' ''s 'll'd don\u2019t O'Neill",
    "  a   b\t\tc \n d\r\n\r\n e\n\n\n  \n f\u00a0\u00a0g\u2003h\u3000i\u2028j\u2029k\u0085l\x0bm\x0cn\x1co ",
    "1 12 123 1234567890 3.14 ٣٤٥ १२३ 一二三 ⅷ ² ½ 1st v2.0.1 0x1F",
    "नमस्ते दुनिया क्ष त्र ज्ञ का\u094d \u093c क\u200dष க்ஷ తెలుగు ಕನ್ನಡ മലയാളം ગુજરાતી বাংলা",
    "e\u0301 é \u0301x \u0301\u0302 \u1ebf ế Å Å \u212b ﬁ ﬀ İi \u0131I ß ẞ ǆ Ω \u1fef \u1100\u1161\u11a8 각 가\u11a8",
    "日本語テキスト、中文\uff0c한국어 ไทยภาษา العربية עִבְרִית ქართული \ufeffx\u200bx\u00adx",
    "👩\u200d👩\u200d👧 🇮🇳🇮 👍🏽 ❤\ufe0f \U000e0061 \U0001f9d1\u200d\U0001f33e \ue000 \uffff \U0010fffd",
    "\x00 \x01\x02 \x1b[0m \x7f a\x00b \x00\n",
    "if (x<=y && z!=0){ return f'{a[1]}->{b}'; } // ### --- ___ ... ;;;\n\t\t#include <stdio.h>\n",
    "a" * 300 + " " + "ab" * 200 + " " + "=" * 150 + " " * 90 + "\n" * 50 + "क" * 120 + "9" * 70,
    "",
    " ",
    "\n",
)
# An apostrophe and a long s are a contraction for patterns with (?i:'s). fastokens 0.3.5 takes an Indic letter that
# follows into the same word, which tokenizers does not.
_MISREAD = "'\u017f"
# (first, last, step): the code points that are compared. Ideographs, syllables and private use are alike, and new
# versions of Unicode add whole scripts above U+FFFF, but single letters below.
_CODE_POINTS = (
    (0x80, 0x33FF, 1),
    (0x3400, 0x9FFF, 512),
    (0xA000, 0xABFF, 1),
    (0xAC00, 0xD7A3, 512),
    (0xE000, 0xF8FF, 512),
    (0xF900, 0xFFFF, 1),
    (0x10000, 0x1FFFF, 8),
    (0x20000, 0x10FFFF, 4096),
)


class EncoderInfo(Part):
    """The library that encodes a text. reason: why it is not fastokens, else "".

    compared_bytes: size of the text on which fastokens gave the tokens of tokenizers.
    """

    library: str
    version: str
    reason: str = ""
    compared_bytes: NonNegativeInt = 0

    def describe(self) -> str:
        """Return one line that says which library encodes, and why."""
        equal = f"its tokens equal those of tokenizers in {self.compared_bytes / 1e6:,.1f} MB of text"
        return f"{self.library} {self.version}: {self.reason or equal}"


class Encoder(Protocol):
    """Encodes text to token ids. No special tokens are added."""

    def ids(self, text: str, plain: bool = True) -> NDArray[np.uint32]:
        """Return the token ids of a text, shape [tokens].

        plain: encode text that spells a special token as ordinary text, instead of as this token.
        """
        ...


class ReferenceEncoder:
    """Encodes by `tokenizers`. Changes the tokenizer's `encode_special_tokens`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, text: str, plain: bool = True) -> NDArray[np.uint32]:
        return self.batch([text], plain)[0]

    def batch(self, texts: list[str], plain: bool) -> list[NDArray[np.uint32]]:
        """Return the token ids of each text."""
        self._tokenizer.encode_special_tokens = plain
        # A batch, even of one text, lets other threads run.
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class _Fastokens:
    """Encodes by fastokens, or by tokenizers where fastokens fails. Raises ValueError for JSON that it cannot read."""

    def __init__(self, tokenizer_json: str) -> None:
        import fastokens

        self._json = tokenizer_json
        self._tokenizer: fastokens.Tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)

    def ids(self, text: str, plain: bool = True) -> NDArray[np.uint32]:
        try:
            return self.fast_ids(text, plain)
        except ValueError:
            return self._reference.ids(text, plain)

    def fast_ids(self, text: str, plain: bool) -> NDArray[np.uint32]:
        """Return `ids` by fastokens, except for text with _MISREAD. Raises ValueError if fastokens fails.

        Its regular expressions have a small stack: some, such as `(?:\\p{L}\\p{M}*)+`, fail at words of a few thousand
        letters.
        """
        if _MISREAD in text:
            return self._reference.ids(text, plain)
        ids, _ = self._tokenizer.encode_batch_flat([text], False, plain)
        return np.frombuffer(ids, "<u4")

    @cached_property
    def _reference(self) -> ReferenceEncoder:
        from tokenizers import Tokenizer

        return ReferenceEncoder(Tokenizer.from_str(self._json))


def choose_encoder(tokenizer: Tokenizer, samples: Iterable[tuple[str, str]] = ()) -> EncoderInfo:
    """Compare the libraries on difficult texts and on samples, and return the one to encode with.

    samples: pairs of a name, such as the text's source, and a text. Changes the tokenizer's `encode_special_tokens`.
    """
    reference, compared = ReferenceEncoder(tokenizer), 0
    difficult = [("a difficult text", text) for text in _difficult_texts(tokenizer)]
    characters = (("a difficult text", text) for text in _texts_of_all_characters())
    try:
        fast = _Fastokens(tokenizer.to_str())
        for batch, plain in (
            *((batch, False) for batch in _batches(difficult)),
            *((batch, True) for batch in _batches(itertools.chain(difficult, characters, samples))),
        ):
            for (name, text), expected in zip(
                batch, reference.batch([t for _, t in batch], plain), strict=True
            ):
                if not np.array_equal(fast.fast_ids(text, plain), expected):
                    return tokenizers_info(f"fastokens gives other tokens for {name}")
            compared += sum(len(text.encode()) for _, text in batch)
    except ImportError:
        return tokenizers_info("fastokens is not installed")
    except ValueError as error:
        return tokenizers_info(f"fastokens refuses this tokenizer ({str(error)[:80]})")
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust; not a subclass of Exception
            raise
        return tokenizers_info(f"fastokens fails with this tokenizer ({str(error)[:80]})")
    return EncoderInfo(library="fastokens", version=version("fastokens"), compared_bytes=compared)


def still_valid(info: EncoderInfo | None) -> EncoderInfo:
    """Return the encoder of an interrupted preparation, or tokenizers if fastokens has another version now."""
    if info is None:
        return tokenizers_info("the preparation was started before libraries were compared")
    if info.library != "fastokens":
        return tokenizers_info(info.reason)  # with the version that is installed now
    try:
        now = version("fastokens")
    except PackageNotFoundError:
        now = "none"
    if now != info.version:
        return tokenizers_info(f"fastokens {info.version} was compared, and {now} is installed now")
    return info


def tokenizers_info(reason: str) -> EncoderInfo:
    """Return the choice of tokenizers, for this reason."""
    return EncoderInfo(library="tokenizers", version=version("tokenizers"), reason=reason)


def make_encoder(tokenizer_json: str, info: EncoderInfo) -> Encoder:
    """Return the encoder that `choose_encoder` has chosen for the tokenizer with this JSON."""
    if info.library == "fastokens":
        return _Fastokens(tokenizer_json)
    from tokenizers import Tokenizer

    return ReferenceEncoder(Tokenizer.from_str(tokenizer_json))


def encode(encoder: Encoder, text: str | bytes, dtype: Any = np.uint32) -> NDArray[Any]:
    """Return the token ids of a text (`str` or UTF-8), shape [tokens], with special tokens as ordinary text.

    Long texts are encoded piece by piece, because tokenizers needs many times the memory of the text. See
    `tokenizer.spans` for where this may change the tokens.
    """
    data = text.encode("utf-8") if isinstance(text, str) else text
    pieces = [encoder.ids(data[start:end].decode("utf-8")) for start, end in spans(data)]
    return np.concatenate(pieces).astype(dtype)


def _batches(named: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Group texts, so that tokenizers can encode several at once on several cores."""
    remaining = iter(named)
    while batch := list(itertools.islice(remaining, _BATCH)):
        yield batch


def _difficult_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield _DIFFICULT, the tokenizer's added tokens in context, and random mixtures of their characters."""
    yield from _DIFFICULT
    added = [str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
    for token in added:
        yield f"{token}a{token} {token}\n {token[:-1]} {token}{token}b {token.lower()}"
    characters = sorted({c for text in (*_DIFFICULT, *added) for c in text})
    generator = random.Random(0)
    for length in range(1, _MIXTURES + 1):
        yield "".join(generator.choices(characters, k=length))
        yield "".join(generator.choices("aB 1.\n\t'\u0301\u0915\u094d<|", k=length))


def _texts_of_all_characters() -> Iterator[str]:
    """Yield texts that have every kind of character, between a letter and a digit."""
    for first, last, step in _CODE_POINTS:
        found = [chr(code) for code in range(first, last + 1, step)]
        for start in range(0, len(found), _BATCH):
            yield "".join(f"x{c}1" for c in found[start : start + _BATCH])
