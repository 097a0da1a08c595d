"""Names and sentences of studies in Streamlit's Markdown, as they are written.

A study may come from somebody else. Read as Markdown, a label could show an image, which the browser would fetch from
wherever it says, or a link that looks like the page's own.
"""

import re

from deskside.report.document import clean

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#!|~$:&^=])")


def literal(text: str) -> str:
    """The text on one line, with nothing in it that Markdown or Streamlit reads as more than a character.

    CommonMark takes every escaped punctuation mark for itself; escaped colons end icons, colours and bare links.
    """
    return SPECIAL.sub(r"\\\1", " ".join(clean(text).split()))
