"""Preference pairs: conversion of records to token arrays, and packing into rows that never split a pair.

A record has `prompt` (text or messages), `chosen` and `rejected` (text, or messages, of which the last is the
assistant's). Both answers are rendered after the same question. As in SFT, the assistant's last turn is scored, its end
token included. In a row, a pair is two texts, each with the question, which cannot attend to each other.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deskside.align.answers import TokenizedText, pack_units
from deskside.align.prepared import FolderSpec, PreparedItem, PreparedSplit, prepare_folder
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.renderer import NotRendered, checked_messages
from deskside.data.reading.shuffle import endless_shuffle
from deskside.utils.errors import UsageError


def prepare_pairs(spec: FolderSpec, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `prepare_folder`."""
    return prepare_folder(spec, tokenizer, out, ("prompt", "chosen", "rejected"), _pair, _write)


def question_messages(prompt: Any) -> list[dict[str, Any]]:
    """Return the messages of a prompt; a text is one user message. Raises NotRendered if they are not valid."""
    return checked_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def tokenize_answer(
    template: ChatTemplate, end_token: int | None, question: list[dict[str, Any]], answer: str
) -> TokenizedText:
    """Tokenize a question with its answer, up to and including the answer's end token.

    end_token: appended if it is not None, for templates that write no end token. Raises NotRendered.
    """
    tokens = template.conversation([*question, {"role": "assistant", "content": answer}], turns="last")
    scored = np.flatnonzero(tokens.mask)
    if not len(scored) or not scored[0]:
        raise NotRendered("the chat template shows no answer after the question")
    ids = tokens.ids[: scored[-1] + 1].astype(np.int64)
    if end_token is not None:
        ids = np.append(ids, end_token)
    return TokenizedText(ids, int(scored[0]))


def _pair(template: ChatTemplate, end_token: int | None, fields: dict[str, Any]) -> PreparedItem:
    question = question_messages(fields["prompt"])
    chosen, rejected = _answer_text(question, fields["chosen"]), _answer_text(question, fields["rejected"])
    if chosen == rejected:
        raise NotRendered("both answers are the same")
    texts = (
        tokenize_answer(template, end_token, question, chosen),
        tokenize_answer(template, end_token, question, rejected),
    )
    return PreparedItem.of(texts, question, chosen)


def _answer_text(question: list[dict[str, Any]], answer: Any) -> str:
    """Return the text of an answer, which is given as text or as messages. Raises NotRendered."""
    if isinstance(answer, str):
        return answer
    messages = checked_messages(answer)
    if messages[-1]["role"] != "assistant":
        raise NotRendered("an answer's last message is not the assistant's")
    if len(messages) > 1 and messages[:-1] != question:
        raise NotRendered("an answer's messages do not begin with those of the prompt")
    if "name" in messages[-1]:
        raise NotRendered("an answer's last message has a name, which would be lost; remove it")
    return str(messages[-1]["content"])


def _write(
    folder: Path, split: str, pairs: list[tuple[TokenizedText, TokenizedText]]
) -> tuple[str, dict[str, Any]]:
    texts = [text for pair in pairs for text in pair]
    tokens = np.concatenate([text.tokens for text in texts])
    arrays = {
        "tokens": tokens.astype(np.uint32),
        "start": np.cumsum([0, *(len(text.tokens) for text in texts)], dtype=np.int64),
        "answer": np.array([text.answer_start for text in texts], np.int64),
    }
    save_file(arrays, folder / f"{split}.safetensors")
    return f"{split}.safetensors", {"count": len(pairs), "tokens": len(tokens)}


class PairRows(PreparedSplit):
    """One split of prepared preference pairs, packed for one sequence length.

    Text 2p is the chosen answer of pair p, text 2p + 1 the rejected one. `rows` has the pair indices of each row.
    Pairs that do not fit into a row are left out; `left_out` counts them. Raises UsageError if no pair fits, RunError
    if the data is damaged.
    """

    def __init__(self, path: Path, split: str, sequence_length: int, vocab_size: int):
        super().__init__(path, split, sequence_length, "preference", vocab_size)
        arrays = load_file(self.file)
        self._tokens, self._start, self._answer_start = arrays["tokens"], arrays["start"], arrays["answer"]
        text_lengths = np.diff(self._start) - 1  # the last token of a text is only a target
        pair_lengths = text_lengths[0::2] + text_lengths[1::2]
        fits = np.flatnonzero(pair_lengths <= sequence_length)
        self.left_out = len(pair_lengths) - len(fits)
        if not len(fits):
            raise UsageError(
                f"batch.sequence_length: no pair of the {split} split fits into {sequence_length} tokens; give at "
                f"least {pair_lengths.min()}, the length of the shortest pair"
            )
        self.rows = [fits[row] for row in pack_units(pair_lengths[fits], sequence_length)]
        self._pairs_of_row = np.array([len(row) for row in self.rows], np.int64)

    def subsample(self, count: int) -> None:
        """Keep `count` rows, evenly spaced."""
        kept = np.arange(count) * len(self.rows) // count
        self.rows = [self.rows[i] for i in kept.tolist()]
        self._pairs_of_row = self._pairs_of_row[kept]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.sequence_length

    @cached_property
    def scored_start(self) -> NDArray[np.int64]:
        """Return the offsets of each text's scored tokens in the concatenation of all texts' scored tokens.

        Shape (number of texts + 1,); the last entry is the total.
        """
        return np.concatenate(([0], np.cumsum(np.diff(self._start) - self._answer_start)))

    def max_boundaries(self, rows: int) -> int:
        """Return an upper bound on the number of texts and padding segments in `rows` rows."""
        return rows * (2 * int(self._pairs_of_row.max()) + 1)

    def text(self, index: int) -> TokenizedText:
        part = slice(int(self._start[index]), int(self._start[index + 1]))
        return TokenizedText(self._tokens[part].astype(np.int64), int(self._answer_start[index]))

    def pairs_at(self, seed: int, positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the pair indices of the rows at these positions of the endless shuffled order."""
        indices = endless_shuffle(positions, self.num_rows, seed, self.sequence_length)
        return [self.rows[row] for row in indices.tolist()]

    def texts_of(self, rows: Sequence[NDArray[np.int64]]) -> list[list[TokenizedText]]:
        """Return the texts of each row: chosen, rejected, chosen, rejected, ..."""
        return [[self.text(index) for index in text_indices([row])] for row in rows]


def text_indices(rows: Sequence[NDArray[np.int64]]) -> list[int]:
    """Return the indices of the texts of rows of pairs: chosen, rejected, chosen, rejected, ..."""
    return [index for row in rows for pair in row.tolist() for index in (2 * pair, 2 * pair + 1)]
