"""Convert records to items (contexts, answers, correct answer), and choose their few-shot examples.

A damaged record is skipped; its reason and position are recorded in a `BadInputLog`.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from string import Formatter
from typing import Any

from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import Source
from deskside.evaluate.datasets import READERS
from deskside.evaluate.tasks import (
    FIELD_KEYS,
    HUB,
    TEMPLATE_KEYS,
    Choice,
    CodeTask,
    CompletionTask,
    Generated,
    Number,
    Schema,
    SelectedTask,
    Task,
)
from deskside.utils import strict_json
from deskside.utils.errors import UsageError

NOT_AN_ITEM = "not a valid record of this task"


@dataclass(frozen=True)
class Item:
    """One question of a task.

    Attributes:
        origin: File and line of its record.
        contexts: The prompt; for a schema, one per option.
        answers: The answers whose log-likelihoods are compared, without delimiter; for generated text, the references;
            for a code task, the prompt, with which the tested program begins.
        gold: Index of the correct context or answer.
        example: Question and answer as a few-shot example for other items.
        group: Examples must be of the same group.
        check: Of a code task: tests, entry point and helpers, as in `sandbox.check`.
    """

    origin: str
    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int
    example: str
    group: object = None
    check: tuple[str, str, str] = ("", "", "")

    def pairs(self, task: Task, examples: str) -> list[tuple[str, str]]:
        """Return (context, continuation) of each option or answer. `examples`: text before each context."""
        delimiter = "" if isinstance(task, Generated) else task.delimiter
        if len(self.contexts) > 1:
            return [(examples + context, delimiter + self.answers[0]) for context in self.contexts]
        return [(examples + self.contexts[0], delimiter + answer) for answer in self.answers]


def read_items(chosen: SelectedTask, bad: BadInputLog, *, chat: bool = False) -> list[Item]:
    """Return all items of a task, in the order of its data. chat: code tasks use their `chat_prompt`.

    Raises UsageError if there are none.
    """
    items = list(_items(chosen, bad, chat))
    if not items:
        first = next((f" ({places[0]}: {reason})" for reason, places in bad.examples.items()), "")
        remedy = "download the file again, or correct the fields that the task names in tasks.toml"
        raise UsageError(f"{chosen.source}: holds no item of the task {chosen.name}{first}; {remedy}")
    return items


def select_indices(items: Sequence[Item], limit: int | None, spread: bool) -> list[int]:
    """Return the indices of up to `limit` items: the first ones, or ones spread evenly over all items."""
    count = len(items) if limit is None else min(limit, len(items))
    if spread:
        return [n * len(items) // count for n in range(count)]
    return list(range(count))


class Examples:
    """Few-shot examples for each item: other items, chosen at random with the task's name and the item's index as seed.

    Raises UsageError if there are too few items.
    """

    def __init__(self, chosen: SelectedTask, items: Sequence[Item]):
        self._chosen, self._items = chosen, items
        self._pools: dict[object, list[int]] = {}
        for number, item in enumerate(items):
            self._pools.setdefault(item.group, []).append(number)
        # An item and its duplicates are not examples for it.
        duplicates = Counter((item.group, item.contexts) for item in items)
        fewest = min(len(self._pools[group]) - count for (group, _), count in duplicates.items())
        if fewest < chosen.shots:
            raise UsageError(
                f"{chosen.source}: has {fewest} examples for an item of {chosen.name}, but {chosen.shots} are "
                f"needed; give --shots {fewest}"
            )

    def prefix(self, number: int) -> str:
        """Return the examples of an item, with a separator after each; empty without examples."""
        chosen, item = self._chosen, self._items[number]
        if not chosen.shots:
            return ""
        rng = random.Random(f"{chosen.name}:{number}")
        pool = self._pools[item.group]
        examples: list[int] = []
        # Sample a few more than needed, because the item or its duplicates may be among them. If that is not enough,
        # sample the whole pool.
        for size in (min(len(pool), chosen.shots + 4), len(pool)):
            others = (n for n in rng.sample(pool, size) if self._items[n].contexts != item.contexts)
            examples = list(islice(others, chosen.shots))
            if len(examples) == chosen.shots:
                break
        return chosen.task.between.join([*(self._items[n].example for n in examples), ""])


def _items(chosen: SelectedTask, bad: BadInputLog, chat: bool) -> Iterator[Item]:
    task = chosen.task
    fields, optional, convert = _fields(task), _optional_fields(task), None
    reader = task.reader
    if chosen.source.startswith(HUB):
        assert task.hub is not None  # `select` has checked it
        reader = task.hub.reader
    if reader is not None:
        (fields, convert), optional = READERS[reader], ()
    for record in iter_records(Source.parse(chosen.source), fields, bad, optional):
        try:
            item_fields = record.fields if convert is None else convert(record.fields)
            yield _item(task, _with_derived(task, item_fields), record.origin, chat)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            bad.add(NOT_AN_ITEM, record.origin, (str(error) or type(error).__name__)[:80])


def _with_derived(task: Task, record: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a record with those that the task derives. Raises ValueError for a value without one."""
    result = dict(record)
    for name, derived in task.derived.items():
        value = result.get(derived.of)
        key = value if isinstance(value, str) else strict_json.dumps(value)
        template = derived.map.get(key, derived.default)
        if template is None:
            raise ValueError(f"{derived.of} is {key[:40]!r}, which derived.{name} does not map")
        result[name] = _text(template, result)
    return result


def _item(task: Task, record: dict[str, Any], origin: str, chat: bool) -> Item:
    """Convert a record to an item. For an invalid one, raises one of the errors that `_items` handles."""
    group = None if task.shots_same is None else record[task.shots_same]
    prompt = _text(task.prompt, record)
    if isinstance(task, Choice):
        choices = _strings(record, task.choices)
        gold = _gold(record[task.gold], len(choices))
        return Item(origin, (prompt,), choices, gold, prompt + task.delimiter + choices[gold], group)
    if isinstance(task, Schema):
        options = _strings(record, task.options)
        gold = _gold(record[task.gold], len(options))
        return Item(origin, options, (prompt,), gold, options[gold] + task.delimiter + prompt, group)
    answer = _text(task.answer, record) if task.answer else ""
    if isinstance(task, CompletionTask):
        if not answer.strip():
            raise ValueError("the answer is empty")
        return Item(origin, (prompt,), (answer,), 0, prompt + task.delimiter + answer, group)
    example = prompt + answer
    if isinstance(task, CodeTask):
        context = _text(task.chat_prompt, record) if chat else prompt
        tests, entry_point, helpers = (
            _text(template, record) for template in (task.tests, task.entry_point, task.helpers)
        )
        return Item(origin, (context,), (prompt,), 0, example, group, (tests, entry_point, helpers))
    if isinstance(task, Number):
        references: tuple[str, ...] = (_text(task.reference, record),)
    else:
        value = record[task.references]
        one = {task.references: [value]} if isinstance(value, str) else record
        references = _strings(one, task.references)
    return Item(origin, (prompt,), references, 0, example, group)


def _text(template: str, record: dict[str, Any]) -> str:
    """Fill in a template. Raises ValueError for text that is not valid Unicode."""
    text = template.format_map(record)
    text.encode("utf-8")  # a lone surrogate cannot be tokenized
    return text


def _strings(record: dict[str, Any], field: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return a field that holds a list of texts, or the text of each template."""
    values = record[field] if isinstance(field, str) else [_text(template, record) for template in field]
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise ValueError(f"{field}: is not a list of texts")
    for value in values:
        value.encode("utf-8")
    return tuple(values)


def _gold(value: object, count: int) -> int:
    if not isinstance(value, int) or not 0 <= int(value) < count:
        raise ValueError(f"the correct answer is {value!r}, but there are {count} answers")
    return int(value)


def _fields(task: Task) -> tuple[str, ...]:
    """Return the fields that a record of this task must have."""
    names: list[str] = []
    names += [derived.of for derived in task.derived.values() if derived.default is None]
    for key in type(task).model_fields:
        value = getattr(task, key)
        if key in FIELD_KEYS or (key == "choices" and isinstance(value, str)):
            names += [] if value is None else [value]
        elif key in TEMPLATE_KEYS:
            for template in [value] if isinstance(value, str) else value:
                names += _used(template)
    return tuple(name for name in dict.fromkeys(names) if name not in task.derived)


def _optional_fields(task: Task) -> tuple[str, ...]:
    """Return the fields that the task's derived fields may use; a template that is used has all of its own."""
    names = [derived.of for derived in task.derived.values()]
    names += [name for derived in task.derived.values() for each in derived.templates for name in _used(each)]
    return tuple(name for name in dict.fromkeys(names) if name not in task.derived)


def _used(template: str) -> list[str]:
    """Return the fields that a template uses: choices for "{choices[0]}"."""
    used = (name for _, name, _, _ in Formatter().parse(template) if name)
    return [name.split("[")[0].split(".")[0] for name in used]
