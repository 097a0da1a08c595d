"""Write docs/records.md: the lowest bits per byte in 5 and 60 minutes on one card, from deskside/facts/records.toml.

    python -m benchmarks.records_page

The page is committed so that it can be read without building the site; tests/benchmarks/test_records_page.py compares
it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deskside.cli.records import train_command
from deskside.facts.records import MINUTES, Corpus, LossRecord, best_records, corpora, records
from deskside.records.verdict import spread
from deskside.utils.files import write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "records.md"
HEAD = """# Records

The lowest bits per byte that deskside reached within 5 and 60 minutes of training on one card. Every value is computed
by plain transformers on the exported model. `deskside records list` lists them, and this command repeats one:

<!-- not run: needs the record's card and corpus -->
```bash
deskside records replay {first.name} --data data/{first.corpus}
```

It checks that the data is that of the record, trains with each of the record's seeds, scores the models, and says
whether their mean is within the range that 95 % of such repetitions would reach. After an interruption, the same
command continues. On another card, it says that the results cannot be compared.
"""
RULES = """
## Rules

- **Time**: seconds of training steps (`--schedule.clock training`), without compilation, evaluation and checkpoints.
- **Start**: random weights; only the corpus's training documents are read.
- **Score**: the validation documents as one stream of tokens, each after an end-of-text token, cut into rows. Every
  token of text is predicted once, with what precedes it in its row; bits per byte are the sum of -log2 p over the bytes
  of the text. `deskside/evaluate/stream_bpb.py` does this with a model of any project. A run's own `val_bpb` differs
  slightly, because training packs documents differently.
- **Interval**: Student's, at 95 %, over the seeds. One seed has none.
- **Corpus**: a data set with the fingerprint that its command makes here; another tokenizer makes another data set.

## Add a record

Train the command with at least three seeds, keep the runs' small files below `docs/data/`, then:

<!-- not run: needs finished runs of five minutes on a card -->
```bash
deskside records add runs/a runs/b runs/c --name NAME --corpus english --data data/english \\
    --commit HASH --raw docs/data/FOLDER
python -m benchmarks.records_page
```

Runs that differ in more than the seed, took too long, read other data or started from other weights are refused.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD.format(first=best_records()[0])]
    for corpus in corpora().values():
        parts.append(f"\n## {corpus.title[0].upper()}{corpus.title[1:]} corpus\n")
        parts.append(
            f"\n{corpus.about[0].upper()}{corpus.about[1:]}. Rows of {corpus.row_tokens:,} tokens are scored.\n"
        )
        mark = (
            ""
            if "bundled:" in corpus.prepare
            else "<!-- not run: the corpus does not come with deskside -->\n"
        )
        parts.append(f"\n{mark}```bash\n{corpus.prepare}\n```\n\n")
        for minutes in MINUTES:
            found = [
                record for record in records() if (record.corpus, record.minutes) == (corpus.name, minutes)
            ]
            parts.append(
                _limit(corpus, minutes, sorted(found, key=lambda record: (record.card, record.mean)))
            )
    return "".join([*parts, RULES])


def _limit(corpus: Corpus, minutes: int, found: Sequence[LossRecord]) -> str:
    """Return the records of a corpus and time limit, best first."""
    if not found:
        return f"### {minutes} minutes\n\nNot measured yet.\n\n"
    lines = [
        f"### {minutes} minutes",
        "",
        "| card | record | bits per byte | 95 % interval | seeds | date, commit | raw data |",
        "|---|---|--:|---|---|---|---|",
    ]
    best = best_records()
    for record in found:
        mean = spread(record)
        interval = "" if mean.low is None else f"{mean.low:.4f} to {mean.high:.4f}"
        value = f"**{record.mean:.4f}**" if record in best else f"{record.mean:.4f}"
        cells = [
            record.card, record.name, value, interval, ", ".join(map(str, record.seeds)),
            f"{record.date}, {record.commit}", f"`{record.raw}`",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for record in found:
        lines += [
            f"{record.name}: {record.note}".rstrip(": "),
            "",
            "<!-- not run: needs the record's card and corpus -->",
            "```bash",
            f"deskside {train_command(record)}",
            "```",
            "",
        ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page. Return 0."""
    argparse.ArgumentParser(
        prog="python -m benchmarks.records_page",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    write_atomically(PAGE, page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
