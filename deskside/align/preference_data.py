"""Preference pairs: conversion of records to token arrays, and packing into rows that never split a pair.

A record has `prompt` (text or messages), `chosen` and `rejected` (text, or messages that end with the assistant's).
Both answers are rendered after the same question, and the assistant's last turn with its end token is scored,
exactly as in SFT. In a row, the two answers are two texts, each with the question, and cannot attend to each other.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deskside.align.answers import Text, pack_units
from deskside.align.prepared import Made, PreparedSplit, Spec, make_folder
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.renderer import NotRendered, checked_messages
from deskside.data.reading.shuffle import endless_shuffle
from deskside.utils.errors import UsageError


def prepare_pairs(spec: Spec, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `make_folder`."""
    return make_folder(spec, tokenizer, out, ("prompt", "chosen", "rejected"), _pair, _write)


def question_of(prompt: Any) -> list[dict[str, Any]]:
    """Return the messages of a prompt, which may be text. Raises NotRendered."""
    return checked_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def answered(template: ChatTemplate, end: int | None, question: list[dict[str, Any]], answer: str) -> Text:
    """Tokenize a question with an answer, up to its end token. end: that token if the template writes none.

    Raises NotRendered.
    """
    tokens = template.conversation([*question, {"role": "assistant", "content": answer}], turns="last")
    learnt = np.flatnonzero(tokens.mask)
    if not len(learnt) or not learnt[0]:
        raise NotRendered("the chat template shows no answer after the question")
    ids = tokens.ids[: learnt[-1] + 1].astype(np.int64)
    if end is not None:
        ids = np.append(ids, end)
    return Text(ids, int(learnt[0]))


def _pair(template: ChatTemplate, end: int | None, fields: dict[str, Any]) -> Made:
    question = question_of(fields["prompt"])
    chosen, rejected = (_answer(question, fields[name]) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise NotRendered("both answers are the same")
    texts = (answered(template, end, question, chosen), answered(template, end, question, rejected))
    return Made.of(texts, question, chosen)


def _answer(question: list[dict[str, Any]], given: Any) -> str:
    if isinstance(given, str):
        return given
    messages = checked_messages(given)
    if messages[-1]["role"] != "assistant":
        raise NotRendered("an answer's last message is not the assistant's")
    if len(messages) > 1 and messages[:-1] != question:
        raise NotRendered("an answer's messages do not begin with those of the prompt")
    if "name" in messages[-1]:
        raise NotRendered("an answer's last message has a name, which is not kept; take it out")
    return str(messages[-1]["content"])


def _write(folder: Path, split: str, pairs: list[tuple[Text, Text]]) -> tuple[str, dict[str, Any]]:
    texts = [text for pair in pairs for text in pair]
    tokens = np.concatenate([text.tokens for text in texts])
    arrays = {
        "tokens": tokens.astype(np.uint32),
        "start": np.cumsum([0, *(len(text.tokens) for text in texts)], dtype=np.int64),
        "answer": np.array([text.answer for text in texts], np.int64),
    }
    save_file(arrays, folder / f"{split}.safetensors")
    return f"{split}.safetensors", {"count": len(pairs), "tokens": len(tokens)}


class PairRows(PreparedSplit):
    """One split of a prepared folder, packed for one sequence length. Text 2p is pair p's chosen answer, 2p + 1 the
    rejected one.

    Pairs that do not fit into a row are left out; `left_out` counts them.
    """

    def __init__(self, path: Path, split: str, sequence_length: int, vocabulary: int):
        """Raises UsageError if no pair fits, RunError if the data is damaged."""
        super().__init__(path, split, sequence_length, "preference", vocabulary)
        arrays = load_file(self.file)
        self._tokens, self._start, self._answer = arrays["tokens"], arrays["start"], arrays["answer"]
        rooms = np.diff(self._start) - 1
        pair_rooms = rooms[0::2] + rooms[1::2]
        fits = np.flatnonzero(pair_rooms <= sequence_length)
        self.left_out = len(pair_rooms) - len(fits)
        if not len(fits):
            raise UsageError(
                f"batch.sequence_length: no pair of the {split} split fits {sequence_length} tokens, the shortest "
                f"takes {pair_rooms.min()}; give a longer one"
            )
        self.rows = [fits[row] for row in pack_units(pair_rooms[fits], sequence_length)]
        self._pairs_of_row = np.array([len(row) for row in self.rows], np.int64)

    def restrict(self, count: int) -> None:
        """Keep `count` rows, evenly spaced."""
        chosen = np.arange(count) * len(self.rows) // count
        self.rows = [self.rows[n] for n in chosen.tolist()]
        self._pairs_of_row = self._pairs_of_row[chosen]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.sequence_length

    @cached_property
    def scored_start(self) -> NDArray[np.int64]:
        """Return where each text's scored tokens begin in their concatenation over all texts; [texts + 1]."""
        return np.concatenate(([0], np.cumsum(np.diff(self._start) - self._answer)))

    def max_boundaries(self, rows: int) -> int:
        """Return the maximum number of texts and paddings in `rows` rows."""
        return rows * (2 * int(self._pairs_of_row.max()) + 1)

    def text(self, number: int) -> Text:
        part = slice(int(self._start[number]), int(self._start[number + 1]))
        return Text(self._tokens[part].astype(np.int64), int(self._answer[number]))

    def pairs_at(self, seed: int, positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the pairs of the rows at these positions of the endless shuffled order."""
        found = endless_shuffle(positions, self.num_rows, seed, self.sequence_length)
        return [self.rows[row] for row in found.tolist()]

    def texts_of(self, rows: Sequence[NDArray[np.int64]]) -> list[list[Text]]:
        """Return the texts of each row: chosen, rejected, chosen, rejected, ..."""
        return [[self.text(2 * int(p) + side) for p in row for side in (0, 1)] for row in rows]
