"""What a model said while it learned: one line for each answer in rollouts.jsonl, and a page to read, rollouts.md.

An answer's `position` is its place in the endless order of answers; the position of a step's first answer follows from
the checkpoint, so a resumed run cuts away what it will say again, and finds what its next step learns from if that was
said before the checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.align.grpo_data import Question
from deskside.align.sampler import Sampled
from deskside.utils.errors import RunError
from deskside.utils.files import append_line, sync, write_atomically
from deskside.utils.parsing import json_value

SHOWN = 2  # questions of each round that the page shows
HEADING = "## Answers from "


@dataclass(frozen=True)
class Rollout:
    """One sampled answer, judged."""

    position: int
    question: Question
    sampled: Sampled
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
        }
        if with_tokens:
            row["token_ids"] = list(self.sampled.tokens)
            row["logprobs"] = list(self.sampled.logprobs)
        return row


class RolloutLog:
    """The two files of one process. with_tokens: lines hold what a resumed run needs to learn from them again."""

    def __init__(self, folder: Path, rank: int, with_tokens: bool):
        suffix = f"-{rank}" if rank else ""
        self.lines, self.page = folder / f"rollouts{suffix}.jsonl", folder / f"rollouts{suffix}.md"
        self.with_tokens = with_tokens

    def cut(self, position: int) -> None:
        """Forget answers from this position on. Raises RunError naming a damaged line."""
        if self.lines.exists():
            kept = [
                json.dumps(row, ensure_ascii=False) + "\n"
                for row in self.read()
                if row["position"] < position
            ]
            write_atomically(self.lines, "".join(kept))
        if self.page.exists():
            head, *rounds = self.page.read_text("utf-8").split(HEADING)
            kept = [part for part in rounds if int(part.split(maxsplit=1)[0].replace(",", "")) < position]
            write_atomically(self.page, HEADING.join([head, *kept]))

    def read(self, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """Lines of positions from `first` up to `last`; a half-written one at the end is skipped."""
        rows = []
        if not self.lines.exists():
            return []
        with self.lines.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    continue
                try:
                    row = json_value(line)
                    wanted = first <= row["position"] and (last is None or row["position"] < last)
                except (ValueError, KeyError, TypeError):
                    raise RunError(
                        f"{self.lines}: line {number} is damaged; delete that line and resume"
                    ) from None
                if wanted:
                    rows.append(row)
        return rows

    def add(self, rollouts: Sequence[Rollout], group: int) -> None:
        """A round of sampling. On the disk when this returns: a later checkpoint counts on it."""
        text = "\n".join(json.dumps(r.to_json(self.with_tokens), ensure_ascii=False) for r in rollouts)
        append_line(self.lines, text)
        append_line(self.page, self._round(rollouts, group))
        if self.with_tokens:
            sync(self.lines)

    def _round(self, rollouts: Sequence[Rollout], group: int) -> str:
        mean = sum(r.reward for r in rollouts) / len(rollouts)
        parts = [
            f"{HEADING}{rollouts[0].position:,} on\n",
            f"{len(rollouts)} answers, mean reward {mean:.3f}\n",
        ]
        for at in range(0, min(len(rollouts), SHOWN * group), group):
            answers = sorted(rollouts[at : at + group], key=lambda r: -r.reward)
            parts.append(
                f"**{_plain(answers[0].question.prompt)}** (wanted: {_plain(answers[0].question.answer)})\n"
            )
            shown = answers if len(answers) < 3 else [answers[0], answers[-1]]
            for answer in shown:
                end = "" if answer.sampled.ended else ", cut off"
                parts.append(f"- reward {answer.reward:g}{end}: {_plain(answer.text)}")
            parts.append("")
        return "\n".join(parts)


def _plain(text: str) -> str:
    """On one line, without what Markdown would take for its own."""
    line = " ".join(text.split())[:400].replace("\\", "\\\\")
    for mark in "*_`#<>[]":
        line = line.replace(mark, f"\\{mark}")
    return line
