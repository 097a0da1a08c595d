"""Names and sentences of studies in Streamlit's Markdown, as they are written.

A study may come from somebody else. Read as Markdown, a label could show an image, which the browser would fetch from
wherever it says, or a link that looks like the page's own.
"""

import re

from deskside.report.document import clean

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~$:&^=])")


def literal(text: str) -> str:
    """The text on one line, with nothing in it that CommonMark reads as more than a character.

    Streamlit still turns a bare address into a link to that very address, and the name of an icon into the icon; it
    looks for both after the marks are unescaped. Neither fetches anything from elsewhere by itself.
    """
    return SPECIAL.sub(r"\\\1", " ".join(clean(text).split()))
