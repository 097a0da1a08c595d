"""Supervised fine-tuning: next-token prediction on the assistant's turns.

The loss is that of pretraining. The data differs (`data.chat`: tokens outside the assistant's turns have target
-100, and conversations in one row cannot attend to each other), and so does the evaluation: the loss per assistant
token on held-out conversations, before the first step and at the end, with sample answers.
"""

import math
import time
from pathlib import Path
from typing import Any, cast

from deskside.config.run import RunConfig
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.prepare_chat import SAMPLES_FILE, told
from deskside.data.chat.renderer import NotRendered
from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import events
from deskside.engine.sampling import GREEDY
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.objective import Evaluation, NextToken, Session
from deskside.train.prepare.preflight import SAMPLE_SHARE
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import Unreadable, json_value

ANSWER_TOKENS = 96
BEFORE = "samples_before.json"


class Sft(NextToken):
    """The SFT objective; see the module."""

    name, command, measured_first = "sft", "deskside sft", True

    def __init__(self) -> None:
        self.opened: list[PackedDataset] = []
        self.sampling_seconds = 0.0

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
        dataset = super().open(config, path, split, sequence_length)
        if dataset.index.chat is None:
            raise UsageError(f"data.path: {path} holds text, not conversations; give those with --data")
        self.opened.append(dataset)
        return dataset

    def begin(self, session: Session) -> None:
        told(self.opened[0].index, session.say)
        for dataset in self.opened:
            cut, length = dataset.cut, dataset.sequence_length
            if cut.shortened or cut.nothing:
                session.say(
                    f"{dataset.split}: {cut.shortened:,} conversations are longer than a row of {length} tokens "
                    f"and end there; {cut.nothing:,} are left out, because nobody answers in their first {length}"
                )
        began = time.perf_counter()
        if not session.resumed and session.world.first and not session.world.sharded:
            with session.precision.high_precision():
                answers = self._answers(session, session.model)
            session.run.write_json(BEFORE, {"samples": answers})
        session.world.barrier()
        self.sampling_seconds = time.perf_counter() - began

    def samples_seconds(self) -> float:
        return self.sampling_seconds

    def measure(self, session: Session, max_tokens: int | None) -> Evaluation:
        dataset = cast(PackedDataset, session.validation)
        # `evaluate` counts all tokens of a row, not only the scored ones.
        share = dataset.num_rows * dataset.sequence_length / max(1, dataset.num_tokens)
        found = self.evaluate(session, dataset, None if max_tokens is None else int(max_tokens * share))
        loss = found.target_nats / found.targets
        summary = {
            "val_loss": loss,
            "val_bpb": found.bpb,
            "val_tokens": found.targets,
            "val_bytes": found.bytes,
            "gzip_bpb": None,
            "unigram_bpb": None,
        }
        said = f"{loss:.4f} nats per token that an assistant says, on {found.targets:,} held-out tokens"
        return Evaluation({"val_bpb": found.bpb, "val_loss": loss}, summary, said, found.targets)

    def samples(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        before: list[dict[str, Any]] = []
        if (session.run.path / BEFORE).exists():
            before = session.run.read_json(BEFORE)["samples"]
        # The merged model is on the host; the trained model gives the same answers on its device.
        after = self._answers(session, session.model if is_adapted(session.model) else model)
        for sample, earlier in zip(after, before, strict=False):
            sample["before"] = earlier["text"]
        return after

    def _answers(self, session: Session, model: Transformer) -> list[dict[str, Any]]:
        """Return greedy answers to the last question of some held-out conversations."""
        path = self.opened[0].directory / SAMPLES_FILE
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
    for event in events(
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
