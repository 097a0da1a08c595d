"""Tokens that tokenizers need for the same sentences in several languages.

    python -m benchmarks.fertility --text flores200_dev.jsonl.gz --languages en,hi,ta \
        --tokenizer ours=data/indic --tokenizer other=tokenizer.json [--json FILE]

A tokenizer is a tokenizer.json or a folder with one, such as prepared data. Prints for each language: tokens per word
(fertility; words are separated by white space), bytes per token, and the tokens of all sentences divided by those of
the first language (the premium of Petrov et al. 2023, arXiv 2305.15425).
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

from deskside.data import tokenizer as bpe
from deskside.data.reading.tags import count_words
from deskside.evaluate.parallel_text import ParallelText

COLUMNS = (
    ("fertility", "tokens per word", ".2f"),
    ("bytes_per_token", "bytes per token", ".2f"),
    ("premium", "tokens against the first language", ".2f"),
)


def measure(tokenizer: Tokenizer, text: ParallelText) -> dict[str, dict[str, float]]:
    """Return {language: {"tokens", "fertility", "bytes_per_token", "premium"}}."""
    found: dict[str, dict[str, float]] = {}
    for language, sentences in text.texts.items():
        encodings = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
        tokens = sum(len(encoding.ids) for encoding in encodings)
        data = [sentence.encode("utf-8") for sentence in sentences]
        found[language] = {
            "tokens": tokens,
            "fertility": tokens / sum(count_words(one) for one in data),
            "bytes_per_token": sum(len(one) for one in data) / tokens,
        }
    first = next(iter(found.values()))["tokens"]
    for values in found.values():
        values["premium"] = values["tokens"] / first
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", required=True)
    parser.add_argument("--languages", required=True)
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    languages = options.languages.split(",")
    text = ParallelText.read(options.text, languages)
    results = {}
    for given in options.tokenizer:
        name, path = given.split("=", 1)
        tokenizer = bpe.load(path)
        results[name] = {
            "vocabulary": tokenizer.get_vocab_size(with_added_tokens=True),
            "languages": measure(tokenizer, text),
        }
    for key, heading, number_format in COLUMNS:
        print(f"\n| {heading} | vocabulary | {' | '.join(languages)} |\n|{'---|' * (len(languages) + 2)}")
        for name, result in results.items():
            cells = [format(result["languages"][language][key], number_format) for language in languages]
            print(f"| {name} | {result['vocabulary']:,} | {' | '.join(cells)} |")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
