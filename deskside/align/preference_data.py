"""Preference pairs: conversion of records to token arrays, and packing into rows that never split a pair.

A record has `prompt` (text or messages), `chosen` and `rejected` (text, or messages, of which the last is the
assistant's). Both answers are rendered after the same question. As in SFT, the assistant's last turn is scored, its end
token included. In a row, a pair is two texts, each with the question, which cannot attend to each other.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from deskside.align.answers import TokenizedText
from deskside.align.prepared import FolderSpec, PreparedItem, prepare_folder
from deskside.align.text_rows import TextRows, Units
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.formats import as_openai_messages, with_extras
from deskside.data.chat.messages import Conversation, Message, NotRendered, checked_messages


def prepare_pairs(spec: FolderSpec, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `prepare_folder`."""
    return prepare_folder(spec, tokenizer, out, ("prompt", "chosen", "rejected"), _pair, _write)


def question_of(fields: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record's prompt; a text is one user message. Raises NotRendered."""
    prompt = fields["prompt"]
    return with_extras(
        fields,
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else as_openai_messages(prompt),
    )


def tokenize_answer(
    template: ChatTemplate, end_token: int | None, question: Conversation, answer: Message
) -> TokenizedText:
    """Tokenize a question with its answer, up to and including the answer's end token.

    end_token: appended if it is not None, for templates that write no end token. Raises NotRendered.
    """
    tokens = template.conversation(question.with_messages([*question.messages, answer]), turns="last")
    scored = np.flatnonzero(tokens.mask)
    if not len(scored) or not scored[0]:
        raise NotRendered("the chat template shows no answer after the question")
    ids = tokens.ids[: scored[-1] + 1].astype(np.int64)
    if end_token is not None:
        ids = np.append(ids, end_token)
    return TokenizedText(ids, int(scored[0]))


def _pair(template: ChatTemplate, end_token: int | None, fields: dict[str, Any]) -> PreparedItem:
    question = question_of(fields)
    chosen, rejected = answer_of(question, fields["chosen"]), answer_of(question, fields["rejected"])
    if chosen == rejected:
        raise NotRendered("both answers are the same")
    texts = (
        tokenize_answer(template, end_token, question, chosen),
        tokenize_answer(template, end_token, question, rejected),
    )
    return PreparedItem.of(texts, question, chosen)


def answer_of(question: Conversation, answer: Any) -> Message:
    """Return the message of an answer, which is given as text or as messages. Raises NotRendered."""
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    messages = checked_messages(as_openai_messages(answer))
    if messages[-1]["role"] != "assistant":
        raise NotRendered("an answer's last message is not the assistant's")
    if len(messages) > 1 and messages[:-1] != question.messages:
        raise NotRendered("an answer's messages do not begin with those of the prompt")
    return messages[-1]


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


class PairRows(TextRows):
    """One split of prepared preference pairs, packed for one sequence length.

    Text 2p is the chosen answer of pair p, text 2p + 1 the rejected one. Raises UsageError if no pair fits into a row,
    RunError if the data is damaged.
    """

    def __init__(self, path: Path, split: str, sequence_length: int, vocab_size: int):
        super().__init__(path, split, sequence_length, "preference", vocab_size)
        arrays = load_file(self.file)
        self._tokens, self._start, self._answer_start = arrays["tokens"], arrays["start"], arrays["answer"]
        text_lengths = np.diff(self._start) - 1  # the last token of a text is only a target
        self._pack(text_lengths[0::2] + text_lengths[1::2])
        self.texts_per_row = 2 * max(len(row) for row in self.rows)

    @cached_property
    def scored_start(self) -> NDArray[np.int64]:
        return np.concatenate(([0], np.cumsum(np.diff(self._start) - self._answer_start)))

    def text(self, index: int) -> TokenizedText:
        part = slice(int(self._start[index]), int(self._start[index + 1]))
        return TokenizedText(self._tokens[part].astype(np.int64), int(self._answer_start[index]))

    def reference_texts(self, rows: Units) -> list[list[int]]:
        return [text_indices([row]) for row in rows]

    def chosen_tokens(self, rows: Units, with_question: bool) -> int:
        """Return the number of tokens of the chosen answers, or of these with their questions, without the first."""
        chosen = 2 * np.concatenate(rows)
        lengths = self._start[chosen + 1] - self._start[chosen]
        return int((lengths - (1 if with_question else self._answer_start[chosen])).sum())


def text_indices(rows: Units) -> list[int]:
    """Return the indices of the texts of rows of pairs: chosen, rejected, chosen, rejected, ..."""
    return [index for row in rows for pair in row.tolist() for index in (2 * pair, 2 * pair + 1)]
