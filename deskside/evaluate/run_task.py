"""Evaluate a model on a task."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from deskside.data.corpus.bad_input import BadInputLog
from deskside.evaluate.generated import generate_answers, judge_answers
from deskside.evaluate.items import Examples, Item, read_items, select_indices
from deskside.evaluate.likelihood import ContextEncoder, Likelihood, likelihoods
from deskside.evaluate.scoring import centred, mean_centred, wilson
from deskside.evaluate.tasks import Choice, CompletionTask, Generated, Schema, SelectedTask, Translation
from deskside.evaluate.translation import corpus_scores, sentence_chrf
from deskside.model.transformer import Transformer
from deskside.utils.errors import UsageError

CORE_TASKS = 22  # in the paper (see `scoring.centred`)


@dataclass(frozen=True)
class EvaluatedModel:
    """The model to evaluate, and its tokenization.

    chat: contexts are user messages, rendered with the chat template.
    """

    model: Transformer
    tokenizer: Tokenizer
    encoder: ContextEncoder
    eos_tokens: Collection[int]
    batch_tokens: int
    chat: bool = False


@dataclass(frozen=True)
class TaskResult:
    """The result of a task.

    Attributes:
        correct: Number of correct items, of `n`; None for translations, which are scored otherwise.
        metrics: Further metrics of this kind of task.
        damaged: Skipped records, as in `BadInputLog.as_dict`.
        records: The results of each item, for --items.
    """

    chosen: SelectedTask
    correct: int | None
    n: int
    seconds: float
    metrics: dict[str, Any]
    damaged: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """Share of correct items. Raises TypeError for a translation."""
        if self.correct is None:
            raise TypeError(f"{self.chosen.name} has no accuracy")
        return self.correct / self.n

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON. low and high: 95 % confidence interval of the accuracy, or of chrF2."""
        task = self.chosen.task
        scores: dict[str, Any] = {}
        if self.correct is not None:
            low, high = wilson(self.correct, self.n)
            scores = {
                "accuracy": self.accuracy,
                "low": low,
                "high": high,
                "centred": centred(self.accuracy, task.chance),
                "chance": task.chance,
            }
        return {
            **scores,
            "n": self.n,
            "kind": task.kind,
            "shots": self.chosen.shots,
            **self.metrics,
            "damaged": sum(reason["count"] for reason in self.damaged.values()),
            "seconds": round(self.seconds, 3),
            "source": self.chosen.source,
        }


@dataclass(frozen=True)
class Core:
    """The CORE metric over the evaluated tasks: mean centered accuracy, with a 95 % confidence interval."""

    value: float
    low: float
    high: float
    tasks: tuple[str, ...]


def core(results: Sequence[TaskResult]) -> Core | None:
    """Return the CORE metric of the results that belong to it; None if there are none."""
    members = [result for result in results if result.chosen.core]
    if not members:
        return None
    value, low, high = mean_centred([(r.accuracy, r.n, r.chosen.task.chance) for r in members])
    return Core(value, low, high, tuple(r.chosen.name for r in members))


class PreparedTask:
    """A task with its items and few-shot examples. `bad` lists the damaged records of its data.

    Raises UsageError if there is no item, or if there are too few for the examples.
    """

    def __init__(self, chosen: SelectedTask, chat: bool = False) -> None:
        self.chosen, self.bad = chosen, BadInputLog()
        self.items = read_items(chosen, self.bad, chat=chat)
        self.examples = Examples(chosen, self.items)


def evaluate(
    evaluated: EvaluatedModel,
    prepared: PreparedTask,
    *,
    limit: int | None = None,
    tick: Callable[[int], object] | None = None,
) -> TaskResult:
    """Evaluate a model on the items of a task.

    Args:
        limit: Maximum number of items.
        tick: Called with the number of newly finished answers.

    Raises UsageError for an answer without tokens or longer than the model's context, RunError for outputs that are not
    finite and for code that cannot be sandboxed.
    """
    start = time.monotonic()
    chosen, items = prepared.chosen, prepared.items
    indices = select_indices(items, limit, chosen.task.spread)
    selected = [items[index] for index in indices]
    examples = [prepared.examples.prefix(index) for index in indices]
    metrics: dict[str, Any] = {}
    if isinstance(chosen.task, Generated):
        records = _evaluate_generated(evaluated, chosen.task, selected, examples, tick)
        if isinstance(chosen.task, Translation):
            texts, references = [record["text"] for record in records], [item.answers for item in selected]
            metrics = corpus_scores(texts, references, chosen.task.tokenize)
    else:
        records, metrics = _evaluate_likelihood(evaluated, chosen.task, selected, examples, tick)
    is_judged = not isinstance(chosen.task, Translation)
    correct = sum(record["right"] for record in records) if is_judged else None
    records = [
        {"task": chosen.name, "index": index, "origin": item.origin, **record}
        for record, index, item in zip(records, indices, selected, strict=True)
    ]
    seconds = time.monotonic() - start
    return TaskResult(chosen, correct, len(selected), seconds, metrics, prepared.bad.as_dict(), records)


def count_answers(prepared: PreparedTask, limit: int | None) -> int:
    """Return the total that `evaluate` passes to `tick`, for a progress bar."""
    chosen, items = prepared.chosen, prepared.items
    indices = select_indices(items, limit, chosen.task.spread)
    if isinstance(chosen.task, Generated):
        return len(indices)
    return sum(max(len(items[n].contexts), len(items[n].answers)) for n in indices)


def _evaluate_likelihood(
    evaluated: EvaluatedModel,
    task: Choice | Schema | CompletionTask,
    items: Sequence[Item],
    examples: Sequence[str],
    tick: Callable[[int], object] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a record for each item, judged by log-likelihoods, and metrics of all items."""
    texts = []
    for item, item_examples in zip(items, examples, strict=True):
        for context, continuation in item.pairs(task, item_examples):
            # In a chat the answer begins a turn, so it has no leading space.
            texts.append((context, continuation.lstrip() if evaluated.chat else continuation))
    pairs = evaluated.encoder.pairs(texts)
    results = iter(likelihoods(evaluated.model, pairs, batch_tokens=evaluated.batch_tokens, tick=tick))
    records: list[dict[str, Any]] = []
    for item in items:
        item_results = [next(results) for _ in range(max(len(item.contexts), len(item.answers)))]
        records.append(_record(task, item, item_results))
    if isinstance(task, CompletionTask):
        mean = math.fsum(record["logprobs"][0] for record in records) / len(records)
        # math.exp overflows beyond 709.
        return records, {"perplexity": math.exp(-mean) if mean > -700 else None}
    names = ("acc", "acc_norm", "acc_bytes") if isinstance(task, Choice) else ("acc",)
    metrics: dict[str, Any] = {
        name: sum(record[name] == record["gold"] for record in records) / len(records) for name in names
    }
    metrics["score"] = task.score if isinstance(task, Choice) else "acc"
    return records, metrics


def _record(
    task: Choice | Schema | CompletionTask, item: Item, results: Sequence[Likelihood]
) -> dict[str, Any]:
    """Return the results of one item.

    acc, acc_norm and acc_bytes are the indices of the chosen answers. Ties go to the first one, as in lm-eval.
    """
    logprobs = [result.logprob for result in results]
    if isinstance(task, CompletionTask):
        return {"logprobs": logprobs, "right": results[0].greedy}
    lengths = {"acc": [1] * len(logprobs)}
    if isinstance(task, Choice):
        lengths["acc_norm"] = [len(answer) for answer in item.answers]
        lengths["acc_bytes"] = [len(answer.encode()) for answer in item.answers]
    record: dict[str, Any] = {"gold": item.gold, "logprobs": logprobs}
    for name, answer_lengths in lengths.items():
        scores = [logprob / length for logprob, length in zip(logprobs, answer_lengths, strict=True)]
        record[name] = scores.index(max(scores))
    chosen = record[task.score] if isinstance(task, Choice) else record["acc"]
    return {**record, "right": chosen == item.gold}


def _evaluate_generated(
    evaluated: EvaluatedModel,
    task: Generated,
    items: Sequence[Item],
    examples: Sequence[str],
    tick: Callable[[int], object] | None,
) -> list[dict[str, Any]]:
    """Return a record for each item with its generated answer, and the verdict on it or its chrF2."""
    prompts = evaluated.encoder.prompts(
        [item_examples + item.contexts[0] for item, item_examples in zip(items, examples, strict=True)]
    )
    texts = generate_answers(
        evaluated.model,
        evaluated.tokenizer,
        prompts,
        task,
        eos_tokens=evaluated.eos_tokens,
        chat=evaluated.chat,
        tick=tick,
    )
    if isinstance(task, Translation):
        texts = [text.strip() for text in texts]
        return [
            {"text": text, "chrf": sentence_chrf(text, item.answers)}
            for text, item in zip(texts, items, strict=True)
        ]
    verdicts = judge_answers(task, items, texts, evaluated.chat)
    return [
        {"text": text, "right": verdict.passed, "judged": verdict.reason}
        for text, verdict in zip(texts, verdicts, strict=True)
    ]


def check_chat(chosen: Sequence[SelectedTask], chat: bool) -> None:
    """Raise UsageError for a task that cannot be put into one chat message."""
    schema = next((selected.name for selected in chosen if isinstance(selected.task, Schema)), None)
    if chat and schema is not None:
        raise UsageError(
            f"--chat: {schema} compares beginnings of sentences, which are not chat messages; leave it out of --tasks"
        )
