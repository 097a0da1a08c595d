"""Logs of sampled answers: one line per answer in rollouts.jsonl, and a readable page, rollouts.md.

An answer's `position` is its index among all answers of the run. A checkpoint determines the position of the next
step's first answer. A resumed run therefore removes the answers that it will sample again, and reads those that its
next step needs if they were sampled before the checkpoint. It may have another number of processes than before, so it
reads the files of all.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.align.grpo_data import Question
from deskside.align.sampler import SampledAnswer
from deskside.utils.errors import RunError
from deskside.utils.files import append_line, sync, write_atomically
from deskside.utils.parsing import json_value

SHOWN_QUESTIONS = 2  # per round of sampling in rollouts.md
HEADING = "## Answers from "


@dataclass(frozen=True)
class Rollout:
    """One sampled answer with its reward. position: see the module docstring. text: the decoded answer."""

    position: int
    question: Question
    sampled: SampledAnswer
    text: str
    reward: float
    advantage: float

    def to_json(self, with_tokens: bool) -> dict[str, Any]:
        row: dict[str, Any] = {
            "position": self.position,
            "prompt": self.question.prompt,
            "answer": self.question.answer,
            "text": self.text,
            "reward": self.reward,
            "advantage": self.advantage,
            "tokens": len(self.sampled.tokens),
            "ended": self.sampled.ended,
            "tool_calls": self.sampled.tool_calls,
            "tool_failures": self.sampled.tool_failures,
        }
        if with_tokens:
            row["token_ids"] = list(self.sampled.tokens)
            row["logprobs"] = list(self.sampled.logprobs)
            row["own"] = None if self.sampled.own is None else list(self.sampled.own)
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any], question: Question) -> "Rollout":
        """Return the answer that `to_json` wrote with its tokens."""
        own = row.get("own")
        sampled = SampledAnswer(
            tuple(row["token_ids"]),
            tuple(row["logprobs"]),
            row["ended"],
            None if own is None else tuple(own),
            row["tool_calls"],
            row["tool_failures"],
        )
        return cls(row["position"], question, sampled, row["text"], row["reward"], row["advantage"])


class RolloutLog:
    """The two log files of one process.

    with_tokens: log token ids and log-probabilities too, which a run that is resumed within a round trains on.
    processes: their number.
    """

    def __init__(self, folder: Path, rank: int, with_tokens: bool, processes: int = 1):
        self.folder, self.with_tokens = folder, with_tokens
        self.lines, self.page = _files(folder, rank)
        self.rank, self.processes = rank, processes

    def cut(self, position: int) -> None:
        """Remove the answers from this position on from both files. Raises RunError if a line is damaged.

        The first process also does this for processes that an earlier part of the run had.
        """
        gone = [rank for rank in _logged_ranks(self.folder) if rank >= self.processes and self.rank == 0]
        for lines, page in (_files(self.folder, rank) for rank in (self.rank, *gone)):
            if lines.exists():
                rows = [row for row in _rows(lines) if row["position"] < position]
                kept = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
                write_atomically(lines, "".join(kept))
            if page.exists():
                head, *rounds = page.read_text("utf-8").split(HEADING)
                kept = [part for part in rounds if int(part.split(maxsplit=1)[0].replace(",", "")) < position]
                write_atomically(page, HEADING.join([head, *kept]))

    def read(self, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """Return the answers with first <= position < last that any process has logged.

        A half-written last line is skipped. Raises RunError if a line is damaged.
        """
        return [
            row
            for rank in _logged_ranks(self.folder)
            for row in _rows(_files(self.folder, rank)[0])
            if first <= row["position"] and (last is None or row["position"] < last)
        ]

    def add(self, rollouts: Sequence[Rollout], group: int) -> None:
        """Append a round of sampling to both files. With `with_tokens`, the lines are synced to the disk."""
        text = "\n".join(json.dumps(r.to_json(self.with_tokens), ensure_ascii=False) for r in rollouts)
        append_line(self.lines, text)
        append_line(self.page, self._page_section(rollouts, group))
        if self.with_tokens:
            sync(self.lines)

    def _page_section(self, rollouts: Sequence[Rollout], group: int) -> str:
        """Return a round in Markdown: its mean reward, and the best and the worst answer to its first questions."""
        mean = sum(r.reward for r in rollouts) / len(rollouts)
        parts = [
            f"{HEADING}{rollouts[0].position:,} onwards\n",
            f"{len(rollouts)} answers, mean reward {mean:.3f}\n",
        ]
        for start in range(0, min(len(rollouts), SHOWN_QUESTIONS * group), group):
            answers = sorted(rollouts[start : start + group], key=lambda r: -r.reward)
            parts.append(
                f"**{_plain(answers[0].question.prompt)}** (wanted: {_plain(answers[0].question.answer)})\n"
            )
            shown = answers if len(answers) < 3 else [answers[0], answers[-1]]
            for answer in shown:
                end = "" if answer.sampled.ended else ", cut off"
                parts.append(f"- reward {answer.reward:g}{end}: {_plain(answer.text)}")
            parts.append("")
        return "\n".join(parts)


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    """Return the paths of the two files of a process."""
    suffix = f"-{rank}" if rank else ""
    return folder / f"rollouts{suffix}.jsonl", folder / f"rollouts{suffix}.md"


def _logged_ranks(folder: Path) -> list[int]:
    """Return the ranks of the processes whose answers are in a folder."""
    names = (re.fullmatch(r"rollouts(?:-(\d+))?\.jsonl", path.name) for path in folder.iterdir())
    return sorted(int(name[1] or 0) for name in names if name is not None)


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, without a half-written last one. Raises RunError if a line is damaged."""
    with lines.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                row = json_value(line)
                is_whole = isinstance(row["position"], int)
            except (ValueError, KeyError, TypeError):
                is_whole = False
            if not is_whole:
                raise RunError(f"{lines}: line {number} is damaged; delete that line and resume")
            yield row


def _plain(text: str) -> str:
    """Return the first 400 characters of a text on one line, with Markdown escaped."""
    line = " ".join(text.split())[:400].replace("\\", "\\\\")
    for mark in "*_`#<>[]":
        line = line.replace(mark, f"\\{mark}")
    return line
