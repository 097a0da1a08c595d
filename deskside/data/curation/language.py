"""Language identification by py3langid, which knows 140 languages. Of the identifiers that PyPI installs with their
model, it is the fastest and the only one that covers Kannada and Malayalam too (lingua has neither).
"""

from __future__ import annotations

import re
from functools import cache, cached_property
from typing import Any

_SHORT, _LONG = 200, 1200  # characters of the two samples
_SURE = 0.9  # confidence at which the short sample is enough


@cache
def _load_model() -> Any:
    from py3langid.langid import MODEL_FILE
    from py3langid.langid import LanguageIdentifier as Model

    return Model.from_model_file(MODEL_FILE, norm_probs=True)


# All codes of two letters of ISO 639-1. Of ISO 639-3's codes of three letters there are 8,000.
ISO_639_1 = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el
    en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu
    ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na
    nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn
    so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
    """.split()  # noqa: SIM905
)


def is_language_code(tag: str) -> bool:
    """Return whether a tag such as hi, hi-IN, ta_Taml or brx begins with a code that ISO 639 has or may have.

    Documents may be labelled with languages that cannot be identified here.
    """
    code = tag.replace("_", "-").split("-")[0]
    return code in ISO_639_1 or bool(re.fullmatch("[a-z]{3}", code))


class LanguageIdentifier:
    """Identifies the language of a text by samples from its middle."""

    @cached_property
    def _model(self) -> Any:
        return _load_model()

    @cached_property
    def languages(self) -> frozenset[str]:
        """The languages that it knows, as ISO 639 codes."""
        return frozenset(self._model.labels)

    def known(self, tag: str) -> str:
        """Return the ISO 639-1 code of a language tag such as hi, hi-IN or en_US, or "" if it is not known."""
        code = tag.lower().replace("_", "-").split("-")[0]
        return code if code in self.languages else ""

    def identify(self, text: str, expected: str = "") -> tuple[str, float]:
        """Return the language of a text and the confidence, 0 to 1.

        A short sample decides if the result is the expected language, or certain; otherwise a longer one.
        """
        language, confidence = self._model.classify(_middle(text, _SHORT))
        if language == expected or (not expected and confidence >= _SURE) or len(text) <= _SHORT:
            return language, float(confidence)
        language, confidence = self._model.classify(_middle(text, _LONG))
        return language, float(confidence)


def _middle(text: str, size: int) -> str:
    start = max(0, (len(text) - size) // 2)
    return text[start : start + size]
