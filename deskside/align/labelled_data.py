"""Labelled answers for KTO: conversion of records to token arrays, and the rows of the training data.

A record has `prompt` (text or messages), `completion` (text, or messages, of which the last is the assistant's) and
`label`: true if the answer is desirable.

KTO estimates the KL divergence from answers to other questions. So each question has a second text: the question with
the answer of another record. In the order of a hash of the questions, it is the answer that is as many records before
as the most frequent question has. That never is an answer to the same question, although a question may have many.
If more than half of the answers are to one question, those to the others are used several times for it.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deskside.align.answers import TokenizedText, pack_units
from deskside.align.preference_data import answer_of, question_of, tokenize_answer
from deskside.align.prepared import FolderSpec, PreparedItem, prepare_folder
from deskside.align.text_rows import TextRows, Units
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import NotRendered
from deskside.utils.errors import UsageError


def prepare_labelled(spec: FolderSpec, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `prepare_folder`."""
    return prepare_folder(spec, tokenizer, out, ("prompt", "completion", "label"), _answer, _write)


def _answer(template: ChatTemplate, end_token: int | None, fields: dict[str, Any]) -> PreparedItem:
    label = fields["label"]
    if not isinstance(label, bool) and label not in (0, 1):
        raise NotRendered("the label is neither true nor false")
    question = question_of(fields)
    answer = answer_of(question, fields["completion"])
    text = tokenize_answer(template, end_token, question, answer)
    return PreparedItem.of((text, bool(label)), question, answer)


def _write(folder: Path, split: str, answers: list[tuple[TokenizedText, bool]]) -> tuple[str, dict[str, Any]]:
    texts = [text for text, _ in answers]
    tokens = np.concatenate([text.tokens for text in texts])
    labels = np.array([label for _, label in answers], np.uint8)
    arrays = {
        "tokens": tokens.astype(np.uint32),
        "start": np.cumsum([0, *(len(text.tokens) for text in texts)], dtype=np.int64),
        "answer": np.array([text.answer_start for text in texts], np.int64),
        "label": labels,
        "other": answers_to_others([text.tokens[: text.answer_start].tobytes() for text in texts], split),
    }
    save_file(arrays, folder / f"{split}.safetensors")
    counts = {"count": len(texts), "tokens": len(tokens), "desirable": int(labels.sum())}
    return f"{split}.safetensors", counts


def answers_to_others(questions: list[bytes], split: str) -> NDArray[np.int64]:
    """Return for each record the index of a record with another question.

    Each index occurs once, unless more than half of the records have the same question. Raises UsageError if all have.
    """
    hashes = np.array([xxhash.xxh3_64_intdigest(question) for question in questions], np.uint64)
    order = np.argsort(hashes, kind="stable")
    values, counts = np.unique(hashes, return_counts=True)
    most = int(counts.max())
    if most == len(questions):
        raise UsageError(
            f"{'--data' if split == 'train' else '--align.val'}: all {len(questions)} answers of the {split} split are "
            "to one question; KTO needs answers to at least two questions in each split, so give more"
        )
    other = np.empty(len(questions), np.int64)
    if 2 * most <= len(questions):
        other[order] = np.roll(order, most)
    else:
        frequent = hashes == values[counts.argmax()]
        other[frequent] = np.resize(np.flatnonzero(~frequent), most)
        other[~frequent] = np.flatnonzero(frequent)[: len(questions) - most]
    return other


class LabelledRows(TextRows):
    """One split of prepared labelled answers, packed for one sequence length.

    Text 2i is the question and answer of record i, text 2i + 1 its question with the answer of another record,
    truncated to a row. Only the former are packed. Raises UsageError if none fits into a row, RunError if the data is
    damaged.
    """

    def __init__(self, path: Path, split: str, sequence_length: int, vocab_size: int):
        super().__init__(path, split, sequence_length, "labelled", vocab_size)
        arrays = load_file(self.file)
        self._tokens, self._start, self._answer_start = arrays["tokens"], arrays["start"], arrays["answer"]
        self._other, self.desirable = arrays["other"], arrays["label"].astype(bool)
        lengths = np.diff(self._start) - 1  # the last token of a text is only a target
        self._pack(lengths)
        # A text has at least the inputs of its question.
        self.texts_per_row = sequence_length // max(1, int(self._answer_start.min()))

    @cached_property
    def scored_start(self) -> NDArray[np.int64]:
        own = np.diff(self._start) - self._answer_start
        space = np.maximum(0, self.sequence_length + 1 - self._answer_start)
        lengths = np.stack((own, np.minimum(own[self._other], space)), axis=1)
        return np.concatenate(([0], np.cumsum(lengths)))

    def text(self, index: int) -> TokenizedText:
        record, to_other = divmod(index, 2)
        answered = int(self._other[record]) if to_other else record
        answer_start = int(self._answer_start[record])
        question = self._tokens[self._start[record] : self._start[record] + answer_start]
        answer = self._tokens[
            self._start[answered] + self._answer_start[answered] : self._start[answered + 1]
        ]
        length = int(self.scored_start[index + 1] - self.scored_start[index])
        return TokenizedText(np.concatenate((question, answer[:length])).astype(np.int64), answer_start)

    def own_texts(self, rows: Units) -> list[list[int]]:
        """Return the indices of the questions with their own answers, in rows."""
        return [(2 * row).tolist() for row in rows]

    def other_texts(self, rows: Units) -> list[list[int]]:
        """Return the indices of the questions with the answers of other records, packed into rows."""
        texts = 2 * np.concatenate([*rows, np.empty(0, np.int64)]) + 1
        lengths = self._answer_start[texts // 2] + np.diff(self.scored_start)[texts] - 1
        return [texts[row].tolist() for row in pack_units(lengths, self.sequence_length)]

    def reference_texts(self, rows: Units) -> list[list[int]]:
        return self.own_texts(rows) + self.other_texts(rows)
