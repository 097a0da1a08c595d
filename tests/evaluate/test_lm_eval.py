"""Agreement with lm-eval on the same exported model and items: each choice, each
log-likelihood, and each generated text.

lm-eval loads the model with transformers and does not use our code.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from deskside.cli.eval import run as run_eval
from tests.evaluate.made_model import Made, make, sentence

N = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("lm_eval"))


@pytest.fixture(scope="module")
def harness(made: Made) -> HFLM:
    return HFLM(str(made.folder), device="cpu", batch_size=4, dtype="float32")


def records(seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return items in the formats that the tasks read. Some have equal answers, some exceed the model's length."""
    rng = np.random.default_rng(seed)

    def line(low: int, high: int) -> str:
        return sentence(rng, low, high)

    def item(n: int) -> dict[str, Any]:
        choices = [line(1, 9) for _ in range(int(rng.integers(2, 5)))]
        if n % 6 == 0:
            choices[1] = choices[0]
        long = (90, 120) if n % 7 == 0 else (2, 30)
        return {
            "query": f"Question: {line(*long)}",
            "choices": choices,
            "gold": int(rng.integers(len(choices))),
        }

    letters = [
        {"query": f"{line(3, 20)}\nAnswer:", "choices": ["A", "B", "C", "D"], "gold": int(rng.integers(4))}
        for _ in range(N)
    ]
    schemas = [
        {
            "context_options": [line(2, 12), line(2, 12)],
            "continuation": line(1, 8),
            "gold": int(rng.integers(2)),
        }
        for _ in range(N)
    ]
    return {
        "arc_easy": [item(n) for n in range(N)],
        "commonsense_qa": letters,
        "winogrande": schemas,
        "lambada_openai": [{"context": line(3, 40), "continuation": line(1, 2)} for _ in range(N)],
        "svamp": [{"prompt": line(3, 20), "answer": str(n)} for n in range(8)],
    }


def write(folder: Path, data: dict[str, list[dict[str, Any]]]) -> None:
    for name, rows in data.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def theirs(harness: HFLM, config: dict[str, Any], rows: Sequence[dict[str, Any]], **more: Any) -> list[Any]:
    """Return lm-eval's samples of one task, in the order of the rows."""
    task = {
        "task": "made",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(list(rows))},
        "num_fewshot": 0,
        **config,
    }
    found = simple_evaluate(
        harness,
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **more,
    )
    return sorted(found["samples"]["made"], key=lambda sample: sample["doc_id"])


def ours(made: Made, folder: Path, task: str, *more: str) -> list[dict[str, Any]]:
    out = folder / f"{task}{len(more)}.items.jsonl"
    arguments = [str(made.folder), "--tasks", task, "--tasks-dir", str(folder), "--items", str(out), "--json"]
    assert run_eval([*arguments, "--device", "cpu", "--shots", "0", *more]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["index"] for record in found] == list(range(len(found)))
    return found


def logprobs(sample: dict[str, Any]) -> list[float]:
    return [float(pair[0]) for pair in sample["filtered_resps"]]


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
}


@pytest.mark.parametrize(
    ("task", "prompt", "chat"),
    [
        ("arc_easy", "{{query}}\nAnswer:", False),
        ("commonsense_qa", "{{query}}", True),
        pytest.param("arc_easy", "{{query}}\nAnswer:", True, marks=pytest.mark.full),
        pytest.param("commonsense_qa", "{{query}}", False, marks=pytest.mark.full),
    ],
)
def test_multiple_choice(
    made: Made, harness: HFLM, tmp_path: Path, task: str, prompt: str, chat: bool
) -> None:
    data = records(1)
    write(tmp_path, data)
    expected = theirs(
        harness,
        {**CHOICE, "doc_to_text": prompt},
        data[task],
        apply_chat_template=chat,
        fewshot_as_multiturn=False,
    )
    found = ours(made, tmp_path, task, *(["--chat"] if chat else []))
    assert len(found) == len(expected) == N
    for mine, their in zip(found, expected, strict=True):
        assert mine["logprobs"] == pytest.approx(logprobs(their), rel=1e-5, abs=1e-4)
        assert mine["acc"] == int(np.argmax(logprobs(their)))
        for name in ("acc", "acc_norm", "acc_bytes"):
            assert (mine[name] == mine["gold"]) == bool(their[name]), name


def test_xcopa(made: Made, harness: HFLM, tmp_path: Path) -> None:
    """Uses lm-eval's own description of the task, on the same file."""
    rng = np.random.default_rng(5)
    rows = [
        {
            "premise": sentence(rng, 3, 9),
            "choice1": sentence(rng, 1, 9),
            "choice2": sentence(rng, 1, 9),
            "question": ("cause", "effect")[n % 2],
            "label": n // 2 % 2,
        }
        for n in range(N)
    ]
    write(tmp_path, {"xcopa_ta_validation": rows})
    module = Path(lm_eval.__file__).parent / "tasks" / "xcopa"
    config: dict[str, Any] = load_yaml(module / "default_ta.yaml", resolve_func=True)
    described = {key: config[key] for key in ("output_type", "doc_to_text", "doc_to_target", "doc_to_choice")}
    assert config["metric_list"] == [{"metric": "acc"}]
    expected = theirs(harness, {**described, "metric_list": config["metric_list"]}, rows)
    found = ours(made, tmp_path, "xcopa_ta")
    for mine, their in zip(found, expected, strict=True):
        assert mine["logprobs"] == pytest.approx(logprobs(their), rel=1e-5, abs=1e-4)
        assert (mine["acc"] == mine["gold"]) == bool(their["acc"])


def test_schema(made: Made, harness: HFLM, tmp_path: Path) -> None:
    data = records(2)
    write(tmp_path, data)
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",
        "doc_to_choice": "context_options",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}],
    }
    expected = theirs(harness, config, data["winogrande"])
    for mine, their in zip(ours(made, tmp_path, "winogrande"), expected, strict=True):
        assert mine["logprobs"] == pytest.approx(logprobs(their), rel=1e-5, abs=1e-4)
        assert mine["acc"] == int(np.argmax(logprobs(their)))
        assert mine["right"] == bool(their["acc"])


def test_completion(made: Made, harness: HFLM, tmp_path: Path) -> None:
    data = records(3)
    # The answer of some items is the model's own continuation, so that both must also say yes: contexts after which
    # the best token is a word with the space that precedes an answer.
    rng = np.random.default_rng(9)
    texts = [sentence(rng, 3, 30) for _ in range(400)]
    for text in texts:
        best = int(made.model(torch.tensor([made.tokenizer.encode(text).ids]))[0, -1].argmax())
        word = made.tokenizer.decode([best])
        if word[:1] == " " and made.tokenizer.encode(text + word).ids[-1] == best and word.strip():
            data["lambada_openai"].append({"context": text, "continuation": word[1:]})
    write(tmp_path, data)
    config = {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}],
    }
    expected = theirs(harness, config, data["lambada_openai"])
    found = ours(made, tmp_path, "lambada")
    for mine, their in zip(found, expected, strict=True):
        assert mine["logprobs"] == pytest.approx([float(their["filtered_resps"][0][0])], rel=1e-5, abs=1e-4)
        assert mine["right"] == bool(their["acc"])
    assert {mine["right"] for mine in found} == {True, False}


def test_written_answers(made: Made, harness: HFLM, tmp_path: Path) -> None:
    data = records(4)
    write(tmp_path, data)
    config = {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{prompt}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:", "\n"], "do_sample": False, "max_gen_toks": 64},
        "metric_list": [{"metric": "exact_match"}],
    }
    expected = theirs(harness, config, data["svamp"])
    for mine, their in zip(ours(made, tmp_path, "svamp"), expected, strict=True):
        assert mine["text"] == their["filtered_resps"][0]
