"""Sample answers to a few held-out questions, before and after the run."""

import math
import time
from pathlib import Path
from typing import Any

from deskside.config.run import RunConfig
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.prepare_chat import SAMPLES_FILE
from deskside.data.chat.renderer import NotRendered
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import generate_events
from deskside.engine.sampling import GREEDY
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.objective import Session
from deskside.train.prepare.preflight import SAMPLE_SHARE
from deskside.utils.errors import RunError
from deskside.utils.parsing import Unreadable, json_value

ANSWER_TOKENS = 96
BEFORE = "samples_before.json"


class SampledAnswers:
    """A base class of objectives that sample answers to held-out questions before and after the run."""

    folder: Path  # the prepared data, with a file of conversations that end with an answer; set by `open`
    sampling_seconds = 0.0

    def samples_seconds(self) -> float:
        return self.sampling_seconds

    def seconds_beside_step(self) -> float:
        return 0.0

    def keeps_bytes(self, config: RunConfig, model: Transformer) -> int:
        return 0

    def sample_before(self, session: Session) -> None:
        """Save the starting model's answers in the run, unless it is resumed, and time them."""
        began = time.perf_counter()
        if not session.resumed and session.world.is_rank_zero and not session.world.sharded:
            with session.precision.high_precision():
                found = self._answers(session, session.model)
            session.run.write_json(BEFORE, {"samples": found})
        session.world.barrier()
        self.sampling_seconds = time.perf_counter() - began

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        """Return the finished model's answers; "before" holds those of the starting model."""
        # The merged model is on the host; the trained model gives the same answers on its device.
        found = self._answers(session, session.model if is_adapted(session.model) else model)
        before = session.run.read_json(BEFORE)["samples"] if (session.run.path / BEFORE).exists() else []
        for sample, earlier in zip(found, before, strict=False):
            sample["before"] = earlier["text"]
        return found

    def _answers(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        path = self.folder / SAMPLES_FILE
        conversations = read_questions(path) if path.is_file() else []
        return answers(model, session.run, conversations, session.budget.share(SAMPLE_SHARE))


def answers(
    model: Transformer,
    run: RunDirectory,
    conversations: list[list[dict[str, str]]],
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Sample a replacement for each conversation's last message, which is returned as "reference".

    Answers are cut off after the given number of seconds.
    """
    if not conversations:
        return []
    template, tokenizer = ChatTemplate(run.path), load_tokenizer(run.tokenizer)
    positions = model.config.max_position_embeddings
    longest = min(ANSWER_TOKENS, positions // 2)
    asked, prompts = [], []
    for messages in conversations:
        try:
            tokens = template.prompt(messages[:-1])
        except NotRendered:  # a template may check the last message
            continue
        if len(tokens) <= positions - longest:
            asked.append(messages)
            prompts.append(tokens)
    if not prompts:
        return []
    ends = run.read_json("generation_config.json")["eos_token_id"]
    said: list[list[int]] = [[] for _ in prompts]
    until = time.perf_counter() + seconds
    for event in generate_events(
        model,
        prompts,
        max_new_tokens=longest,
        sampling=GREEDY,
        eos_tokens=tuple(ends) if isinstance(ends, list) else (ends,),
        seed=0,
    ):
        if event.token is not None:
            said[event.request].append(event.token)
        if time.perf_counter() > until:
            break
    return [
        {
            "prompt": "\n".join(f"{m['role']}: {m['content']}" for m in messages[:-1]),
            "text": tokenizer.decode(tokens, skip_special_tokens=True),
            "reference": messages[-1]["content"],
        }
        for messages, tokens in zip(asked, said, strict=True)
    ]


def read_questions(path: Path) -> list[Any]:
    """Return the held-out conversations that a run samples answers to. Raises RunError if the file is damaged."""
    try:
        found = json_value(path.read_bytes())
    except (OSError, Unreadable) as error:
        raise RunError(f"{path}: cannot be read ({error}); prepare the data again") from None
    if not isinstance(found, list):
        raise RunError(f"{path}: does not hold a list of conversations; prepare the data again")
    return found
