"""The report of synthetic runs, from complete to badly damaged."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.cli.report import run
from deskside.report import run_figures
from deskside.report.document import render_html
from deskside.report.run_answer import verdict
from deskside.report.run_plan import recipe_used
from deskside.report.run_report import compose
from deskside.report.write import write_report
from deskside.run.record import read_run
from deskside.run.validation import BASELINES
from deskside.utils.errors import UsageError
from deskside.utils.files import TEMPORARY_SUFFIX

CHARTS = ("loss", "val_bpb", "learning_rate", "gradient_norm", "throughput", "memory", "power")


def metric(step: int, **other: Any) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": step * 16384,
        "seconds": 0.42 * step,
        "loss": 4.0 + 6.2 * math.exp(-step / 60) - 0.002 * step + 0.15 * math.sin(step**2),
        "val_bpb": 5.0 * math.exp(-step / 50) + 2.2 - 0.0006 * step if step % 50 == 0 else None,
        "lr": 0.02 * min(1.0, step / 40, (400 - step) / 80 + 0.01),
        "grad_norm": 0.8,
        "tokens_per_second": 39000 + 900 * math.sin(step**2),
        "mfu": 0.412,
        "memory_gib": 3.5 if step < 200 else 3.8,
        "watts": 290.0,
        "celsius": 71,
        "skipped": step == 120,
        "throttled": 250 <= step <= 256,
        **other,
    }


def revision(step: int, remaining: int, step_seconds: float, reason: str) -> dict[str, Any]:
    elapsed = 4 + 0.42 * step
    values = (step, step / 400, remaining, elapsed, step_seconds, reason)
    return dict(
        zip(
            ("step", "progress", "remaining", "elapsed_seconds", "step_seconds", "reason"),
            values,
            strict=True,
        )
    )


def make_run(folder: Path, steps: int = 400) -> Path:
    files: dict[str, Any] = {
        "run.json": {
            "schema_version": 1,
            "name": "demo",
            "created": "2026-11-20 17:30:02 UTC",
            "command": ["deskside", "train", "demo", "--hours", "0.05"],
            "config": {
                "seed": 7,
                "model": {"hidden_size": 256, "num_hidden_layers": 12},
                "optim": {"name": "adamw"},
            },
        },
        "environment.json": {
            "deskside": "0.1.0",
            "torch": "2.13.0",
            "cpu": "Some CPU @ 2.5 GHz",
            "memory_gib": 125.8,
            "gpu": {"name": "NVIDIA GeForce RTX 4090", "memory_gib": 24.0, "driver": "590.44"},
            "matmul_peak": {"value": 158.3, "unit": "TFLOP/s", "provenance": "measured"},
            "packages": {"triton": None, "numpy": "2.4.6"},
        },
        "plan.json": {
            "length": "3m",
            "clock": "wall: from the start of the process, compile included",
            "initial": {"steps": 380, "tokens": 6225920, "seconds": 180, "step_seconds": 0.47, "memory_gib": 4.1},
            "revisions": [revision(0, 380, 0.47, "dry step"), revision(40, 360, 0.42, "faster")],
            "fit": [
                {
                    "micro_rows": 8,
                    "accumulation": 2,
                    "attempts": [
                        {"micro_rows": 16, "fits": False, "seconds": None},
                        {"micro_rows": 8, "fits": True, "seconds": 0.44},
                    ],
                }
            ],
            "attention": {
                "full": {
                    "name": "cudnn",
                    "shared_rows": "gathered-cudnn",
                    "milliseconds": {"cudnn": 1.93, "sdpa": 2.4},
                    "errors": {"cudnn": 2e-3},
                    "rejected": {"flex": "is slow"},
                }
            },
            "precision": {"chosen": "fp8-delayed", "asked": "fp8", "errors": {"output": 4e-2}, "native": False},
            "compile": "fused",
            "scaling_tokens": 6225920,
            "save_seconds": 1.25,
        },
        "summary.json": {
            "status": "finished",
            "val_bpb": 1.962,
            "val_loss": 4.1132,
            "gzip_bpb": 3.331,
            "unigram_bpb": 4.612,
            "tokens": 6553600,
            "steps": 400,
            "seconds": 172.4,
            "tokens_per_second": 38991,
            "mfu": 0.412,
            "bpb_by_position": [
                {"start": 0, "stop": 1024, "bpb": 2.125, "loss": 4.2, "tokens": 1000},
                {"start": 1024, "stop": 2048, "bpb": 1.875, "loss": 4.0, "tokens": 500},
            ],
            "peak_memory_gib": 3.81,
            "parameters": 12_345_678,
            "clock": "wall",
            "samples": [
                {"prompt": "To be, or not", "text": " to be: that is\nthe question"},
                {"prompt": "<script>alert(1)</script>", "text": "``` & <b>bold</b> | *star* \ud800 \x07"},
            ],
        },
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    lines = [json.dumps(metric(step)) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.log").write_text(
        "2026-11-20 17:30:05 run begins\n"
        "2026-11-20 17:31:07 step 120 is skipped: gradient norm 91.2 is above 8.1\n"
        "2026-11-20 17:32:00 resumed from step 200\n"
    )
    return folder


class Page(HTMLParser):
    """Collects every tag with its attributes, the text, and the tags that were never closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def report(folder: Path) -> tuple[Page, str]:
    path = write_report(folder)
    page = Page(path.read_text("utf-8"))
    assert not page.open
    return page, (folder / "report.md").read_text("utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Page, str]:
    """The folder of a complete run, its page and its Markdown."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "demo")
    return (folder, *report(folder))


def test_whole_run(whole: tuple[Path, Page, str]) -> None:
    folder, page, markdown = whole
    plots = {path.name for path in (folder / "plots").iterdir()}
    assert plots == {f"{name}.svg" for name in CHARTS}
    for text in ("".join(page.words), markdown):
        text = " ".join(text.split())
        assert all(
            number in text for number in ("41 %", "1.962 bits per byte", "3.331 of gzip", "4.612 of unigram")
        )
        assert "158.3 TFLOP/s" in text
        assert "1 of 400 logged steps skipped, 0 rollbacks, 1 resumes" in text
        assert "gathered-cudnn" in text
        assert "cudnn, 1.93 ms" in text and "optim.name" in text and "deskside chat" in text
        assert "deskside train --resume" not in text
    assert "| steps | 380 | 400 | 400 | +5.26 % |" in markdown
    assert "| time | 3 min 00 s |   | 2 min 52 s | -4.22 % |" in markdown
    assert markdown.count("| precision | fp8-delayed, emulated |") == 2
    assert "12.3M parameters, trained on 6.55M tokens in 2 min 52 s" in " ".join(markdown.split())
    energy = 290 * 16384 * sum(1 / metric(step)["tokens_per_second"] for step in range(1, 401)) / 3.6e6
    assert f"energy: {1000 * energy:.1f} Wh (one GPU; 0.22 cents at $0.16 per kWh)" in " ".join(
        markdown.split()
    )
    assert "| 1,024 to 2,048 | 1.8750 | 500 |" in markdown
    assert "| model.hidden_size | 256 | 768 |" in markdown
    assert "| seed | 7 | 1 |" in markdown
    assert (
        "| scaling tokens | 6,225,920 |   |" in markdown
        and "| save seconds | 1.25 s | measured |" in markdown
    )


@pytest.mark.usefixtures("no_figures")
def test_long_context_tasks_of_the_last_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    cells = [
        {"task": task, "length": length, "depth": depth, "accuracy": accuracy}
        for task, length, depth, accuracy in (
            ("passkey", 512, 0.0, 0.25),
            ("passkey", 512, 0.5, 1.0),
            ("passkey", 2048, 0.0, "?"),
            ("frequent_words", 512, None, 1 / 3),
        )
    ]
    (folder / "long_context.json").write_text(json.dumps({"seed": 0, "step": 400, "cells": cells}))
    _, markdown = report(folder)
    assert "| task | tokens | whole text | depth 0 % | depth 50 % |" in markdown
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in markdown.splitlines()]
    assert ["passkey", "512", "", "25 %", "100 %"] in rows and [
        "passkey",
        "2,048",
        "",
        "not known",
        "",
    ] in rows
    assert ["frequent_words", "512", "33 %", "", ""] in rows
    (folder / "long_context.json").write_text("{")
    assert "long_context.json" in report(folder)[1]


@pytest.mark.usefixtures("no_figures")
def test_predicted_against_measured(tmp_path: Path) -> None:
    """The summary of `deskside go` has plan, pilot and measurement side by side. Missing values are not an error."""
    folder = make_run(tmp_path)
    file = folder / "summary.json"
    summary = json.loads(file.read_text("utf-8"))
    predicted = {
        "tokens_per_second": {
            "plan": [400000.0, 500000.0, 600000.0],
            "pilot": 480000.0,
            "measured": 550000.0,
        },
        "memory_gib": {"plan": None, "pilot": 20.5, "measured": 21.15},
        "bpb": {
            "plan": [1.0, 1.1, 1.2],
            "pilot": {"low": 1.05, "expected": 1.12, "high": 1.2},
            "measured": 1.1344,
        },
        "tokens": {"plan": [1.0, "x", 2.0], "pilot": None, "measured": None},
    }
    told = {"plan_source": "modelled from it", "budget_hours": 0.12}
    file.write_text(json.dumps({**summary, "predicted": predicted, **told}), "utf-8")
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", write_report(folder).read_text("utf-8")))
    assert "speed, tokens/s 500,000 (400,000 to 600,000) 480,000 550,000 +10.0 % in the range" in page
    assert (
        "validation loss, bits per byte 1.100 (1.000 to 1.200) 1.120 (1.050 to 1.200) 1.134 +3.13 % in the range"
        in page
    )
    assert "peak memory, GiB 20.50 21.15" in page and "tokens, in total not known" in page
    assert "Budget: 0.12 hours" in page and "The plan was modelled from it." in page
    damages: list[Any] = [{"bpb": 3}, [], "x", {"bpb": {"plan": [1, 2, 3], "measured": "y", "pilot": [1]}}]
    for damaged in damages:
        file.write_text(json.dumps({**summary, "predicted": damaged}), "utf-8")
        assert render_html(compose(read_run(folder), [], []))


def test_html_is_one_file_without_scripts_or_links(whole: tuple[Path, Page, str]) -> None:
    folder, page, _ = whole
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "b"}
    assert all((attrs["href"] or "").startswith("#") for tag, attrs in page.tags if "href" in attrs)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(figures) == len(CHARTS) and all(f["role"] == "img" and f["aria-label"] for f in figures)
    identities = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(identities)) == len(identities)
    assert "http" not in (folder / "report.html").read_text("utf-8")
    assert "<script>alert(1)</script>" in "".join(page.words)  # shown as text


def test_markdown_wraps_and_keeps_samples_apart(whole: tuple[Path, Page, str]) -> None:
    markdown = whole[2]
    prose = [
        line
        for line in re.sub(r"(?ms)^(`{3,})text.*?^\1$", "", markdown).splitlines()
        if not line.startswith("|")
    ]
    assert max(map(len, prose)) <= 80
    assert "\n````text\n``` & <b>bold</b>" in markdown  # a fence longer than the one in the sample


def test_second_report_replaces_the_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    report(folder)
    alone = {key: value for key, value in metric(3).items() if key != "val_bpb"}  # old rows have null there
    (folder / "metrics.jsonl").write_text(json.dumps(alone) + "\n")
    report(folder)
    assert (folder / "plots" / "val_bpb.svg").exists()  # the evaluation at the end
    (folder / "summary.json").unlink()
    report(folder)
    assert not (folder / "plots" / "val_bpb.svg").exists()
    assert not list(folder.glob(f"*{TEMPORARY_SUFFIX}"))


def test_one_line_of_metrics_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metric(1)) + "\n")
    page, markdown = report(tmp_path)
    text = "".join(page.words)
    assert "No verdict yet" in text
    for name in ("run.json", "environment.json", "plan.json", "summary.json", "events.log"):
        assert f"{name} is missing" in text
        assert f"{name} is missing" in markdown
    assert "--resume" not in text  # there is no run.json to continue with


def test_unfinished_run_uses_the_newest_validation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", steps=120)
    (folder / "summary.json").unlink()
    page, _ = report(folder)
    bpb = metric(100)["val_bpb"]
    assert f"{bpb:.3f} bits per byte" in "".join(page.words)
    assert "not finished" in "".join(page.words)


def test_half_written_and_damaged_lines_are_told_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", steps=30)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('not json\n[1]\n{"step": 31, "tok')
    (folder / "plan.json").write_text("{")
    page, _ = report(folder)
    text = "".join(page.words)
    assert "last line of metrics.jsonl is incomplete" in text
    assert "2 damaged lines" in text
    assert "plan.json is not valid JSON" in text


@pytest.mark.parametrize(
    ("objective", "unit"), [("sft", "1.250 nats"), ("dpo", "75.0 %"), ("kto", "1.250"), ("grpo", "0.500")]
)
def test_only_losses_of_tokens_have_a_unit(objective: str, unit: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", steps=20)
    summary = json.loads((folder / "summary.json").read_text())
    found = {"dpo": {"val_accuracy": 0.75}, "grpo": {"val_reward": 0.5}}.get(objective, {})
    before = dict.fromkeys(found, 0.25) | {"val_loss": 2.5}
    summary |= {"objective": objective, "val_loss": 1.25, "val_bpb": None, "before": before, **found}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{**metric(step, accuracy=0.5), "val_bpb": None} for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = read_run(folder)
    assert unit in verdict(record)
    images, _ = run_figures.draw(record, folder / "plots")
    tokens = objective == "sft"
    assert ("nats per token" in (folder / "plots" / "loss.svg").read_text("utf-8")) == tokens
    assert ("nats per token" in render_html(compose(record, images, []))) == tokens


@pytest.mark.usefixtures("no_figures")
def test_a_model_worse_than_gzip_is_said_to_be(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "val_bpb": 3.5}))
    page, _ = report(folder)
    assert "Not yet better than gzip: 3.500" in "".join(page.words)


def test_a_damaged_summary_is_no_unfinished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", steps=20)
    (folder / "summary.json").write_text('{"status": "fin')
    record = read_run(folder)
    assert record.state == "damaged"
    assert not any("not finished" in words for words in [verdict(record), *record.problems])


@pytest.mark.parametrize(
    ("bpb", "missed"), [(2.0, []), (2.6, ["a unigram model"]), (3.7, ["gzip", "a unigram model"])]
)
def test_the_headline_names_every_baseline_that_is_not_reached(
    bpb: float, missed: list[str], tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"val_bpb": bpb, "gzip_bpb": 3.6, "unigram_bpb": 2.5}))
    headline = verdict(read_run(tmp_path)).split(":")[0]
    assert [
        name for name in BASELINES.values() if name in headline.removeprefix("Better than gzip")
    ] == missed
    assert ("Better than gzip by 44 %" in headline) == (not missed)


@pytest.mark.parametrize(
    ("share", "said"), [(0.06, "6 % of "), (0.0001, "under 1 % of "), (0.9999, "99 % of ")]
)
def test_a_result_on_a_part_of_the_text_says_so(share: float, said: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"val_bpb": 1.5, "val_share": share}))
    assert said in verdict(read_run(tmp_path))


@pytest.mark.usefixtures("no_figures")
def test_a_run_that_overfits_says_which_weights_it_has(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "overfits": True, "best_step": 1250}))
    page, _ = report(folder)
    text = "".join(page.words)
    assert "overfits" in text and "step 1,250" in text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
KNOWN = [
    "step",
    "tokens",
    "seconds",
    "loss",
    "val_bpb",
    "lr",
    "memory_gib",
    "throttled",
    "status",
    "gzip_bpb",
    "samples",
    "parameters",
    "clock",
    "config",
    "model",
    "optim",
    "name",
    "revisions",
    "initial",
    "fit",
    "attempts",
    "attention",
    "remaining",
    "prompt",
    "text",
    "value",
    "unit",
    "command",
]
FILE = st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=6)


@given(st.lists(FILE, min_size=4, max_size=4), st.lists(FILE, max_size=4), st.binary(max_size=40))
@settings(max_examples=25, deadline=None)
def test_no_content_makes_it_fail(
    tmp_path_factory: pytest.TempPathFactory, files: list[Any], lines: list[Any], tail: bytes
) -> None:
    folder = tmp_path_factory.mktemp("run")
    for name, value in zip(("run", "environment", "plan", "summary"), files, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(value))
    rows = [json.dumps({"step": i, "tokens": 10 * i, **line}) for i, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_bytes("\n".join(rows).encode() + b"\n" + tail)
    (folder / "events.log").write_bytes(tail)
    report(folder)


def test_paths_that_are_no_run(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "no such run"), (tmp_path, "not a run directory")):
        with pytest.raises(UsageError, match=message):
            write_report(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        write_report(tmp_path / "file")


def test_command_prints_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "demo", steps=30)
    (folder / "plan.json").unlink()
    assert run([str(folder), "--json"]) == 0
    streams = capsys.readouterr()
    told = json.loads(streams.out)
    assert Path(told["report"]).is_file()
    assert len(told["plots"]) == len(CHARTS)
    assert "plan.json is missing" in streams.err


@pytest.mark.parametrize(
    ("layers", "experts", "shown"),
    [
        (True, None, "fp8-delayed"),
        (False, None, "fp8-delayed, emulated"),
        (True, ("fp8-rowwise", True), "fp8-delayed; experts fp8-rowwise"),
        (True, ("fp8-rowwise", False), "fp8-delayed; experts fp8-rowwise, emulated"),
        (True, ("fp8-delayed", True), "fp8-delayed"),
    ],
)
def test_the_recipe_of_experts_is_shown_if_it_is_another_one(
    layers: bool, experts: tuple[str, bool] | None, shown: str
) -> None:
    facts: dict[str, Any] = {"chosen": "fp8-delayed", "native": layers}
    if experts is not None:
        facts["experts"] = {"chosen": experts[0], "native": experts[1], "errors": {}}
    assert recipe_used({"precision": facts}) == shown
    assert recipe_used({}) == ""
