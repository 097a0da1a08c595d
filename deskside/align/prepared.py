"""Prepared folders of preference pairs and of questions: written as a whole, checked when opened.

NAME/index.json   content, sources and checksums      NAME/tokenizer.json, chat_template.jinja, ...
     train.*      one file for each split                  samples.json   a few held-out questions
     val.*
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import xxhash

from deskside.data import tokenizer as bpe
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.prepare_chat import (
    SAMPLE_CHARACTERS,
    SAMPLES,
    make_cache_key,
    new_folder,
    write_samples,
)
from deskside.data.chat.renderer import ROW_FIELDS, NotRendered, refuse_row_fields
from deskside.data.corpus.heldout import is_validation
from deskside.data.corpus.process_pool import map_in_order
from deskside.data.corpus.progress_bar import ProgressBar
from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import BadInputLog, Source
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint
from deskside.utils.parsing import json_value

VERSION = 1  # of the folder format
RENDERED = 2  # of the conversion: the same records give other content
FEWEST_HELD_OUT = 32
Kind = Literal["preference", "questions"]
NOUN = {"preference": "pair", "questions": "question"}


@dataclass(frozen=True)
class Spec:
    """Everything that determines a prepared folder, apart from the tokenizer. options: those of the data kind."""

    kind: Kind
    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    val_fraction: float | None = None
    most_held_out: int = 500
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def key(self, tokenizer: Path) -> str:
        """Return a short cache key of the content of everything that determines the folder. Raises UsageError."""
        rest = (VERSION, RENDERED, self.kind, self.val_fraction, self.most_held_out, self.seed, self.options)
        return make_cache_key((self.sources, self.val_sources), tokenizer, rest)

    def fraction(self, count: int) -> float:
        """Return the share of `count` items to hold out."""
        if self.val_fraction is not None:
            return self.val_fraction
        share = min(0.05, self.most_held_out / max(1, count))
        return max(share, min(0.1, FEWEST_HELD_OUT / max(1, count)))


@dataclass
class Made:
    """One item: its value for the split's file, a key of its question (copies of a question go to the same split),
    and a conversation to show if it is short enough.
    """

    value: Any
    question: str
    sample: list[dict[str, str]] | None

    @classmethod
    def of(cls, value: Any, question: list[dict[str, Any]], answer: str) -> "Made":
        """Return an item for the messages of a question, shown with this answer."""
        shown = [*question, {"role": "assistant", "content": answer}]
        short = sum(len(m["content"]) for m in shown) <= SAMPLE_CHARACTERS
        return cls(value, json.dumps(question, sort_keys=True), shown if short else None)


Make = Callable[[ChatTemplate, int | None, dict[str, Any]], Made]


def _made(item: Make, end: int | None, template: ChatTemplate, fields: dict[str, Any]) -> Made | str:
    """Return the result of `item`, or the reason why there is none."""
    try:
        refuse_row_fields(fields)
        return item(template, end, fields)
    except NotRendered as error:
        return str(error)


def make_folder(
    spec: Spec,
    tokenizer: Path,
    out: Path,
    fields: tuple[str, ...],
    item: Make,
    write: Callable[[Path, str, list[Any]], tuple[str, dict[str, Any]]],
) -> dict[str, Any]:
    """Write the folder `out`, which must not exist, and return its index.

    tokenizer: a folder written by `chat_template.make_chat_tokenizer`. fields: of a record. item: converts a record
    to `Made`, given the template and the token that must end an answer if the template writes none; it raises
    NotRendered for unusable records. write: writes the values of a split to a file and returns its name, and facts
    for the index.

    Raises UsageError for wrong sources or if no item is usable, RunError if the folder cannot be written, and then
    leaves nothing.
    """
    noun = NOUN[spec.kind]
    log, duplicates = BadInputLog(), 0
    if not spec.sources:
        raise UsageError(
            f"--data: no {noun}s were given; give a .jsonl or .parquet file, a folder or hf:owner/name"
        )
    with new_folder(tokenizer, out) as new:
        template, coder = ChatTemplate(new), bpe.load(new)
        eos = bpe.end_of_text(coder, new)[1]
        work = partial(_made, item, eos if template.turn_end is None else None)
        with ProgressBar("render", _count(spec, fields), f"{noun}s") as bar:

            def made_of(names: Iterable[str]) -> Iterator[Made]:
                every = (Source.parse(name) for name in names)
                records = (r for source in every for r in iter_records(source, fields, log, ROW_FIELDS))
                found = map_in_order(
                    ((r, r.fields) for r in records), work, template, partial(ChatTemplate, new)
                )
                with contextlib.closing(found):
                    for record, made in found:
                        bar.advance(1)
                        if isinstance(made, Made):
                            yield made
                        else:
                            log.add(f"no {noun} that can be used", record.origin, made)

            val = list(made_of(spec.val_sources))
            everything = list(made_of(spec.sources))
        asked = {made.question for made in val}
        train = []
        fraction = spec.fraction(len(everything)) if not val else 0.0
        for made in everything:
            if made.question in asked and spec.val_sources:
                duplicates += 1
            elif is_validation(made.question.encode(), spec.seed, fraction):
                val.append(made)
            else:
                train.append(made)
        if train and not val:  # too few for the share to select one
            train, val = train[:-1], train[-1:]
        splits = {}
        for name, items in (("train", train), ("val", val)):
            if not items:
                why = f" ({log.summary()})" if log.total else "; give more, or held-out ones with --align.val"
                raise UsageError(f"--data: no {noun} is left for the {name} split{why}")
            file, facts = write(new, name, [made.value for made in items])
            splits[name] = {"file": file, "checksum": fingerprint(new / file)[1], **facts}
        write_samples(new, [made.sample for made in val if made.sample][:SAMPLES])
        index = {
            "schema_version": VERSION,
            "kind": spec.kind,
            "key": spec.key(tokenizer),
            "vocab_size": max(coder.get_vocab(with_added_tokens=True).values()) + 1,
            "eos_id": eos,
            "tokenizer": fingerprint(new / "tokenizer.json")[1],
            "splits": splits,
            "left_out": log.as_dict(),
            "duplicates_of_validation": duplicates,
        }
        (new / "index.json").write_text(json.dumps(index, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return index


def _count(spec: Spec, fields: tuple[str, ...]) -> int | None:
    """Return the number of records, for the progress bar; None if counting would need a download."""
    sources = [Source.parse(name) for name in (*spec.val_sources, *spec.sources)]
    if any(source.hub is not None for source in sources):
        return None
    return sum(1 for source in sources for _ in iter_records(source, fields, BadInputLog()))


def open_index(path: Path, kind: Kind, vocabulary: int) -> dict[str, Any]:
    """Read index.json. Raises UsageError for another kind or too many tokens, RunError if it is damaged."""
    try:
        index: dict[str, Any] = json_value((path / "index.json").read_bytes())
        found = index.get("kind", "text")
        files = [(path / split["file"], split["checksum"]) for split in index["splits"].values()]
        tokens = int(index["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / 'index.json'}: is damaged ({error}); prepare the data again") from None
    if found != kind:
        raise UsageError(f"data.path: {path} holds {found}, not {kind}; give {NOUN[kind]}s with --data")
    if tokens > vocabulary:
        raise UsageError(
            f"model.vocab_size: {path} has {tokens} tokens, the model {vocabulary}; prepare it with the "
            "model's own tokenizer"
        )
    for file, checksum in files:
        if not file.is_file() or fingerprint(file)[1] != checksum:
            raise RunError(f"{file}: was changed; remove {path} and prepare the data again")
    return index


def key_of(path: Path) -> str | None:
    """Return the `Spec.key` that a prepared folder was made from, or None in older folders."""
    try:
        return str(json_value((path / "index.json").read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PreparedSplit:
    """One split of a prepared folder, for rows of one length, and the facts that its `index` has."""

    def __init__(self, path: Path, split: str, sequence_length: int, kind: Kind, vocabulary: int):
        self.directory, self.split, self.sequence_length = path, split, sequence_length
        self.index = open_index(path, kind, vocabulary)
        self.file = path / self.index["splits"][split]["file"]

    @property
    def vocab_size(self) -> int:
        return int(self.index["vocab_size"])

    @property
    def filler(self) -> int:
        return int(self.index["eos_id"])

    @property
    def fingerprint(self) -> str:
        """Return a checksum of the content of all splits, independent of their location."""
        parts = [self.index["tokenizer"], *(split["checksum"] for split in self.index["splits"].values())]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def describe_data(index: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print what the user should know about the prepared data."""
    noun, splits = NOUN[index["kind"]], index["splits"]
    say(f"{splits['train']['count']:,} {noun}s to train on, {splits['val']['count']:,} held out")
    for reason, left in index["left_out"].items():
        say(f"left out: {left['count']:,} x {reason}, first {left['first'][0]}")
    if index["duplicates_of_validation"]:
        say(f"left out: {index['duplicates_of_validation']:,} that are held out too")
