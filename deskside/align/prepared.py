"""Prepared data folders for DPO (preference pairs), KTO (labelled answers) and GRPO (questions).

They are checked when they are opened:

index.json                                   counts and checksums
train.*, val.*                               one file for each split
samples.json                                 a few held-out questions
tokenizer.json, chat_template.jinja, ...
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import xxhash

from deskside.config.base import DATA_NOUNS, DataKind
from deskside.data import tokenizer as bpe
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.formats import EXTRA_FIELDS
from deskside.data.chat.messages import Conversation, Message, NotRendered, message_text
from deskside.data.chat.prepare_chat import (
    MIN_HELD_OUT,
    SAMPLE_CHARACTERS,
    SAMPLES,
    make_cache_key,
    new_folder,
    write_samples,
)
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.heldout import is_validation
from deskside.data.corpus.process_pool import map_in_order
from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import Source
from deskside.data.reading.index_file import INDEX
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint, write_json
from deskside.utils.parsing import json_value
from deskside.utils.progress import ProgressBar

FORMAT_VERSION = 1  # of the folder; written to index.json
CONVERSION_VERSION = 3  # raised when the conversion of the same records gives other content
Kind = Literal["preference", "labelled", "questions"]
# KTO compares answers to different questions, so it needs two.
MIN_VAL_QUESTIONS = {"preference": 1, "labelled": 2, "questions": 1}
NOUN = {"preference": "pair", "labelled": "answer", "questions": "question"}


@dataclass(frozen=True)
class FolderSpec:
    """Everything that determines the content of a prepared folder, apart from the tokenizer.

    val_fraction: held-out share; None is 5 %, at most about `max_held_out` items; of few items, about `MIN_HELD_OUT`,
    but at most a tenth. options: what else the conversion of this kind depends on.
    """

    kind: Kind
    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    val_fraction: float | None = None
    max_held_out: int = 500
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    def key(self, tokenizer: Path) -> str:
        """Return a cache key: a hash of the sources' content, the tokenizer and the other fields. Raises UsageError."""
        versions = (FORMAT_VERSION, CONVERSION_VERSION)
        rest = (*versions, self.kind, self.val_fraction, self.max_held_out, self.seed, self.options)
        return make_cache_key((self.sources, self.val_sources), tokenizer, rest)

    def held_out_fraction(self, count: int) -> float:
        """Return the share of `count` items to hold out."""
        if self.val_fraction is not None:
            return self.val_fraction
        share = min(0.05, self.max_held_out / max(1, count))
        return max(share, min(0.1, MIN_HELD_OUT / max(1, count)))


@dataclass
class PreparedItem:
    """One converted record.

    value: what the split's file stores. question: identifies the question; items with the same one go to the same
    split. sample: the conversation for samples.json, None if it is too long.
    """

    value: Any
    question: str
    sample: dict[str, Any] | None

    @classmethod
    def of(cls, value: Any, question: Conversation, answer: Message) -> "PreparedItem":
        """Return the item of a question with its answer."""
        conversation = question.with_messages([*question.messages, answer])
        short = sum(len(message_text(message)) for message in conversation.messages) <= SAMPLE_CHARACTERS
        sample = dataclasses.asdict(conversation) if short else None
        return cls(value, json.dumps(dataclasses.asdict(question), sort_keys=True), sample)


ConvertRecord = Callable[[ChatTemplate, int | None, dict[str, Any]], PreparedItem]


def _convert_or_reason(
    convert: ConvertRecord, end_token: int | None, template: ChatTemplate, fields: dict[str, Any]
) -> PreparedItem | str:
    """Return the converted record, or the reason why it cannot be converted."""
    try:
        return convert(template, end_token, fields)
    except NotRendered as error:
        return str(error)


def prepare_folder(
    spec: FolderSpec,
    tokenizer: Path,
    out: Path,
    fields: tuple[str, ...],
    convert: ConvertRecord,
    write: Callable[[Path, str, list[Any]], tuple[str, dict[str, Any]]],
    optional: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write the folder `out`, which must not exist, and return its index.

    Args:
        tokenizer: A folder written by `chat_template.make_chat_tokenizer`.
        fields: The fields that every record must have.
        convert: Converts a record, given the template and the token to append to an answer if the template writes no
            end token, else None. Raises NotRendered for unusable records.
        write: Writes the values of a split to a file; returns the file's name, and entries for the index.
        optional: Fields that a record may have, in addition to those of every conversation.

    Raises UsageError for wrong sources or a split without usable records, RunError if the folder cannot be written.
    After an error, no new folder is left.
    """
    noun = NOUN[spec.kind]
    log, duplicates = BadInputLog(), 0
    if not spec.sources:
        raise UsageError(
            f"--data: no {noun}s were given; give a .jsonl or .parquet file, a folder or hf:owner/name"
        )
    with new_folder(tokenizer, out) as new:
        template, loaded_tokenizer = ChatTemplate(new), bpe.load(new)
        eos = bpe.end_of_text(loaded_tokenizer, new)[1]
        work = partial(_convert_or_reason, convert, eos if template.turn_end is None else None)
        with ProgressBar("render", _count(spec, fields), f"{noun}s") as bar:

            def items_of(names: Iterable[str]) -> Iterator[PreparedItem]:
                sources = (Source.parse(name) for name in names)
                others = (*EXTRA_FIELDS, *optional)
                records = (r for source in sources for r in iter_records(source, fields, log, others))
                results = map_in_order(
                    ((r, r.fields) for r in records), work, template, partial(ChatTemplate, new)
                )
                with contextlib.closing(results):
                    for record, result in results:
                        bar.advance(1)
                        if isinstance(result, PreparedItem):
                            yield result
                        else:
                            log.add(f"no {noun} that can be used", record.origin, result)

            val = list(items_of(spec.val_sources))
            items = list(items_of(spec.sources))
        val_questions = {item.question for item in val}
        train = []
        fraction = 0.0 if spec.val_sources else spec.held_out_fraction(len(items))
        for item in items:
            if item.question in val_questions:
                duplicates += 1
            elif is_validation(item.question.encode(), spec.seed, fraction):
                val.append(item)
            else:
                train.append(item)
        held_out = {item.question for item in val}
        # There may be so few that the fraction selected none.
        while train and not spec.val_sources and len(held_out) < MIN_VAL_QUESTIONS[spec.kind]:
            last = train[-1].question
            held_out.add(last)
            val += [item for item in train if item.question == last]
            train = [item for item in train if item.question != last]
        splits = {}
        for name, split_items in (("train", train), ("val", val)):
            if not split_items:
                why = f" ({log.summary()})" if log.total else "; give more, or held-out ones with --align.val"
                option = "--align.val" if name == "val" and spec.val_sources else "--data"
                raise UsageError(f"{option}: no usable {noun}s for the {name} split{why}")
            file, facts = write(new, name, [item.value for item in split_items])
            splits[name] = {"file": file, "checksum": fingerprint(new / file)[1], **facts}
        write_samples(new, [item.sample for item in val if item.sample][:SAMPLES])
        index = {
            "schema_version": FORMAT_VERSION,
            "kind": spec.kind,
            "key": spec.key(tokenizer),
            "vocab_size": max(loaded_tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            "eos_id": eos,
            "tokenizer": fingerprint(new / "tokenizer.json")[1],
            "splits": splits,
            "left_out": log.as_dict(),
            "duplicates_of_validation": duplicates,
        }
        write_json(new / INDEX, index, indent=1)
    return index


def _count(spec: FolderSpec, fields: tuple[str, ...]) -> int | None:
    """Return the number of records, for the progress bar; None if counting would need a download."""
    sources = [Source.parse(name) for name in (*spec.val_sources, *spec.sources)]
    if any(source.hub is not None for source in sources):
        return None
    return sum(1 for source in sources for _ in iter_records(source, fields, BadInputLog()))


def open_index(path: Path, kind: Kind, vocab_size: int) -> dict[str, Any]:
    """Return the content of index.json, after checking the folder's files.

    Raises UsageError if the folder holds another kind of data or more tokens than `vocab_size`, RunError if it is
    damaged.
    """
    try:
        index: dict[str, Any] = json_value((path / INDEX).read_bytes())
        found_kind: DataKind = index.get("kind") or ("conversations" if index.get("chat") else "text")
        if found_kind != kind:
            found, noun = DATA_NOUNS[found_kind], DATA_NOUNS[kind]
            raise UsageError(f"data.path: {path} holds {found}, not {noun}; give {noun} with --data")
        files = [(path / split["file"], split["checksum"]) for split in index["splits"].values()]
        tokens = int(index["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / 'index.json'}: is damaged ({error}); prepare the data again") from None
    if tokens > vocab_size:
        raise UsageError(
            f"model.vocab_size: {path} has a vocabulary of {tokens}, the model only one of {vocab_size}; prepare the "
            "data with the model's own tokenizer"
        )
    for file, checksum in files:
        if not file.is_file() or fingerprint(file)[1] != checksum:
            raise RunError(f"{file}: was changed; remove {path} and prepare the data again")
    return index


def key_of(path: Path) -> str | None:
    """Return the `FolderSpec.key` of a prepared folder, or None if it has none or cannot be read."""
    try:
        return str(json_value((path / INDEX).read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PreparedSplit:
    """Base class of one split of a prepared folder, read in rows of `sequence_length` tokens."""

    def __init__(self, path: Path, split: str, sequence_length: int, kind: Kind, vocab_size: int):
        self.directory, self.split, self.sequence_length, self.kind = path, split, sequence_length, kind
        self.index = open_index(path, kind, vocab_size)
        self.file = path / self.index["splits"][split]["file"]

    @property
    def vocab_size(self) -> int:
        return int(self.index["vocab_size"])

    @property
    def pad_token(self) -> int:
        return int(self.index["eos_id"])

    @property
    def fingerprint(self) -> str:
        """Return a checksum of all splits and the tokenizer, independent of the folder's location."""
        parts = [self.index["tokenizer"], *(split["checksum"] for split in self.index["splits"].values())]
        return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def describe_data(index: dict[str, Any], say: Callable[[str], None]) -> None:
    """Tell the user the sizes of the splits and what was left out."""
    noun, splits = NOUN[index["kind"]], index["splits"]
    say(f"{splits['train']['count']:,} {noun}s to train on, {splits['val']['count']:,} held out")
    for reason, left in index["left_out"].items():
        say(f"left out: {left['count']:,} x {reason}, first {left['first'][0]}")
    if index["duplicates_of_validation"]:
        say(f"left out: {index['duplicates_of_validation']:,} with questions that are also held out")
