from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from deskside.data.curation.quality import FILTERS, RULES, judge, measure
from deskside.data.curation.words import find_words

SENTENCES = {
    "en": "The {} river ran to the old bridge, and ships that waited for number {} had light of the morning.",
    "hi": "नदी {} पत्थर के पुल के नीचे बहती थी और पुराने जहाज {} सुबह की रोशनी की प्रतीक्षा करते थे।",
    "bn": "নদী {} পাথরের সেতুর নিচে বয়ে যেত এবং পুরনো জাহাজ {} সকালের আলোর জন্য অপেক্ষা করত।",
    "ta": "ஆறு {} கல் பாலத்தின் கீழ் ஓடியது மற்றும் பழைய கப்பல்கள் {} காலை ஒளிக்காக காத்திருந்தன.",
    "te": "నది {} రాతి వంతెన కింద ప్రవహించింది మరియు పాత ఓడలు {} ఉదయం వెలుగు కోసం వేచి ఉన్నాయి.",
    "mr": "नदी {} दगडी पुलाखालून वाहत होती आणि जुनी जहाजे {} सकाळच्या प्रकाशाची वाट पाहत होती.",
    "gu": "નદી {} પથ્થરના પુલ નીચે વહેતી હતી અને જૂના વહાણો {} સવારના પ્રકાશની રાહ જોતા હતા.",
    "kn": "ನದಿ {} ಕಲ್ಲಿನ ಸೇತುವೆಯ ಕೆಳಗೆ ಹರಿಯಿತು ಮತ್ತು ಹಳೆಯ ಹಡಗುಗಳು {} ಬೆಳಗಿನ ಬೆಳಕಿಗಾಗಿ ಕಾಯುತ್ತಿದ್ದವು.",
    "ml": "നദി {} കൽപ്പാലത്തിനടിയിലൂടെ ഒഴുകി പഴയ കപ്പലുകൾ {} രാവിലത്തെ വെളിച്ചത്തിനായി കാത്തിരുന്നു.",
}


def varied(lang: str, count: int = 12) -> str:
    """Return different sentences. Each contains a unique word twice, so that few 5-grams repeat."""
    words = SENTENCES[lang].replace("{} ", "").rstrip(".।").split()
    rng = np.random.default_rng(0)
    end = "।" if lang in ("hi", "bn") else "."
    return "\n".join(" ".join(rng.permutation(words)) + end for _ in range(count))


def reason(text: str, lang: str = "en", filters: tuple[str, ...] = FILTERS) -> str:
    verdict = judge(measure(find_words([text])), np.array([lang == "en"]), filters)[0]
    return "" if verdict is None else verdict[0]


@pytest.mark.parametrize("lang", SENTENCES)
def test_prose_is_kept_in_nine_languages(lang: str) -> None:
    assert reason(varied(lang), lang) == ""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("too few words.", "gopher: words"),
        (varied("en").replace(" ", " # "), "gopher: hash signs per word"),
        (varied("hi").replace(" ", "... "), "gopher: ellipses per word"),
        (varied("ta").replace(".", ""), "fineweb: lines that end with punctuation"),
        ("\n".join([varied("en", 3)] * 4), "gopher: duplicate lines"),
        (" ".join(map(str, range(500))) + ".", "gopher: mean word length"),
        ("ab cd. " * 100, "gopher: mean word length"),
        (varied("en") + "\n}{", "c4: curly brackets"),
        (varied("en") + "\nLorem ipsum.", "c4: lorem ipsum"),
        (varied("hi").replace(" ", "\n"), "fineweb: lines that end with punctuation"),
        ("\n".join(f"short line number {i}." for i in range(40)), "fineweb: short lines"),
        (re.sub(r"(?i)\b(the|to|and|that|of|with)\b", "some", varied("en")), "gopher: English stop words"),
    ],
)  # fmt: skip
def test_each_rule_removes(text: str, name: str) -> None:
    assert reason(text, filters=(name.split(":")[0],)) == name


def test_text_without_spaces_has_no_limits_of_word_and_line_lengths() -> None:
    rng = np.random.default_rng(0)
    lines = ["".join(map(chr, rng.integers(0x4E00, 0x9000, 25))) + "。" for _ in range(30)]
    assert reason("\n".join(lines), "zh") == ""


def plain_ngram_shares(words: list[str], text: str) -> dict[str, float]:
    """Return the sums of `_ngrams`, counted in plain Python. Every word is followed by one space."""
    result = {}
    for n in range(2, 11):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        counts = Counter(grams)
        if n < 5:
            result[f"top_{n}"] = max((c * len(" ".join(g)) for g, c in counts.items() if c > 1), default=0)
            continue
        seen, covered = set(), set()
        for i, gram in enumerate(grams):
            if gram in seen:
                covered |= set(range(i, i + n))
            seen.add(gram)
        result[f"duplicate_{n}"] = sum(len(words[i]) for i in covered)
    return result


def test_ngram_sums_are_those_of_plain_counting() -> None:
    rng = np.random.default_rng(1)
    texts = [[f"w{i}" for i in rng.integers(0, size, 300)] for size in (3, 10, 40)]
    sums = measure(find_words([" ".join(words) for words in texts]))
    for number, words in enumerate(texts):
        for name, value in plain_ngram_shares(words, " ".join(words)).items():
            assert sums[name][number] == value, name


def test_every_statistic_of_a_rule_is_measured() -> None:
    for name, rules in RULES.items():
        sums = measure(find_words(["a"]), (name,))
        for rule in rules:
            assert rule.part in sums and (rule.whole is None or rule.whole in sums)
