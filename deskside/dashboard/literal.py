"""Escaping for Streamlit's Markdown.

A study may come from another person. Read as Markdown, a label could embed an image, which the browser would fetch
from any address, or show a link that looks like one of the page's own.
"""

import re

from deskside.utils.format import printable

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~$:&^=])")


def literal(text: str) -> str:
    """Return the text on one line with every character escaped that CommonMark gives a meaning.

    Streamlit still turns a bare address into a link to that address, and the name of an icon into the icon, because it
    looks for both after unescaping. Neither fetches anything by itself.
    """
    return SPECIAL.sub(r"\\\1", " ".join(printable(text).split()))
