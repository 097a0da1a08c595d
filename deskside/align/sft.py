"""Supervised fine-tuning: next-token prediction on the assistant's turns.

The loss is that of pretraining. The data differs (`data.chat`: tokens outside the assistant's turns have target
-100, and conversations in one row cannot attend to each other), and so does the evaluation: the loss per assistant
token on held-out conversations, before the first step and at the end, with sample answers.
"""

from pathlib import Path
from typing import cast

from deskside.align.samples import SampledAnswers
from deskside.config.run import RunConfig
from deskside.data.chat.prepare_chat import describe_data
from deskside.data.reading.rows import PackedDataset
from deskside.train.objective import Evaluation, NextToken, Session
from deskside.utils.errors import UsageError


class Sft(SampledAnswers, NextToken):
    """The SFT objective; see the module."""

    name, command, measured_first = "sft", "deskside sft", True

    def __init__(self) -> None:
        self.opened: list[PackedDataset] = []

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
        dataset = super().open(config, path, split, sequence_length)
        if dataset.index.chat is None:
            raise UsageError(f"data.path: {path} holds text, not conversations; give those with --data")
        self.opened.append(dataset)
        self.folder = dataset.directory
        return dataset

    def begin(self, session: Session) -> None:
        describe_data(self.opened[0].index, session.say)
        for dataset in self.opened:
            truncation, length = dataset.truncation, dataset.sequence_length
            if truncation.shortened or truncation.left_out:
                session.say(
                    f"{dataset.split}: {truncation.shortened:,} conversations are longer than a row of {length} tokens "
                    f"and end there; {truncation.left_out:,} are left out, because nobody answers in their first "
                    f"{length}"
                )
        self.sample_before(session)

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
