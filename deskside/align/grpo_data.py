"""Questions with checkable answers: conversion of records to prompts, and their endless shuffled order.

A record has `prompt` (text or messages) and `answer`, against which a reward checks the model's answer. It is the
correct answer, or tests for the reward `code`; with a reward server, it may be missing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deskside.align.preference_data import question_of
from deskside.align.prepared import FolderSpec, PreparedItem, PreparedSplit, prepare_folder
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import NotRendered
from deskside.data.reading.shuffle import endless_shuffle
from deskside.utils.errors import UsageError
from deskside.utils.parsing import json_value


@dataclass(frozen=True)
class Question:
    """A question. prompt: the text of the last message. tokens: the conversation up to where the answer begins.

    columns: further fields of the record, for the reward.
    """

    prompt: str
    answer: str
    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class QuestionForm:
    """The options of the conversion of records to questions.

    system: the system message of questions that have none, or None. columns: further fields that every record must
    have. needs_answer: False if a record may lack the field `answer`, which is empty then. tools: JSON text of the
    functions that the model may call, a list, or "".
    """

    system: str | None = None
    columns: tuple[str, ...] = ()
    needs_answer: bool = True
    tools: str = ""

    def key(self) -> tuple[tuple[str, Any], ...]:
        """Return the options of a `FolderSpec`."""
        return tuple(vars(self).items())


def prepare_questions(spec: FolderSpec, form: QuestionForm, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the folder `out` and return its index; see `prepare_folder`."""
    required = ("prompt", *(["answer"] if form.needs_answer else []), *form.columns)
    optional = () if form.needs_answer else ("answer",)
    return prepare_folder(spec, tokenizer, out, required, partial(_question, form), _write, optional)


def _question(
    form: QuestionForm, template: ChatTemplate, end_token: int | None, fields: dict[str, Any]
) -> PreparedItem:
    question = question_of(fields)
    if question.messages[-1]["role"] == "assistant":
        raise NotRendered("the prompt ends with an answer")
    if form.system is not None and question.messages[0]["role"] != "system":
        question = question.with_messages([{"role": "system", "content": form.system}, *question.messages])
    if form.tools:
        if question.tools:
            raise NotRendered("the record has tools of its own beside those of --align.tools")
        question = replace(question, tools=json_value(form.tools))
    answer = fields.get("answer", "")
    if not isinstance(answer, str):
        answer = json.dumps(answer, ensure_ascii=False)
    prompt = question.messages[-1]["content"]
    columns = {name: fields[name] for name in form.columns}
    value = {"prompt": prompt, "answer": answer, "tokens": template.prompt(question), "columns": columns}
    return PreparedItem.of(value, question, {"role": "assistant", "content": answer})


def _write(folder: Path, split: str, questions: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
    (folder / f"{split}.jsonl").write_text(lines, "utf-8")
    return f"{split}.jsonl", {"count": len(questions)}


class Questions(PreparedSplit):
    """One split of prepared questions. A row is one answer, and `group` consecutive rows answer the same question.

    Questions that leave less than `answer_tokens` in a row are left out; `left_out` counts them. Raises UsageError if
    no question fits, RunError if the data is damaged. positions: of the model, the limit of `sequence_length`.
    """

    def __init__(
        self,
        path: Path,
        split: str,
        sequence_length: int,
        group: int,
        answer_tokens: int,
        vocab_size: int,
        positions: int | None = None,
    ):
        super().__init__(path, split, sequence_length, "questions", vocab_size)
        self.group, self.answer_tokens = group, answer_tokens
        records = [json_value(line) for line in self.file.read_text("utf-8").split("\n")[:-1]]
        all_questions = [
            Question(r["prompt"], r["answer"], tuple(r["tokens"]), r["columns"]) for r in records
        ]
        self.questions = [q for q in all_questions if len(q.tokens) + answer_tokens <= sequence_length]
        self.left_out = len(all_questions) - len(self.questions)
        if not self.questions:
            lengths = [len(q.tokens) for q in all_questions]
            remedy = f"use --batch.sequence-length {min(lengths) + answer_tokens} or more"
            if positions is not None and min(lengths) + answer_tokens > positions:
                room = positions - (max(lengths) if max(lengths) < positions else min(lengths))
                shorter = f"--align.answer-tokens {room} or less" if room > 0 else "shorter questions"
                remedy = f"the model has {positions} positions, so use {shorter}"
            raise UsageError(
                f"batch.sequence_length: no question of the {split} split fits into {sequence_length} tokens with an "
                f"answer of {answer_tokens}; {remedy}"
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
        """Return an upper bound on the number of answers and padding segments in `rows` rows."""
        return rows * (self.sequence_length // self._shortest + 1)

    def at(self, seed: int, positions: NDArray[np.int64]) -> list[Question]:
        """Return the questions at these positions of their endless shuffled order."""
        indices = endless_shuffle(positions, len(self.questions), seed, self.sequence_length)
        return [self.questions[i] for i in indices.tolist()]
