"""Measure whether `deskside data curate` lowers the loss: data sets and a study of a dirtied corpus, before and after.

    python -m benchmarks.curation_study data/en_train_0*.jsonl.gz --val data/en_val.jsonl.gz --out data/curation
    deskside study data/curation/study.toml --out studies/curation

Dirtied with a fixed seed: some documents are copied as they are, some with edits (benchmarks/curate.py), and texts of
few sentences that repeat are added. The copies are spread over the corpus. The arms are the data sets

    raw       the dirtied corpus
    exact     without exact duplicates
    near      without near-duplicates either
    quality   and without text that repeats itself: the defaults of `data curate`
    clean     the corpus before it was dirtied, which curation can at best restore

All have the tokenizer and the validation text of `clean`, and the trials read equally many tokens: as many as the
smallest data set has, unless --tokens says otherwise, so that none of them is read twice.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.curate import edited
from deskside.config.imported import toml_value
from deskside.data.corpus.analyze import CorpusOptions, documents_of, labelled_source
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.prepare import prepare
from deskside.data.curation.curate import CurationOptions, curate

STEPS = {
    "exact": ("without exact duplicates", CurationOptions(filters=(), similarity=None)),
    "near": ("without near-duplicates", CurationOptions(filters=())),
    "quality": ("without duplicates and text that repeats itself", CurationOptions()),
}
EDITS = ("words", "cut", "header", "form")
REPEATS = 40  # of the sentences of a text that repeats itself


def texts_of(sources: Sequence[str]) -> list[str]:
    """Return the texts of the sources. Raises UsageError for input that cannot be read."""
    return [
        document.text
        for document in documents_of(
            [labelled_source(one) for one in sources], BadInputLog("refuse"), CorpusOptions(quiet=True)
        )
    ]


def dirty(texts: Sequence[str], options: argparse.Namespace, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): the texts, their copies and the texts that repeat themselves."""
    for text in texts:
        yield "original", text
    count = round(options.share * len(texts))
    chosen = rng.sample(range(len(texts)), 3 * count)
    for place in chosen[:count]:
        for _ in range(options.copies):
            yield "exact", texts[place]
    for place in chosen[count : 2 * count]:
        for number in range(options.copies):
            yield "near", edited(texts[place], EDITS[number % len(EDITS)], rng)
    for place in chosen[2 * count :]:
        few = texts[place][:200]
        yield "repeats", "\n".join([few] * REPEATS)


def write_corpus(texts: Sequence[str], path: Path) -> None:
    """Write texts as JSON lines."""
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), "utf-8")


def prepare_arms(options: argparse.Namespace) -> dict[str, int]:
    """Make the data sets, and return the training tokens of each."""
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    clean = texts_of(options.sources)
    made = [text for _, text in dirty(clean, options, rng)]
    rng.shuffle(made)
    sources = {"clean": out / "clean.jsonl", "raw": out / "raw.jsonl"}
    write_corpus(clean, sources["clean"])
    write_corpus(made, sources["raw"])
    for name, (_, step) in STEPS.items():
        folder = out / f"curated-{name}"
        report = curate([str(sources["raw"])], folder, step)
        print(f"{name}: {report['documents']}", flush=True)
        sources[name] = folder / "kept"
    reading = CorpusOptions(val_sources=(options.val,), vocab_size=options.vocab_size)
    tokens = {}
    for name, source in sources.items():
        tokens[name] = prepare([str(source)], out / name, reading).tokens["train"]
        reading = replace(reading, tokenizer=out / "clean")
    return tokens


def study_text(tokens: dict[str, int], options: argparse.Namespace) -> str:
    """Return the study of the data sets as TOML."""
    out = options.out.resolve()
    lines = [
        'name = "curation"',
        'question = "Does deskside data curate lower the loss at equal tokens?"',
        f"base = {toml_value(options.base)}",
        f"seeds = {options.seeds}",
        'design = "one-at-a-time"',
        "[budget]",
        f"tokens_per_arm = {options.tokens or min(tokens.values())}",
        "[set]",
        f"data.path = {toml_value(str(out / 'raw'))}",
    ]
    labels = {name: label for name, (label, _) in STEPS.items()} | {"clean": "before it was dirtied"}
    for name, label in labels.items():
        lines += ["[[arm]]", f"name = {toml_value(name)}", f"label = {toml_value(label)}"]
        lines.append(f"set.data.path = {toml_value(str(out / name))}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", help="the corpus")
    parser.add_argument("--val", required=True, help="validation text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.05, help="of the documents, for each kind of dirt")
    parser.add_argument("--copies", type=int, default=10, help="of each copied document")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--base", default="124m", help="preset of the trials")
    parser.add_argument("--tokens", type=int, help="per trial")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the dirt")
    options = parser.parse_args(argv)
    tokens = prepare_arms(options)
    (options.out / "study.toml").write_text(study_text(tokens, options), "utf-8")
    print(json.dumps({"train_tokens": tokens}))
    print(f"deskside study {options.out / 'study.toml'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
