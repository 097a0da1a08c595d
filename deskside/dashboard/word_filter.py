"""The test of the filters by words."""

import re


def contains(text: str, search: str) -> bool:
    """Return True if the words of `search` occur in `text` one after another, in any case and punctuation.

    "medium gqa on" is found in "medium, GQA on".
    """
    return _words(search) in _words(text)


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold().replace("_", " ")))
