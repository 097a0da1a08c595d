"""Questions with checkable answers: conversion of records to prompts, and their endless shuffled order.

A record has `prompt` (text or messages) and `answer`, the text that a reward compares with; for the reward `code`,
tests.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskside.align.preference_data import question_of
from deskside.align.prepared import Made, PreparedSplit, Spec, make_folder
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.renderer import NotRendered
from deskside.data.reading.shuffle import endless_shuffle
from deskside.utils.errors import UsageError


@dataclass(frozen=True)
class Question:
    """A question. prompt: the user's last message. tokens: the conversation up to the assistant's turn."""

    prompt: str
    answer: str
    tokens: tuple[int, ...]


def prepare_questions(spec: Spec, system: str | None, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `make_folder`. system: the message of questions without one."""
    return make_folder(spec, tokenizer, out, ("prompt", "answer"), partial(_question, system), _write)


def _question(system: str | None, template: ChatTemplate, end: int | None, fields: dict[str, Any]) -> Made:
    messages = question_of(fields["prompt"])
    if messages[-1]["role"] == "assistant":
        raise NotRendered("it ends with an answer")
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    answer = fields["answer"]
    if not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False)
    value = {"prompt": messages[-1]["content"], "answer": answer, "tokens": template.prompt(messages)}
    return Made.of(value, messages, answer)


def _write(folder: Path, split: str, questions: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    (folder / f"{split}.jsonl").write_text(lines, "utf-8")
    return f"{split}.jsonl", {"count": len(questions)}


class Questions(PreparedSplit):
    """One split. A row is one answer to a question: `group` consecutive rows are answers to the same question.

    Questions that leave less than `answer_tokens` in a row are left out; `left_out` counts them.
    """

    def __init__(
        self, path: Path, split: str, sequence_length: int, group: int, answer_tokens: int, vocabulary: int
    ):
        """Raises UsageError if no question fits, RunError if the data is damaged."""
        super().__init__(path, split, sequence_length, "questions", vocabulary)
        self.group, self.answer_tokens = group, answer_tokens
        text = self.file.read_text("utf-8")
        every = [
            Question(q["prompt"], q["answer"], tuple(q["tokens"]))
            for q in map(json.loads, text.split("\n")[:-1])
        ]
        self.questions = [q for q in every if len(q.tokens) + answer_tokens <= sequence_length]
        self.left_out = len(every) - len(self.questions)
        if not self.questions:
            shortest = min(len(q.tokens) for q in every)
            raise UsageError(
                f"batch.sequence_length: {sequence_length} tokens hold no question of the {split} split and an answer "
                f"of {answer_tokens}; the shortest needs {shortest + answer_tokens}"
            )
        self._shortest = min(len(q.tokens) for q in self.questions)

    @property
    def num_rows(self) -> int:
        return len(self.questions) * self.group

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a whole evaluation: one row per question."""
        return len(self.questions) * self.sequence_length

    def max_boundaries(self, rows: int) -> int:
        """Return the maximum number of answers and paddings in `rows` rows."""
        return rows * (self.sequence_length // self._shortest + 1)

    def at(self, seed: int, positions: NDArray[np.int64]) -> list[Question]:
        """Return the questions at these positions of their endless shuffled order."""
        found = endless_shuffle(positions, len(self.questions), seed, self.sequence_length)
        return [self.questions[n] for n in found.tolist()]
