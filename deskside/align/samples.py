"""What the model says to a few held-out questions, before the run and after it."""

import json
from pathlib import Path
from typing import Any

from deskside.align.sft import BEFORE, answers
from deskside.model.transformer import Transformer
from deskside.ops.lora import is_adapted
from deskside.train.objective import Session


def keep_before(session: Session, questions: Path) -> None:
    """Ask the model that the run starts with. questions: a file of conversations, each with an answer at its end."""
    if session.world.first:
        with session.precision.plain():
            found = answers(session.model, session.run, json.loads(questions.read_text("utf-8")))
        session.run.write_json(BEFORE, {"samples": found})
    session.world.barrier()


def with_before(session: Session, model: Transformer, questions: Path) -> list[dict[str, Any]]:
    """Ask the finished model; "before" is what the first one said."""
    # Merged adapters lie on the host; the model that was trained says the same, on its device.
    asked = session.model if is_adapted(session.model) else model
    found = answers(asked, session.run, json.loads(questions.read_text("utf-8")))
    before = session.run.read_json(BEFORE)["samples"] if (session.run.path / BEFORE).exists() else []
    for sample, earlier in zip(found, before, strict=False):
        sample["before"] = earlier["text"]
    return found
