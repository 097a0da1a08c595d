"""lm-eval's `local-completions` through our server equals lm-eval on the model itself: no item differs.

Its requests are prompts as token ids with echo and one log-probability, and greedy answers up to stop strings.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from benchmarks.serve_load import served
from tests.evaluate.made_model import POSITIONS, Made, make, sentence

N = 40


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("lm_eval_client"))


@pytest.fixture(scope="module")
def client(made: Made) -> Iterator[LocalCompletionsAPI]:
    with served([str(made.folder), "--device", "cpu", "--name", "tiny"], {"OMP_NUM_THREADS": "1"}) as (
        base,
        _,
    ):
        yield LocalCompletionsAPI(
            model="tiny",
            base_url=f"{base}/v1/completions",
            tokenizer=str(made.folder),
            tokenizer_backend="huggingface",
            batch_size=4,
            max_length=POSITIONS,
            eos_string=made.tokenizer.id_to_token(made.end),
        )


def samples(model: Any, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import datasets

    task = {
        "task": "made",
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "num_fewshot": 0,
        **config,
    }
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(model, tasks=[task], task_manager=manager, log_samples=True, bootstrap_iters=0)
    return sorted(found["samples"]["made"], key=lambda sample: sample["doc_id"])


def rows(seed: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    # Short texts, because windows of a long text differ between lm-eval's own models.
    return [
        {
            "query": sentence(rng, 2, 12),
            "choices": [sentence(rng, 1, 6) for _ in range(4)],
            "gold": int(rng.integers(4)),
        }
        for _ in range(count)
    ]


CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
LIKELIHOOD = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{query}}",
    "doc_to_target": " {{choices[0]}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{query}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
GENERATED = {
    "output_type": "generate_until",
    "doc_to_text": "{{query}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": [" sea"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def differing(
    made: Made, client: LocalCompletionsAPI, config: dict[str, Any], items: list[dict[str, Any]]
) -> list[int]:
    """Return the items whose verdicts, greedy matches, texts or log-probabilities differ."""
    harness = HFLM(str(made.folder), device="cpu", batch_size=4, dtype="float32")
    mine, theirs = samples(client, config, items), samples(harness, config, items)
    assert len(mine) == len(theirs) == len(items)
    metrics = [metric["metric"] for metric in config["metric_list"]]
    differ = []
    for our, their in zip(mine, theirs, strict=True):
        numbers = [np.array(s["filtered_resps"], dtype=object).ravel() for s in (our, their)]
        same = all(
            a == b if isinstance(b, str | bool) else float(a) == pytest.approx(float(b), abs=1e-4)
            for a, b in zip(*numbers, strict=True)
        )
        verdicts = all(
            our[name] == their[name]
            for name in metrics
            if isinstance(their[name], int | bool) or name == "acc"
        )
        if not (same and verdicts):
            differ.append(their["doc_id"])
    return differ


@pytest.mark.parametrize(
    "config",
    [
        CHOICE,
        pytest.param(GENERATED, marks=pytest.mark.full),
        pytest.param(LIKELIHOOD, marks=pytest.mark.full),
        pytest.param(ROLLING, marks=pytest.mark.full),
    ],
    ids=lambda config: config["output_type"],
)
def test_no_item_differs(made: Made, client: LocalCompletionsAPI, config: dict[str, Any]) -> None:
    """After two of these prompts, the model's next token ends the text."""
    assert differing(made, client, config, rows(7, 130 + N)[130:]) == []


@pytest.mark.full
def test_no_item_of_a_thousand_differs(made: Made, client: LocalCompletionsAPI) -> None:
    assert differing(made, client, CHOICE, rows(7, 1000)) == []
