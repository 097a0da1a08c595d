"""A synthetic corpus in two languages for the tests of this folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

_LINES = {
    "en": "the river ran under a stone bridge while old ships waited for morning light",
    "hi": "नदी पत्थर के पुल के नीचे बहती थी और पुराने जहाज सुबह की रोशनी की प्रतीक्षा करते थे",
}
WORDS = {lang: line.split() for lang, line in _LINES.items()}


def make_corpus(path: Path, documents: int, seed: int = 0) -> list[dict[str, str]]:
    """Write a .jsonl file of documents with 1 to 400 words, two thirds of them English, and return its records."""
    rng = random.Random(seed)
    records = []
    for i in range(documents):
        lang = "en" if i % 3 else "hi"
        words = rng.choices(WORDS[lang], k=rng.choice([1, 5, 20, 80, 400]))
        records.append({"text": f"{i}: " + " ".join(words), "lang": lang, "source": f"src-{lang}:{i}"})
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return records
