"""Sample answers to a few held-out questions, before and after the run."""

import time
from pathlib import Path
from typing import Any

from deskside.align.sft import BEFORE, answers, read_questions
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.train.objective import Session
from deskside.train.prepare.preflight import SAMPLE_SHARE


def keep_before(session: Session, questions: Path) -> float:
    """Sample from the starting model, and return the seconds that it took.

    questions: a file of conversations, each with an answer at its end.
    """
    began = time.perf_counter()
    if session.world.first:
        with session.precision.high_precision():
            conversations = read_questions(questions)
            found = answers(session.model, session.run, conversations, session.budget.share(SAMPLE_SHARE))
        session.run.write_json(BEFORE, {"samples": found})
    session.world.barrier()
    return time.perf_counter() - began


def with_before(session: Session, model: Transformer, questions: Path) -> list[dict[str, Any]]:
    """Sample from the finished model; "before" holds the starting model's answers."""
    # The merged model is on the host; the trained model gives the same answers on its device.
    asked = session.model if is_adapted(session.model) else model
    conversations = read_questions(questions)
    found = answers(asked, session.run, conversations, session.budget.share(SAMPLE_SHARE))
    before = session.run.read_json(BEFORE)["samples"] if (session.run.path / BEFORE).exists() else []
    for sample, earlier in zip(found, before, strict=False):
        sample["before"] = earlier["text"]
    return found
