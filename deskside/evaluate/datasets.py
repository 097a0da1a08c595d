"""Convert records of Hugging Face datasets to the form of the files that tasks.toml describes.

Each reader names the fields that it takes and makes one record of them; KeyError, IndexError, TypeError or ValueError
say that a record is not what it should be. The texts are prepared as lm-eval prepares them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]
Reader = tuple[tuple[str, ...], Callable[[Fields], dict[str, Any]]]


def _arc(r: Fields) -> dict[str, Any]:
    return {"query": f"Question: {r['question']}", **_labelled(r)}


def _labelled(r: Fields) -> dict[str, Any]:
    labels = list(r["choices"]["label"])
    return {"choices": list(r["choices"]["text"]), "gold": labels.index(str(r["answerKey"]).strip())}


def _hellaswag(r: Fields) -> dict[str, Any]:
    query = f"{r['activity_label']}: {r['ctx_a']} {str(r['ctx_b']).capitalize()}"
    return {
        "query": _without_brackets(query),
        "choices": [_without_brackets(str(ending)) for ending in r["endings"]],
        "gold": int(r["label"]),
    }


def _without_brackets(text: str) -> str:
    """Remove the marks in brackets of HellaSwag's WikiHow part."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _piqa(r: Fields) -> dict[str, Any]:
    return {"query": f"Question: {r['goal']}", "choices": [r["sol1"], r["sol2"]], "gold": int(r["label"])}


def _boolq(r: Fields) -> dict[str, Any]:
    query = f"{r['passage']}\nQuestion: {r['question']}?"
    return {"query": query, "choices": ["no", "yes"], "gold": int(r["label"])}


def _copa(r: Fields) -> dict[str, Any]:
    link = {"cause": "because", "effect": "therefore"}[r["question"]]
    choices = [text[:1].lower() + text[1:] for text in (str(r["choice1"]), str(r["choice2"]))]
    return {"query": f"{str(r['premise']).strip()[:-1]} {link}", "choices": choices, "gold": int(r["label"])}


def _openbookqa(r: Fields) -> dict[str, Any]:
    return {"query": r["question_stem"], **_labelled(r)}


def _winogrande(r: Fields) -> dict[str, Any]:
    before, after = str(r["sentence"]).split("_", 1)
    options = [before + str(option) for option in (r["option1"], r["option2"])]
    return {"context_options": options, "continuation": after.strip(), "gold": int(r["answer"]) - 1}


def _lambada(r: Fields) -> dict[str, Any]:
    context, word = str(r["text"]).rsplit(" ", 1)
    return {"context": context, "continuation": word}


def _gsm8k(r: Fields) -> dict[str, Any]:
    solution, answer = str(r["answer"]).split("\n#### ")
    return {"prompt": r["question"], "solution": solution, "answer": answer}


def _as_it_is(r: Fields) -> dict[str, Any]:
    return dict(r)


READERS: dict[str, Reader] = {
    "arc": (("question", "choices", "answerKey"), _arc),
    "hellaswag": (("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    "piqa": (("goal", "sol1", "sol2", "label"), _piqa),
    "boolq": (("passage", "question", "label"), _boolq),
    "copa": (("premise", "question", "choice1", "choice2", "label"), _copa),
    "openbookqa": (("question_stem", "choices", "answerKey"), _openbookqa),
    "winogrande": (("sentence", "option1", "option2", "answer"), _winogrande),
    "lambada": (("text",), _lambada),
    "mmlu": (("question", "subject", "choices", "answer"), _as_it_is),
    "gsm8k": (("question", "answer"), _gsm8k),
    "humaneval": (("prompt", "test", "entry_point"), _as_it_is),
}
