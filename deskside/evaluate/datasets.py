"""Convert records of Hugging Face datasets, and of files in the same format, to those that tasks.toml describes.

A reader is a pair: the required fields of a record, and a function that converts it. The function raises KeyError,
IndexError, TypeError or ValueError for a malformed record. The texts are preprocessed as in lm-eval.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]
Reader = tuple[tuple[str, ...], Callable[[Fields], dict[str, Any]]]


def _arc(record: Fields) -> dict[str, Any]:
    return {"query": f"Question: {record['question']}", **_labelled(record)}


def _labelled(record: Fields) -> dict[str, Any]:
    labels = list(record["choices"]["label"])
    return {
        "choices": list(record["choices"]["text"]),
        "gold": labels.index(str(record["answerKey"]).strip()),
    }


def _hellaswag(record: Fields) -> dict[str, Any]:
    query = f"{record['activity_label']}: {record['ctx_a']} {str(record['ctx_b']).capitalize()}"
    return {
        "query": _without_brackets(query),
        "choices": [_without_brackets(str(ending)) for ending in record["endings"]],
        "gold": int(record["label"]),
    }


def _without_brackets(text: str) -> str:
    """Remove bracketed markers such as [header], which HellaSwag's WikiHow texts contain."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _piqa(record: Fields) -> dict[str, Any]:
    return {
        "query": f"Question: {record['goal']}",
        "choices": [record["sol1"], record["sol2"]],
        "gold": int(record["label"]),
    }


def _boolq(record: Fields) -> dict[str, Any]:
    query = f"{record['passage']}\nQuestion: {record['question']}?"
    return {"query": query, "choices": ["no", "yes"], "gold": int(record["label"])}


def _copa(record: Fields) -> dict[str, Any]:
    converted = _xcopa(record)
    conjunction = {"cause": "because", "effect": "therefore"}[record["question"]]
    return {**converted, "query": f"{converted['premise']} {conjunction}"}


def _xcopa(record: Fields) -> dict[str, Any]:
    """XCOPA (Ponti et al. 2020, arXiv 2005.00333); tasks.toml has the conjunction of each language.

    lm-eval removes the last character of the premise in every language, because it is a period in English. In Tamil it
    is mostly a vowel sign. This is repeated here, so that results are comparable.
    """
    return {
        "premise": str(record["premise"]).strip()[:-1],
        "question": record["question"],
        "choices": [text[:1].lower() + text[1:] for text in (str(record["choice1"]), str(record["choice2"]))],
        "gold": int(record["label"]),
    }


def _openbookqa(record: Fields) -> dict[str, Any]:
    return {"query": record["question_stem"], **_labelled(record)}


def _winogrande(record: Fields) -> dict[str, Any]:
    before, after = str(record["sentence"]).split("_", 1)
    options = [before + str(option) for option in (record["option1"], record["option2"])]
    return {"context_options": options, "continuation": after.strip(), "gold": int(record["answer"]) - 1}


def _lambada(record: Fields) -> dict[str, Any]:
    context, word = str(record["text"]).rsplit(" ", 1)
    return {"context": context, "continuation": word}


def _gsm8k(record: Fields) -> dict[str, Any]:
    solution, answer = str(record["answer"]).split("\n#### ")
    return {"prompt": record["question"], "solution": solution, "answer": answer}


def _unchanged(record: Fields) -> dict[str, Any]:
    return dict(record)


READERS: dict[str, Reader] = {
    "arc": (("question", "choices", "answerKey"), _arc),
    "hellaswag": (("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    "piqa": (("goal", "sol1", "sol2", "label"), _piqa),
    "boolq": (("passage", "question", "label"), _boolq),
    "copa": (("premise", "question", "choice1", "choice2", "label"), _copa),
    "xcopa": (("premise", "question", "choice1", "choice2", "label"), _xcopa),
    "openbookqa": (("question_stem", "choices", "answerKey"), _openbookqa),
    "winogrande": (("sentence", "option1", "option2", "answer"), _winogrande),
    "lambada": (("text",), _lambada),
    "mmlu": (("question", "subject", "choices", "answer"), _unchanged),
    "gsm8k": (("question", "answer"), _gsm8k),
    "humaneval": (("prompt", "test", "entry_point"), _unchanged),
}
