"""Sample answers to a few held-out questions, before and after the run."""

import math
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from deskside.config.run import RunConfig
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import Conversation, NotRendered, message_text
from deskside.data.chat.prepare_chat import SAMPLES_FILE
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import generate_events
from deskside.engine.sampling import GREEDY
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.objective import Session
from deskside.train.time_budget import SAMPLE_SHARE
from deskside.utils.errors import RunError
from deskside.utils.parsing import Unreadable, json_value

ANSWER_TOKENS = 96
BEFORE_FILE = "samples_before.json"


class AlignObjective:
    """Base class of SFT, DPO, KTO and GRPO: samples answers to held-out questions before and after the run."""

    reads_weights = False
    folder: Path  # the prepared data with its samples.json; set by `open`
    _sampling_seconds = 0.0

    def set_progress(self, progress: float) -> None:
        pass

    def pass_state(self) -> Hashable:
        return None

    def sampling_seconds(self) -> float:
        return self._sampling_seconds

    def extra_step_seconds(self) -> float:
        return 0.0

    def reserved_bytes(self, config: RunConfig, model: Transformer) -> int:
        return 0

    def sample_before(self, session: Session) -> None:
        """Save the initial model's answers in the run directory and time the sampling. Not if resumed or sharded."""
        began = time.perf_counter()
        if not session.resumed and session.world.is_rank_zero and not session.world.sharded:
            with session.precision.high_precision():
                samples = self._answers(session, session.model)
            session.run.write_json(BEFORE_FILE, {"samples": samples})
        session.world.barrier()
        self._sampling_seconds = time.perf_counter() - began

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        """Return the finished model's answers; the entry "before", if any, has the initial model's answer."""
        # With adapters, `model` is merged, on the host; the adapted model gives the same answers, on the device.
        samples = self._answers(session, session.model if is_adapted(session.model) else model)
        before = (
            session.run.read_json(BEFORE_FILE)["samples"] if (session.run.path / BEFORE_FILE).exists() else []
        )
        for sample, earlier in zip(samples, before, strict=False):
            sample["before"] = earlier["text"]
        return samples

    def _answers(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        path = self.folder / SAMPLES_FILE
        conversations = read_conversations(path) if path.is_file() else []
        return sample_answers(model, session.run, conversations, session.budget.share(SAMPLE_SHARE))


def sample_answers(
    model: Transformer,
    run: RunDirectory,
    conversations: list[Conversation],
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Sample answers to conversations that end with a reference answer.

    Returns {"prompt", "text", "reference"} for each; conversations that are too long, or that the template refuses, are
    left out. Sampling stops after `seconds`, which may truncate the answers.
    """
    if not conversations:
        return []
    template, tokenizer = ChatTemplate(run.path), load_tokenizer(run.tokenizer)
    positions = model.config.max_position_embeddings
    max_new_tokens = min(ANSWER_TOKENS, positions // 2)
    kept, prompts = [], []
    for conversation in conversations:
        try:
            tokens = template.prompt(conversation.first(-1))
        except NotRendered:  # templates may refuse a conversation without its last message
            continue
        if len(tokens) <= positions - max_new_tokens:
            kept.append(conversation.messages)
            prompts.append(tokens)
    if not prompts:
        return []
    ends = run.read_json("generation_config.json")["eos_token_id"]
    generated: list[list[int]] = [[] for _ in prompts]
    deadline = time.perf_counter() + seconds
    for event in generate_events(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=GREEDY,
        eos_tokens=tuple(ends) if isinstance(ends, list) else (ends,),
        seed=0,
    ):
        if event.token is not None:
            generated[event.request].append(event.token)
        if time.perf_counter() > deadline:
            break
    return [
        {
            "prompt": "\n".join(f"{m['role']}: {message_text(m)}" for m in messages[:-1]),
            "text": tokenizer.decode(tokens, skip_special_tokens=True),
            "reference": message_text(messages[-1]),
        }
        for messages, tokens in zip(kept, generated, strict=True)
    ]


def read_conversations(path: Path) -> list[Conversation]:
    """Return the conversations of a samples.json; earlier versions wrote only their messages.

    Raises RunError if the file is damaged.
    """
    try:
        conversations = json_value(path.read_bytes())
    except (OSError, Unreadable) as error:
        raise RunError(f"{path}: cannot be read ({error}); prepare the data again") from None
    if not isinstance(conversations, list):
        raise RunError(f"{path}: does not contain a list of conversations; prepare the data again")
    return [Conversation(**c) if isinstance(c, dict) else Conversation(c) for c in conversations]
