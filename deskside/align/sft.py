"""Supervised fine-tuning: next-token prediction on the assistant's turns.

The loss is that of pretraining. The data differs (`data.chat`): tokens outside the assistant's turns have target -100,
and conversations in one row cannot attend to each other. The evaluation is the loss per assistant token on held-out
conversations. Sample answers are generated before the first step and at the end.
"""

from pathlib import Path
from typing import cast

from deskside.align.samples import AlignObjective
from deskside.config.run import RunConfig
from deskside.data.chat.prepare_chat import describe_data
from deskside.data.reading.rows import PackedDataset
from deskside.train.next_token import NextToken, language_metrics
from deskside.train.objective import Evaluation, Session
from deskside.utils.errors import UsageError
from deskside.utils.format import plural


class Sft(AlignObjective, NextToken):
    """Supervised fine-tuning; implements `train.objective.Objective`."""

    name, command, evaluate_first = "sft", "deskside sft", True

    def __init__(self) -> None:
        self.datasets: list[PackedDataset] = []

    def open(self, config: RunConfig, path: Path, split: str, sequence_length: int) -> PackedDataset:
        dataset = super().open(config, path, split, sequence_length)
        if dataset.index.chat is None:
            raise UsageError(
                f"data.path: {path} holds text, not conversations; give conversations with --data"
            )
        self.datasets.append(dataset)
        self.folder = dataset.directory
        return dataset

    def begin(self, session: Session) -> None:
        describe_data(self.datasets[0].index, session.say)
        for dataset in self.datasets:
            truncation, length = dataset.truncation, dataset.sequence_length
            if truncation.shortened or truncation.left_out:
                session.say(
                    f"{dataset.split}: {plural(truncation.shortened, 'conversation')} truncated to a row of {length} "
                    f"tokens; {truncation.left_out:,} left out, because nothing in the first {length} tokens is learned"
                )
        self.sample_before(session)

    def evaluate(self, session: Session, max_tokens: int | None) -> Evaluation:
        dataset = cast(PackedDataset, session.validation)
        if max_tokens is not None:
            # `max_tokens` is a number of scored tokens, but `bits_per_byte` counts all tokens of a row.
            max_tokens = int(
                max_tokens * (dataset.num_rows * dataset.sequence_length / max(1, dataset.num_tokens))
            )
        result = self.bits_per_byte(session, dataset, max_tokens)
        loss = result.target_nats / result.targets
        summary = {
            "val_loss": loss,
            "val_bpb": result.bpb,
            "val_tokens": result.targets,
            "val_bytes": result.bytes,
            "gzip_bpb": None,
            "unigram_bpb": None,
            "val_languages": result.languages_as_dict(),
        }
        message = f"{loss:.4f} nats per assistant token, on {result.targets:,} held-out tokens"
        metrics = {"val_bpb": result.bpb, "val_loss": loss, **language_metrics(result)}
        return Evaluation(metrics, summary, message, result.targets)
