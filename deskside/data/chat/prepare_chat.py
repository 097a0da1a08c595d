"""Preparation of conversations as token shards with masks. `deskside sft` caches the result.

The data set has the format of `corpus.prepare` (index.json, shards, tokenizer.json), so it is loaded, packed and
verified by the same code. In addition it has a mask file for each shard, the chat template, generation_config.json, and
samples.json, a few held-out conversations for sample answers.

A keyed hash of its messages decides whether a conversation is held out. So the choice does not depend on the order, and
copies are in the same split. The folder gets its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from deskside.data import tokenizer as bpe
from deskside.data.chat.chat_template import CHAT_FILES, ChatTemplate, TokenizedConversation, Turns
from deskside.data.chat.formats import RECORD_FIELDS, conversation_of
from deskside.data.chat.messages import Conversation, NotRendered, message_text
from deskside.data.corpus.analyze import add_tag
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.encoder_sample import EncoderSample
from deskside.data.corpus.heldout import is_validation
from deskside.data.corpus.process_pool import MIN_PARALLEL_ITEMS, map_in_order
from deskside.data.corpus.records import Record, iter_records, sources_checksum
from deskside.data.corpus.sources import Source
from deskside.data.encoder import choose_encoder, tokenizers_info
from deskside.data.reading import shards
from deskside.data.reading.index import (
    SCHEMA_VERSION,
    ChatInfo,
    DatasetIndex,
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    dtype_for,
    write_index,
)
from deskside.data.reading.shards import EncodedDocument
from deskside.data.reading.tags import TagInfo
from deskside.data.reading.verify import verify
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.files import TEMPORARY_SUFFIX, fingerprint, write_error
from deskside.utils.format import plural
from deskside.utils.progress import ProgressBar

VERSION = 3  # of the prepared data; increase it when the same arguments give different content
SHARD_TOKENS = 1 << 25
DEFAULT_FRACTION = 0.02  # share of the conversations to hold out
MIN_HELD_OUT = 32  # if there are few, a larger share is held out, at most 0.1, for about this many
SAMPLES, SAMPLE_CHARACTERS = 4, 600  # number of sample conversations, and their maximum length
SAMPLES_FILE = "samples.json"
TOO_FEW, EMPTY_SOURCE = "there are too few", "the file is empty"
NO_CONVERSATION, REFUSED = "no conversation", "the chat template cannot render it"
MAX_REASONS = 30  # distinct reasons that are counted on their own


@dataclass(frozen=True)
class ChatSpec:
    """Everything that determines a data set of conversations, apart from the tokenizer."""

    sources: tuple[str, ...]
    val_sources: tuple[str, ...] = ()
    val_fraction: float | None = None
    turns: Turns = "all"
    seed: int = 0


def cache_key(spec: ChatSpec, tokenizer: Path) -> str:
    """Return a checksum of everything that determines the data set: the sources, the tokenizer and the options.

    For a hub data set, only its spec is included, so changes of its content are not noticed. Raises UsageError, as
    `Source.parse` does.
    """
    options = (VERSION, spec.val_fraction, spec.turns, spec.seed)
    return make_cache_key((spec.sources, spec.val_sources), tokenizer, options)


def make_cache_key(sources: Iterable[Sequence[str]], tokenizer: Path, options: tuple[object, ...]) -> str:
    """Return a checksum of the content of sources, of a tokenizer with all its files, and of `options`."""
    parts = [sources_checksum([Source.parse(s) for s in names]) for names in sources]
    parts += [(tokenizer / name).read_text("utf-8") for name in ("tokenizer.json", *CHAT_FILES)]
    return xxhash.xxh3_64_hexdigest("\0".join([*parts, repr(options)]).encode())


def prepare_chat(
    spec: ChatSpec, tokenizer: Path, out: Path, *, quiet: bool = False, shard_tokens: int = SHARD_TOKENS
) -> DatasetIndex:
    """Make the data set in the new folder `out`. tokenizer: a folder written by `chat_template.make_chat_tokenizer`.

    Raises UsageError for invalid sources, too few conversations, or an existing `out`; RunError if the disk is full.
    """
    if not spec.sources:
        raise UsageError(
            "--data: no conversations were given; give a .jsonl or .parquet file, a folder or hf:owner/name"
        )
    with new_folder(tokenizer, out) as new:
        return _ChatPreparation(spec, new, quiet, shard_tokens, cache_key(spec, tokenizer)).run()


@contextlib.contextmanager
def new_folder(tokenizer: Path, out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out` with the tokenizer's files, which is renamed to `out` on success.

    Raises UsageError if `out` exists, RunError for an OSError, also of the block.
    """
    if out.exists():
        raise UsageError(f"{out}: exists already; remove it, or give another --data.path")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=TEMPORARY_SUFFIX, dir=out.parent))
    except OSError as error:
        raise write_error(out, error) from error
    try:
        for file in tokenizer.iterdir():
            shutil.copyfile(file, new / file.name)
        yield new
        new.chmod(0o755)
        new.rename(out)
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_samples(folder: Path, conversations: list[Any]) -> None:
    """Write the held-out conversations for which a run samples answers."""
    text = json.dumps(conversations, ensure_ascii=False, indent=1) + "\n"
    (folder / SAMPLES_FILE).write_text(text, "utf-8")


@dataclass
class _Split:
    """One split in progress: the documents of the current shard, and the finished shards."""

    name: str
    documents: list[EncodedDocument] = field(default_factory=list)
    tokens: int = 0
    text_bytes: int = 0
    learnt: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    finished: list[ShardInfo] = field(default_factory=list)


@dataclass(frozen=True)
class _Item:
    """A valid conversation and its record. key: a hash of all that the chat template gets."""

    record: Record
    format: str
    conversation: Conversation
    key: bytes

    @property
    def text(self) -> str:
        """The texts of all messages."""
        return "\n".join(map(message_text, self.conversation.messages))


def _tokenize(
    turns: Turns, template: ChatTemplate, conversation: Conversation
) -> TokenizedConversation | str:
    """Return the tokenized conversation, or the reason why it cannot be tokenized."""
    try:
        return template.conversation(conversation, turns)
    except NotRendered as error:
        return str(error)


def _leave_out(log: BadInputLog, kind: str, record: Record, why: str) -> None:
    """Count a record that is left out, by its reason without the number of the message."""
    number = re.search(r"\bmessage \d+", why)
    general = why.removeprefix(f"{number[0]}: ").replace(number[0], "a message") if number else why
    reason = f"{kind}: {general}"
    if reason in log.counts or len(log.counts) < MAX_REASONS:
        log.add(reason, record.origin, number[0] if number else "")
    else:
        log.add(kind, record.origin, why)


class _ChatPreparation:
    def __init__(self, spec: ChatSpec, out: Path, quiet: bool, shard_tokens: int, key: str):
        self.spec, self.out, self.quiet, self.shard_tokens, self.key = spec, out, quiet, shard_tokens, key
        self.template = ChatTemplate(out)
        tokenizer = bpe.load(out)
        self.eos, self.eos_id = bpe.end_of_text(tokenizer, out)
        self.token_bytes = bpe.token_bytes(tokenizer)
        self.tags: dict[tuple[str, str], int] = {}
        self.logs = {"train": BadInputLog(), "val": BadInputLog()}
        self.splits = {name: _Split(name) for name in ("val", "train")}
        self.duplicates = self.unlearnt_turns = self.rewritten = 0
        self.formats: dict[str, int] = {}
        self.samples: list[Any] = []

    def run(self) -> DatasetIndex:
        train, val = (
            [Source.parse(s) for s in names] for names in (self.spec.sources, self.spec.val_sources)
        )
        held_out: set[bytes] = set()
        count, fraction, forced = self._first_pass(train, val)
        if val:

            def validation_items() -> Iterator[tuple[str, _Item]]:
                for item in self._items(val, "val"):
                    held_out.add(item.key)
                    yield "val", item

            self._add_all(validation_items())
            if not held_out:
                raise UsageError(
                    f"--val: no conversation {self.logs['val'].why_nothing_is_usable(EMPTY_SOURCE)}"
                )
        with ProgressBar("render", count, "conversations", quiet=self.quiet) as bar:

            def divided_items() -> Iterator[tuple[str, _Item]]:
                for item in self._items(train, "train"):
                    key = item.key
                    if key in held_out:
                        self.duplicates += 1
                        bar.advance(1)
                        continue
                    is_val = key == forced or is_validation(key, self.spec.seed, fraction)
                    yield "val" if is_val else "train", item

            self._add_all(divided_items(), bar)
        for split in self.splits.values():
            self._write_shard(split)
        return self._finish()

    def _first_pass(self, train: Sequence[Source], val: Sequence[Source]) -> tuple[int, float, bytes | None]:
        """Return the number of conversations, the share to hold out, and a key to hold out if that share selects none.

        With validation sources, nothing is held out of `train`. Also chooses the encoder.
        """
        sample = EncoderSample()
        keys = self._add_to_sample(train, "train", sample)
        if not keys:
            raise UsageError(
                f"--data: no conversation {self.logs['train'].why_nothing_is_usable(EMPTY_SOURCE)}"
            )
        if len(keys) < MIN_PARALLEL_ITEMS:
            self.encoder = tokenizers_info("so few conversations take less time than a comparison")
        else:
            self._add_to_sample(val, "val", sample)
            self.encoder = choose_encoder(bpe.load(self.out), sample.texts())
            self.template = ChatTemplate(self.out, self.encoder)
            if not self.quiet:
                say(f"encode with {self.encoder.describe()}")
        self.logs = {name: BadInputLog() for name in self.logs}  # counted again by the second pass
        if val:
            return len(keys), 0.0, None
        fraction = self.spec.val_fraction or max(DEFAULT_FRACTION, min(0.1, MIN_HELD_OUT / len(keys)))
        any_held_out = any(is_validation(key, self.spec.seed, fraction) for key in keys)
        return len(keys), fraction, None if any_held_out else min(keys)

    def _add_to_sample(self, sources: Sequence[Source], split: str, sample: EncoderSample) -> list[bytes]:
        """Add the text of all conversations to a sample, and return their keys."""
        keys = []
        for item in self._items(sources, split):
            keys.append(item.key)
            sample.add((item.record.source, item.record.lang), item.key, item.text.encode())
        return keys

    def _items(self, sources: Sequence[Source], split: str) -> Iterator[_Item]:
        """Yield the valid conversations of sources; the others are counted in the log of the split."""
        log = self.logs[split]
        for source in sources:
            for record in iter_records(source, (), log, RECORD_FIELDS):
                try:
                    format_, conversation = conversation_of(record.fields)
                except NotRendered as error:
                    _leave_out(log, NO_CONVERSATION, record, str(error))
                    continue
                content = json.dumps(dataclasses.asdict(conversation), sort_keys=True)
                yield _Item(record, format_, conversation, xxhash.xxh3_128_digest(content.encode()))

    def _add_all(self, split_items: Iterable[tuple[str, _Item]], bar: ProgressBar | None = None) -> None:
        """Tokenize conversations, and add them in order to the splits that they are given with."""
        items = ((pair, pair[1].conversation) for pair in split_items)
        tokenize, make_template = (
            partial(_tokenize, self.spec.turns),
            partial(ChatTemplate, self.out, self.encoder),
        )
        with contextlib.closing(map_in_order(items, tokenize, self.template, make_template)) as results:
            for (split, item), tokenized in results:
                if bar is not None:
                    bar.advance(1)
                self._add(split, item, tokenized)

    def _source_split(self, split: str) -> str:
        """Return "val" if a split comes from validation sources, else "train"."""
        return "val" if split == "val" and self.spec.val_sources else "train"

    def _add(self, split_name: str, item: _Item, tokenized: TokenizedConversation | str) -> None:
        split, record, text = self.splits[split_name], item.record, item.text
        if isinstance(tokenized, str):
            _leave_out(self.logs[self._source_split(split_name)], REFUSED, record, tokenized)
            return
        ids, mask = tokenized.ids, tokenized.mask
        if self.template.turn_end is None:  # otherwise the model would not learn to stop
            ids, mask = np.append(ids, np.uint32(self.eos_id)), np.append(mask, np.uint8(1))
        split.documents.append(EncodedDocument(ids, add_tag(self.tags, record.source, record.lang), mask))
        split.tokens += len(ids)
        split.learnt += int(mask.sum())
        split.text_bytes += max(1, len(text.encode()))
        split.digest.update(item.key)
        self.formats[item.format] = self.formats.get(item.format, 0) + 1
        self.unlearnt_turns += tokenized.unlearnt_turns
        self.rewritten += tokenized.rewritten
        is_short = len(text) <= SAMPLE_CHARACTERS
        is_answered = item.conversation.messages[-1]["role"] == "assistant"
        if split_name == "val" and is_short and is_answered and len(self.samples) < SAMPLES:
            self.samples.append(dataclasses.asdict(item.conversation))
        if split.tokens >= self.shard_tokens:
            self._write_shard(split)

    def _write_shard(self, split: _Split) -> None:
        """Write the collected documents of a split as a shard, if there are any."""
        if not split.documents:
            return
        info = shards.write_shard(
            self.out,
            f"{split.name}-{len(split.finished):05d}",
            split.documents,
            eos_id=self.eos_id,
            dtype=dtype_for(len(self.token_bytes)),
            text_bytes=split.text_bytes,
            token_bytes=self.token_bytes,
            key=split.digest.hexdigest(),
        )
        shards.publish(self.out, info)
        split.finished.append(info)
        split.documents, split.tokens, split.text_bytes, split.digest = [], 0, 0, xxhash.xxh3_128()

    def _finish(self) -> DatasetIndex:
        for name, split in self.splits.items():
            if not split.finished:
                source_split = self._source_split(name)
                log, option = self.logs[source_split], "--val" if source_split == "val" else "--data"
                reason = log.summary() if log.total else TOO_FEW
                if self.duplicates and name == "train":
                    reason = f"{self.duplicates} are copies of held-out ones"
                remedy = "give more" if self.spec.val_sources else "give more, or give --val"
                raise UsageError(
                    f"{option}: no usable conversations for the {name} split ({reason}); {remedy}"
                )
        write_samples(self.out, self.samples)
        index = DatasetIndex(
            schema_version=SCHEMA_VERSION,
            dtype=dtype_for(len(self.token_bytes)),
            tokenizer=TokenizerInfo(
                checksum=fingerprint(self.out / "tokenizer.json")[1],
                vocab_size=len(self.token_bytes),
                eos=self.eos,
                eos_id=self.eos_id,
            ),
            tags=[TagInfo(source=source, lang=lang) for source, lang in self.tags],
            splits={name: SplitInfo.of(split.finished) for name, split in self.splits.items()},
            bad_input={name: log.as_dict() for name, log in self.logs.items() if log.total},
            ignored_files={},
            duplicates_of_validation=self.duplicates,
            arguments={"chat": dataclasses.asdict(self.spec), "key": self.key},
            chat=ChatInfo(
                turn_end=self.template.turn_end,
                learnt_tokens={name: split.learnt for name, split in self.splits.items()},
                formats=self.formats,
                unlearnt_turns=self.unlearnt_turns,
                rewritten=self.rewritten,
            ),
            encoder=self.encoder,
        )
        write_index(self.out, index)
        verify(self.out)
        return index


def describe_data(index: DatasetIndex, say: Callable[[str], None]) -> None:
    """Report the size of prepared conversations and what was left out, line by line with `say`."""
    assert index.chat is not None
    train, val = index.splits["train"], index.splits["val"]
    learnt = index.chat.learnt_tokens
    say(
        f"{plural(train.documents, 'training conversation')} with {train.tokens:,} tokens in all, of which "
        f"{learnt['train']:,} count in the loss; {val.documents:,} held out"
    )
    if index.chat.formats:
        say("formats: " + ", ".join(f"{n:,} x {name}" for name, n in sorted(index.chat.formats.items())))
    if index.chat.rewritten:
        say(
            f"every turn is kept as the model generates it; in {plural(index.chat.rewritten, 'conversation')}, the "
            "chat template would rewrite earlier turns, for example without their reasoning"
        )
    if index.chat.unlearnt_turns:
        say(f"not learned: {index.chat.unlearnt_turns:,} of the assistant's turns")
    for reasons in index.bad_input.values():
        for reason, left in reasons.items():
            say(f"left out: {left['count']:,} x {reason}, first {left['first'][0]}")
    if index.duplicates_of_validation:
        say(f"left out: {plural(index.duplicates_of_validation, 'copy')} of held-out conversations")
