"""Evaluate a task on a model."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deskside.data.corpus.sources import BadInputLog
from deskside.evaluate.generated import judge, write
from deskside.evaluate.items import Examples, Item, limited, read
from deskside.evaluate.likelihood import Encoder, Likelihood, likelihoods
from deskside.evaluate.scoring import centred, mean_centred, wilson
from deskside.evaluate.tasks import Choice, CompletionTask, Generated, Schema, SelectedTask
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

CORE_TASKS = 22  # in the paper


@dataclass(frozen=True)
class Subject:
    """The model that is evaluated, and how text becomes its tokens. chat: contexts are a user's messages."""

    model: Transformer
    tokenizer: Tokenizer
    encoder: Encoder
    eos_tokens: Collection[int]
    batch_tokens: int
    chat: bool = False


@dataclass(frozen=True)
class TaskResult:
    """right of n items. `more`: further numbers of this kind of task. records: one for each item, for a file.

    damaged: reasons and places of records that were left out, as BadInputLog gives them.
    """

    chosen: SelectedTask
    right: int
    n: int
    seconds: float
    more: dict[str, Any]
    damaged: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """Share of correct items."""
        return self.right / self.n

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON; low and high are a 95 % interval."""
        task = self.chosen.task
        low, high = wilson(self.right, self.n)
        return {
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "n": self.n,
            "centred": centred(self.accuracy, task.chance),
            "chance": task.chance,
            "kind": task.kind,
            "shots": self.chosen.shots,
            **self.more,
            "damaged": sum(reason["count"] for reason in self.damaged.values()),
            "seconds": round(self.seconds, 3),
            "source": self.chosen.source,
        }


@dataclass(frozen=True)
class Core:
    """Mean of the centered accuracies of the evaluated CORE tasks, with a 95 % interval."""

    value: float
    low: float
    high: float
    tasks: tuple[str, ...]


def core(results: Sequence[TaskResult]) -> Core | None:
    """Return the CORE metric of the tasks that belong to it; None without any."""
    members = [result for result in results if result.chosen.core]
    if not members:
        return None
    value, low, high = mean_centred([(r.accuracy, r.n, r.chosen.task.chance) for r in members])
    return Core(value, low, high, tuple(r.chosen.name for r in members))


class Prepared:
    """A task with its items, their examples, and the damaged records of its data.

    Raises UsageError for no item, or too few for the examples.
    """

    def __init__(self, chosen: SelectedTask, chat: bool = False) -> None:
        self.chosen, self.bad = chosen, BadInputLog()
        self.items = read(chosen, self.bad, chat=chat)
        self.examples = Examples(chosen, self.items)


def evaluate(
    subject: Subject,
    prepared: Prepared,
    *,
    limit: int | None = None,
    tick: Callable[[int], object] | None = None,
) -> TaskResult:
    """Evaluate a task on its items. `tick` is called with the number of answers that are done.

    Raises UsageError for an answer that the model cannot hold, RunError for numbers that are not finite and for code
    that cannot be locked in.
    """
    begin = time.monotonic()
    chosen, items = prepared.chosen, prepared.items
    numbers = limited(items, limit, chosen.task.spread)
    taken = [items[number] for number in numbers]
    before = [prepared.examples.before(number) for number in numbers]
    more: dict[str, Any] = {}
    if isinstance(chosen.task, Generated):
        records = _generated(subject, chosen.task, taken, before, tick)
    else:
        records, more = _likely(subject, chosen.task, taken, before, tick)
    right = sum(record["right"] for record in records)
    records = [
        {"task": chosen.name, "index": number, "origin": item.origin, **record}
        for record, number, item in zip(records, numbers, taken, strict=True)
    ]
    seconds = time.monotonic() - begin
    return TaskResult(chosen, right, len(taken), seconds, more, prepared.bad.as_dict(), records)


def answers_of(prepared: Prepared, limit: int | None) -> int:
    """Return how many answers `evaluate` will count, for a progress bar."""
    chosen, items = prepared.chosen, prepared.items
    taken = limited(items, limit, chosen.task.spread)
    if isinstance(chosen.task, Generated):
        return len(taken)
    return sum(max(len(items[n].contexts), len(items[n].answers)) for n in taken)


def _likely(
    subject: Subject,
    task: Choice | Schema | CompletionTask,
    items: Sequence[Item],
    before: Sequence[str],
    tick: Callable[[int], object] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a record for each item, judged by log-likelihood, and further numbers of all of them."""
    texts = []
    for item, shown in zip(items, before, strict=True):
        for context, continuation in item.pairs(task, shown):
            # In a chat the answer begins a turn, and so has no space before it.
            texts.append((context, continuation.lstrip() if subject.chat else continuation))
    pairs = subject.encoder.pairs(texts)
    found = iter(likelihoods(subject.model, pairs, batch_tokens=subject.batch_tokens, tick=tick))
    records: list[dict[str, Any]] = []
    for item in items:
        of_item = [next(found) for _ in range(max(len(item.contexts), len(item.answers)))]
        records.append(_record(task, item, of_item))
    if isinstance(task, CompletionTask):
        mean = math.fsum(record["logprobs"][0] for record in records) / len(records)
        # Past e^700 a float ends, and so does any meaning.
        return records, {"perplexity": math.exp(-mean) if mean > -700 else None}
    names = ("acc", "acc_norm", "acc_bytes") if isinstance(task, Choice) else ("acc",)
    more: dict[str, Any] = {
        name: sum(record[name] == record["gold"] for record in records) / len(records) for name in names
    }
    more["score"] = task.score if isinstance(task, Choice) else "acc"
    return records, more


def _record(
    task: Choice | Schema | CompletionTask, item: Item, found: Sequence[Likelihood]
) -> dict[str, Any]:
    """Return the results of one item's answers.

    acc, acc_norm and acc_bytes are the numbers of the chosen answers; of equal ones the first is chosen, as in lm-eval.
    """
    logprobs = [each.logprob for each in found]
    if isinstance(task, CompletionTask):
        return {"logprobs": logprobs, "right": found[0].greedy}
    lengths = {"acc": [1] * len(logprobs)}
    if isinstance(task, Choice):
        lengths["acc_norm"] = [len(answer) for answer in item.answers]
        lengths["acc_bytes"] = [len(answer.encode()) for answer in item.answers]
    record: dict[str, Any] = {"gold": item.gold, "logprobs": logprobs}
    for name, sizes in lengths.items():
        per_size = [p / size for p, size in zip(logprobs, sizes, strict=True)]
        record[name] = per_size.index(max(per_size))
    chosen = record[task.score] if isinstance(task, Choice) else record["acc"]
    return {**record, "right": chosen == item.gold}


def _generated(
    subject: Subject,
    task: Generated,
    items: Sequence[Item],
    before: Sequence[str],
    tick: Callable[[int], object] | None,
) -> list[dict[str, Any]]:
    """Return a record for each item, judged by a generated answer."""
    prompts = subject.encoder.prompts(
        [shown + item.contexts[0] for item, shown in zip(items, before, strict=True)]
    )
    texts = write(
        subject.model,
        subject.tokenizer,
        prompts,
        task,
        eos_tokens=subject.eos_tokens,
        chat=subject.chat,
        tick=tick,
    )
    verdicts = judge(task, items, texts, subject.chat)
    return [
        {"text": text, "right": verdict.passed, "judged": verdict.reason}
        for text, verdict in zip(texts, verdicts, strict=True)
    ]


def check_chat(chosen: Sequence[SelectedTask], chat: bool) -> None:
    """Raise UsageError for a task that cannot be put into one chat message."""
    schema = next((each.name for each in chosen if isinstance(each.task, Schema)), None)
    if chat and schema is not None:
        raise UsageError(
            f"--chat: {schema} compares beginnings of a sentence, which are no message; leave it out of --tasks"
        )
