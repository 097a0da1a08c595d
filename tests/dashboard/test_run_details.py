"""The parts of a run's page other than its charts."""

from pathlib import Path

from deskside.dashboard.run_details import (
    cost_text,
    key_numbers,
    newest_values,
    notable,
    option_rows,
    samples,
)
from deskside.dashboard.run_table import RUN, TableRow
from deskside.run.record import RunRecord, read_run
from tests.dashboard import made_up


def record(config: dict[str, object], **summary: object) -> RunRecord:
    return RunRecord(Path("r"), {"config": config}, {}, {}, dict(summary))


def test_numbers_that_were_not_measured_are_none() -> None:
    row = TableRow("a", RUN, "", "finished", bpb=1.5, seconds=90.0)
    numbers = key_numbers(row, {"loss": 2.0, "tokens": 1000})
    assert (numbers["best bits per byte"], numbers["training loss"], numbers["tokens"]) == (
        "1.5000",
        "2.0000",
        "1,000",
    )
    assert [key for key, value in numbers.items() if value is None] == [
        "tokens/s", "MFU", "memory, GiB", "power, W", "electricity",
    ]  # fmt: skip


def test_a_run_without_bits_per_byte_shows_the_result_of_its_objective() -> None:
    row = TableRow("a", RUN, "", "finished")
    assert key_numbers(row, {"val_reward": 0.5})["held-out reward"] == "0.500"
    assert key_numbers(row, {"val_accuracy": 0.25, "val_margin": 0.1})["held-out accuracy"] == "25.0 %"
    assert key_numbers(row, {"val_margin": 0.1, "val_loss": 0.4})["held-out margin"] == "0.100"
    assert key_numbers(row, {"val_loss": 0.4})["held-out loss"] == "0.4000"


def test_options_that_differ() -> None:
    records = {
        "a": record({"seed": 1, "optim": {"name": "muon", "lr": 0.1}}),
        "b": record({"seed": 1, "optim": {"name": "adamw"}}),
    }
    assert option_rows(records, only_different=True) == [
        {"option": "optim.name", "a": "muon", "b": "adamw"},
        {"option": "optim.lr", "a": "0.1", "b": "(none)"},
    ]
    assert option_rows(records, only_different=False)[0]["option"] == "seed"


def test_samples_keep_their_order_and_other_answers() -> None:
    texts = samples(
        record({}, samples=[{"prompt": "p", "text": "t", "before": "b"}, "damaged", {"language": "hi"}])
    )
    assert [(text.title, text.prompt, text.text, text.others) for text in texts] == [
        ("", "p", "t", {"before": "b"}),
        ("hi", "", "", {}),
    ]


def test_events_about_trouble() -> None:
    lines = ["step 5 saved", "Went back to step 4", "resumed at step 4"]
    assert notable(lines) == lines[1:]


def test_newest_values_skip_what_is_not_a_number(tmp_path: Path) -> None:
    made_up.run(tmp_path / "r")
    assert newest_values(read_run(tmp_path / "r").metrics)["val_bpb"] == made_up.row(60)["val_bpb"]
    assert newest_values([{"loss": 1.0}, {"loss": None, "note": "x"}]) == {"loss": 1.0}


def test_a_cost_below_a_cent_is_said_to_be() -> None:
    assert (cost_text(0.004), cost_text(0.5), cost_text(123.4)) == ("< $0.01", "$0.50", "$123")
