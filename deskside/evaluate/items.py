"""Convert records to items (contexts, answers, correct answer), and choose their few-shot examples.

A damaged record is counted with its position and left out.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from string import Formatter
from typing import Any

from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import BadInputLog, Source
from deskside.evaluate.datasets import READERS
from deskside.evaluate.tasks import (
    FIELDS,
    HUB,
    TEMPLATES,
    Choice,
    CodeTask,
    CompletionTask,
    Generated,
    Number,
    Schema,
    SelectedTask,
    Task,
)
from deskside.utils.errors import UsageError

WRONG = "a record that is no item of this task"


@dataclass(frozen=True)
class Item:
    """One question.

    contexts: one, or one per option of a schema. answers: what is compared, without the delimiter; for generated text
    the references. gold: the right one's number. example: question and answer together, as an example for others.
    same: what examples must have in common with it. check: of code, the tests, the function under test, and helpers.
    """

    origin: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int
    example: str
    same: object = None
    check: tuple[str, str, str] = ("", "", "")

    def pairs(self, task: Task, before: str) -> list[tuple[str, str]]:
        """Return (context, continuation) of each answer, after the examples `before`."""
        delimiter = "" if isinstance(task, Generated) else task.delimiter
        if len(self.contexts) > 1:
            return [(before + context, delimiter + self.answers[0]) for context in self.contexts]
        return [(before + self.contexts[0], delimiter + answer) for answer in self.answers]


def read(chosen: SelectedTask, bad: BadInputLog, *, chat: bool = False) -> list[Item]:
    """Return all items of a task's data, in its order. With `chat`, code is requested in a message.

    Raises UsageError when there is none.
    """
    items = list(_items(chosen, bad, chat))
    if not items:
        first = next((f" ({places[0]}: {reason})" for reason, places in bad.examples.items()), "")
        raise UsageError(
            f"{chosen.source}: holds no item of the task {chosen.name}{first}; get the file again"
        )
    return items


def limited(items: Sequence[Item], limit: int | None, spread: bool) -> list[int]:
    """Return the indices of the items to evaluate: the first ones, or evenly spread."""
    count = len(items) if limit is None else min(limit, len(items))
    return [number * len(items) // count for number in range(count)] if spread else list(range(count))


class Examples:
    """Few-shot examples of each item: other items, drawn with the item's number as the only seed.

    Raises UsageError when some item has too few others.
    """

    def __init__(self, chosen: SelectedTask, items: Sequence[Item]):
        self._chosen, self._items = chosen, items
        self._pools: dict[object, list[int]] = {}
        for number, item in enumerate(items):
            self._pools.setdefault(item.same, []).append(number)
        twins = Counter((item.same, item.contexts) for item in items)
        fewest = min(len(self._pools[same]) - count for (same, _), count in twins.items())
        if fewest < chosen.shots:
            raise UsageError(
                f"{chosen.source}: has {fewest} examples for an item of {chosen.name}, and {chosen.shots} are "
                f"wanted; give --shots {fewest}"
            )

    def before(self, number: int) -> str:
        """Return the text of the examples with the final separator; empty for a task without examples."""
        chosen, item = self._chosen, self._items[number]
        if not chosen.shots:
            return ""
        rng = random.Random(f"{chosen.name}:{number}")
        pool = self._pools[item.same]
        drawn: list[int] = []
        # A few more than are wanted, because the item itself, or its twin, may be among them; else all of them.
        for size in (min(len(pool), chosen.shots + 4), len(pool)):
            others = (n for n in rng.sample(pool, size) if self._items[n].contexts != item.contexts)
            drawn = list(islice(others, chosen.shots))
            if len(drawn) == chosen.shots:
                break
        return chosen.task.between.join([*(self._items[n].example for n in drawn), ""])


def _items(chosen: SelectedTask, bad: BadInputLog, chat: bool) -> Iterator[Item]:
    task = chosen.task
    fields, convert = _fields(task), None
    if chosen.source.startswith(HUB):
        assert task.hub is not None  # or it would not have been chosen
        fields, convert = READERS[task.hub.reader]
    for record in iter_records(Source.parse(chosen.source), fields, bad):
        try:
            yield _item(
                task, record.fields if convert is None else convert(record.fields), record.origin, chat
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            bad.add(WRONG, record.origin, (str(error) or type(error).__name__)[:80])


def _item(task: Task, record: dict[str, Any], origin: str, chat: bool) -> Item:
    """Convert a record to an item. Raises ValueError, KeyError, IndexError or TypeError for an invalid one."""
    same = None if task.shots_same is None else record[task.shots_same]
    prompt = _text(task.prompt, record)
    if isinstance(task, Choice):
        choices = _strings(record, task.choices)
        gold = _gold(record[task.gold], len(choices))
        return Item(origin, (prompt,), choices, gold, prompt + task.delimiter + choices[gold], same)
    if isinstance(task, Schema):
        options = _strings(record, task.options)
        gold = _gold(record[task.gold], len(options))
        return Item(origin, options, (prompt,), gold, options[gold] + task.delimiter + prompt, same)
    answer = _text(task.answer, record) if task.answer else ""
    if isinstance(task, CompletionTask):
        if not answer.strip():
            raise ValueError("the answer is empty")
        return Item(origin, (prompt,), (answer,), 0, prompt + task.delimiter + answer, same)
    example = prompt + answer
    if isinstance(task, CodeTask):
        asked = _text(task.chat_prompt, record) if chat else prompt
        tests, entry_point, helpers = (
            _text(template, record) for template in (task.tests, task.entry_point, task.helpers)
        )
        return Item(origin, (asked,), (prompt,), 0, example, same, (tests, entry_point, helpers))
    references = (
        (_text(task.reference, record),) if isinstance(task, Number) else _strings(record, task.references)
    )
    return Item(origin, (prompt,), references, 0, example, same)


def _text(template: str, record: dict[str, Any]) -> str:
    text = template.format_map(record)
    text.encode("utf-8")  # half of a surrogate pair cannot be tokenised
    return text


def _strings(record: dict[str, Any], field: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return a field that holds a list of texts, or the text of each template."""
    values = record[field] if isinstance(field, str) else [_text(template, record) for template in field]
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"{field}: is no list of texts")
    for value in values:
        value.encode("utf-8")
    return tuple(values)


def _gold(value: object, count: int) -> int:
    if not isinstance(value, int) or not 0 <= int(value) < count:
        raise ValueError(f"the right answer is {value!r} of {count}")
    return int(value)


def _fields(task: Task) -> tuple[str, ...]:
    """Return the fields that a record must have."""
    names = []
    for role in type(task).model_fields:
        value = getattr(task, role)
        if role in FIELDS or (role == "choices" and isinstance(value, str)):
            names += [] if value is None else [value]
        elif role in TEMPLATES:
            for template in [value] if isinstance(value, str) else value:
                found = (name for _, name, _, _ in Formatter().parse(template) if name)
                names += [name.split("[")[0].split(".")[0] for name in found]
    return tuple(dict.fromkeys(names))
