"""The terminal output of every command: no line is too wide, no word is cut, and printed commands can be pasted."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from deskside.cli import answer, doctor, go_pipeline, probe, search
from deskside.cli import study as study_command
from deskside.cli.commands import COMMANDS
from deskside.cli.main import main
from deskside.cli.options import Command
from deskside.doctor import examine
from deskside.measurements.store import Machine, open_store
from deskside.plan.planner import make_plan
from deskside.plan.result import Plan
from deskside.probe.sweep import SweepResult
from deskside.run.directory import RunDirectory
from deskside.study.execute.study_folder import StudyFolder
from deskside.study.search.edges import Edge, Edges
from deskside.study.search.outcome import Outcome, SearchTrial
from deskside.study.search.search_folder import SearchFolder
from deskside.study.stats.compare import compare
from deskside.utils.console import COMMAND, say
from tests.doctor import samples
from tests.measurements.test_store import MACHINE
from tests.probe.test_table import SMALL, make_result
from tests.serve.made_run import MadeRun, make
from tests.study.made import results as made_results

Capture = pytest.CaptureFixture[str]
SAMPLE = {
    "prompt": "To be",
    "text": "or not to be\nthat is the question " * 9,
    "before": "a " * 70,
    "reference": "x",
}
SUMMARY: dict[str, Any] = {
    "tokens": 3_470_000_000, "seconds": 73_000.0, "clock": "wall", "tokens_per_second": 47_355.0, "steps": 13_237,
    "precision": "nvfp4", "emulated": True, "val_bpb": 0.8491, "gzip_bpb": 3.19, "unigram_bpb": 3.54,
    "val_languages": {"en": {"bpb": 0.84}}, "samples": [SAMPLE], "val_loss": 1.25, "before": {"val_loss": 2.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, `runs/small`, and its `data` and `text.jsonl`."""
    folder: Path = tmp_path_factory.mktemp("terminal")
    made: MadeRun = make(folder)
    assert made.path == folder / "runs" / "small"
    return folder


def show_doctor() -> None:
    broken = {"verdict": "wrong numbers", "reason": "loss is not finite " * 9}
    results = samples.results(te_nvfp4=broken)
    report = {"quick": True, **examine.conclude(samples.facts(), results, quick=False)}
    doctor.summary.show(report, doctor.Printer())


def show_probe() -> None:
    machine: Machine = MACHINE
    found = [make_result(SMALL), make_result(SMALL, "skipped", "needs more memory than the card has, " * 4)]
    result = SweepResult(point_results=found)
    probe._show(result, machine, open_store("probes"), probe.ProbeOptions())


def show_study() -> None:
    study_command._print_outcome(
        StudyFolder(Path("st")),
        compare(made_results(seeds=3)),
        Path("st/report.html"),
        "deskside study st --resume",
    )


def show_run() -> None:
    run = RunDirectory(Path("runs/small"))
    answer._print_pretrained(run, SUMMARY, run.path / "report.html")
    answer._print_finetuned(run, "sft", SUMMARY, run.path / "report.html")


def show_go() -> None:
    run = RunDirectory(Path("runs/small"))
    go_pipeline.print_outcome(run, SUMMARY, run.path / "report.html")


def show_search() -> None:
    reason = "its micro-batch of 1 row needs 30.1 GiB, and the card has 24 GiB " * 2
    trials = [
        SearchTrial(0, "finished", {"optim.lr": 0.02}, 1.5, 60.0, "", "runs/0"),
        SearchTrial(1, "finished", {"optim.lr": 0.0123}, 1.25, 120.0, "", "runs/1"),
        SearchTrial(2, "infeasible", {"optim.lr": 0.1}, None, None, reason, "runs/2"),
    ]
    name, answer = (
        "search-for-settings-of-a-model",
        "With optim.lr 0.0123 it needs 0.25 bits per byte less. " * 2,
    )
    outcome = Outcome(name, "tpe", True, 10.0, 1, "", trials, [], winner=1, answer=answer)
    over = (
        "optim.lr=0.00154:0.1,optim.embedding_lr,optim.weight_decay,batch.tokens,model.depth,schedule.decay"
    )
    edge = Edge("optim.lr", 0.0123, "0.0123 to 0.8, logarithmic", "low", further=True)
    command = f"search 124m --hours 10 --out searches/{name}-further --over {over}"
    outcome = replace(outcome, edges=Edges((edge,), over, command))
    folder = SearchFolder(Path("searches") / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "winner.toml").touch()
    search._print_answer(folder, outcome, folder.path / "report.html")


def stop() -> None:
    say(
        "stopped by SIGINT; continue with: deskside study studies/architecture-of-a-model --resume --again oom,failed"
    )


# name -> the command line (with the exit code), or a function that prints the command's final output
PAGES: dict[str, tuple[str, int] | Callable[[], None]] = {
    "help": ("--help", 0),
    **{f"help of {name}": (f"{name} --help", 0) for name in COMMANDS},
    "plan": ("plan --gpu rtx4090 --hours 24", 0),
    "plan details": ("plan --gpu rtx4090 --hours 24 --details", 0),
    "plan yes-if": ("plan --gpu rtx4090 --params 3B --gpus 4 --details", 0),
    "plan no": ("plan --gpu 'RTX 3060 12GB' --params 13B", 1),
    "plan claims": ("plan --gpu rtx5090 --depth 24 --claim-step-seconds 1 --claim-watts 450", 0),
    "plan adapters": (
        "plan --gpu rtx4090 --preset 124m --adapter.rank 16 --optim.name adamw --tokens 10M",
        0,
    ),
    "plan explain": ("plan --gpu rtx4090 --hours 24 --explain memory.activations", 0),
    "plan explain list": ("plan --gpu rtx4090 --hours 24 --explain list", 0),
    "cards": ("models --gpu list", 0),
    "models": ("models", 0),
    "models of a card": ("models SmolLM2-135M --gpu rtx4090", 0),
    "presets": ("presets", 0),
    "runs": ("runs", 0),
    "one run": ("runs runs/small", 0),
    "facts": ("facts list", 0),
    "facts of a card": ("facts list --gpu h200", 0),
    "records": ("records list", 0),
    "dry run": ("train 124m --data.path data --hours 2 --dry-run", 0),
    "dry run of a study": ("study precision-quick --dry-run", 0),
    "data prepare": ("data prepare text.jsonl --out prepared --vocab-size 300 --workers 1 --no-resume", 0),
    "data show": ("data show data", 0),
    "data curate": ("data curate text.jsonl --out curated --no-resume --workers 1", 0),
    "data verify": ("data verify data", 0),
    "eval": ("eval runs/small --device cpu --long-context 300 --trials 1 --long-tasks passkey", 0),
    "export": ("export runs/small --to hf --out exported", 0),
    "kept trials": ("doctor --trials", 0),
    "wrong usage": ("train --init runs/small --resume runs/small --hours 3", 2),
    "no prepared data": ("go --hours 3 --yes", 2),
    "doctor": show_doctor,
    "probe": show_probe,
    "study": show_study,
    "train and sft": show_run,
    "go": show_go,
    "search": show_search,
    "stopped": stop,
}


NARROW = (
    "cards",
    "presets",
    "dry run",
    "dry run of a study",
    "doctor",
    "probe",
    "study",
    "stopped",
    "data show",
)


def shown(page: str, columns: int, patch: pytest.MonkeyPatch, capsys: Capture) -> str:
    """Return what a page prints on both streams, in a terminal of this width."""
    patch.setenv("COLUMNS", str(columns))
    patch.setenv("TERM", "dumb")  # a terminal without progress bars
    patch.setattr(sys.stderr, "isatty", lambda: True)
    printing = PAGES[page]
    if isinstance(printing, tuple):
        line, code = printing
        try:
            assert main(shlex.split(line)) == code
        except SystemExit as stopped:
            assert stopped.code == code
    else:
        printing()
    out, err = capsys.readouterr()
    return f"{out}\n{err}"


def words(text: str) -> set[str]:
    """Return the words, without the backslashes of commands and the colon after a label.

    Numbers are replaced by 0, because they may be times.
    """
    return {re.sub(r"\d+(?:[.,]\d+)*", "0", word).rstrip(":") for word in text.split()} - {"\\"}


def printed_commands(text: str) -> list[str]:
    """Return the commands on lines of their own, indented or below a line that ends in a colon."""
    found, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("  deskside ") or (
            line.startswith("deskside ") and lines[number - 1].endswith(":")
        ):
            end = number
            while lines[end].endswith("\\") or "\n".join(lines[number : end + 1]).count("'") % 2:
                end += 1
            found.append("\n".join(lines[number : end + 1]).replace("\\\n", " "))
    return found


def parse(command: str) -> None:
    """Parse a printed command with the parser of its command. Raises UsageError."""
    program, name, *arguments = shlex.split(command.partition(" > ")[0])
    assert program == "deskside"
    module = import_module(COMMANDS[name][0])
    if hasattr(module, "COMMANDS"):  # data and facts have subcommands
        parser: Command[Any] = module.COMMANDS[arguments.pop(0)]
    else:
        parser = module.COMMAND
    parser.parse_config(arguments)


@pytest.fixture(scope="module")
def planned() -> Callable[..., Plan]:
    """Return `make_plan` with a cache that computes each plan once for all pages and widths."""
    plans: dict[str, Plan] = {}

    def plan(*arguments: Any) -> Plan:
        key = repr(arguments)
        if key not in plans:
            plans[key] = make_plan(*arguments)
        return plans[key]

    return plan


@pytest.mark.parametrize("page", PAGES)
def test_a_page(
    page: str,
    folder: Path,
    planned: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("deskside.cli.plan.make_plan", planned)
    monkeypatch.setenv("DESKSIDE_CACHE", str(folder / "cache"))
    wide = shown(page, 200, monkeypatch, capsys)
    for columns in (80, 60):
        if columns == 60 and page not in NARROW:
            continue
        text = shown(page, columns, monkeypatch, capsys)
        assert text.strip()
        too_wide = [line for line in text.splitlines() if len(line) > columns and len(line.split()) > 1]
        assert not too_wide
        assert words(text) <= words(wide), f"cut: {words(text) - words(wide)}"
        for command in printed_commands(text):
            parse(command)
    if page in (
        "plan",
        "doctor",
        "probe",
        "study",
        "train and sft",
        "stopped",
        "data prepare",
        "data curate",
        "eval",
        "go",
        "search",
    ):
        assert printed_commands(text)


def test_commands_in_messages_are_found() -> None:
    """Errors that end in a command have it after a colon, so that it is moved to its own lines."""
    text = "stopped; continue with: deskside study st --resume, or give another directory with --out"
    assert COMMAND.findall(text) == ["deskside study st --resume"]


def test_json_is_unchanged_by_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(folder)
    found = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert main(["plan", "--gpu", "rtx4090", "--hours", "24", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[0]["bands"]
