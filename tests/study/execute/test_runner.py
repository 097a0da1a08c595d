"""The runner with fake trials: every way to end is a status, nothing finished
is repeated, the disk does not fill up.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from deskside.config.run import RunConfig
from deskside.study import results as files
from deskside.study.execute.devices import Device, choose
from deskside.study.execute.executor import LocalExecutor, RunningTrial
from deskside.study.execute.journal import FINAL, StudyJournal
from deskside.study.execute.runner import MAX_LOSSES, Runner, prepare_all
from deskside.study.execute.study_folder import StudyFolder, StudyPlan
from deskside.study.execute.study_progress import RemainingTime, read_progress
from deskside.study.execute.trial_process import LOST, TrialEnd, TrialJob, TrialProcess
from deskside.study.metrics import BY_KEY
from deskside.study.results import Results, Trial
from deskside.study.spec.expand import PlannedArm
from deskside.utils.errors import RunError, UsageError
from tests.study import fake_trials, tiny_study
from tests.study.tiny_study import ARMS
from tests.train import tiny_run


def trials(results: Results) -> dict[str, Trial]:
    return {f"{arm.id}-s{trial.seed}": trial for arm in results.arms for trial in arm.trials}


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    return tiny_study.begin(tmp_path / "study")


def started(folder: StudyFolder) -> list[str]:
    lines = [json.loads(line) for line in (folder.path / "journal.jsonl").read_text().splitlines()]
    return [f"{line['arm']}-s{line['seed']}" for line in lines if line["event"] == "started"]


def test_every_ending_is_a_status_and_the_study_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_study.begin(tmp_path / "study", seeds=3)
    endings = {
        "die": ("killed", "SIGKILL"),
        "segfault": ("killed", "SIGSEGV"),
        "memory": ("oom", "out of memory with a single row"),
        "refuse": ("refused", "optim.lr: not here"),
        "fail": ("failed", "the loss machine broke"),
        "bug": ("failed", "IndexError: list index out of range"),
        "exit": ("failed", "exit code 3"),
        "diverge": ("diverged", "the run went back 3 times already"),
        "garbage": ("finished", ""),
        "finish": ("finished", ""),
    }
    names = [f"{arm.id}-s{seed}" for arm, seed in folder.read().trials()]
    acts = dict(zip(names, [*endings, "finish", "finish"], strict=True))
    runner = tiny_study.runner(
        folder, devices=2, **{name.replace("-", "__"): what for name, what in acts.items()}
    )
    assert runner.run(runner.remaining()) is None
    found = trials(files.read(folder.path))
    for name, what in acts.items():
        status, reason = endings[what]
        assert found[name].status == status, (what, found[name])
        assert reason in found[name].reason and "\n" not in found[name].reason
        assert found[name].attempts == 1 and found[name].run == f"runs/{name}"
        assert found[name].metrics["total_seconds"] > 0
        assert found[name].metrics.keys() <= BY_KEY.keys()
    # Invalid measurements are missing, not zero.
    garbage = found[next(name for name, what in acts.items() if what == "garbage")]
    assert not {"val_bpb", "tokens_per_second", "mfu", "watts"} & garbage.metrics.keys()
    finished = found[next(name for name, what in acts.items() if what == "finish")]
    assert finished.metrics["tokens_per_second"] == 50 and finished.metrics["seconds"] == 8
    assert {t.device for t in found.values()} == {"cpu:0", "cpu:1"}
    results = files.read(folder.path)
    assert results.complete and results.machine["cpu"] == "made up"
    told = capsys.readouterr().err
    assert told.count(": starts on cpu") == len(names) and "[12/12 done]" in told
    assert "\x1b" not in told  # a trial's own output goes to its log
    assert "red" in (folder.run(ARMS[0], 1) / "output.log").read_text()
    # Blocks by seed, in the order of study.json, each trial with its own seed.
    order = started(folder)
    assert order == names and [name[-1] for name in order] == ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    for name in order:
        config = json.loads((folder.path / "runs" / name / "run.json").read_text())["config"]
        assert config["seed"] == int(name[-1])
        if acts[name] == "finish":
            assert found[name].metrics["val_bpb"] == pytest.approx(1.5 + int(name[-1]) / 100)
    # Only needed files stay on the disk.
    for name in names:
        run = folder.path / "runs" / name
        assert not (run / "checkpoints").exists() and not (run / "model").exists()
        assert (run / "output.log").exists()
    # The table has a row for each trial.
    rows = {
        f"{row['arm']}-s{row['seed']}": row
        for row in pq.read_table(folder.path / "results.parquet").to_pylist()
    }
    assert set(rows) == set(names)
    for name, row in rows.items():
        assert row["status"] == found[name].status and row["val_bpb"] == found[name].metrics.get("val_bpb")
        assert row["watts"] is None and f"depth_{row['level_depth']}-tied_{row['level_tied']}" == row["arm"]
    # Everything is finished: nothing is left to run, and a new process gets the same results.
    again = tiny_study.runner(folder)
    assert again.remaining() == []
    assert trials(again.write_results()) == found


def test_models_are_kept_when_they_are_asked_for(folder: StudyFolder) -> None:
    runner = tiny_study.runner(folder, depth_two__tied_no__s1="garbage")  # which writes no model
    runner.keep_models = True
    runner.run(runner.remaining())
    assert (folder.run(ARMS[1], 1) / "model").exists() and not (
        folder.run(ARMS[1], 1) / "checkpoints"
    ).exists()
    assert (folder.run(ARMS[0], 1) / "checkpoints").exists()  # the only place where its weights may be


def test_chosen_statuses_are_run_again_from_the_beginning(folder: StudyFolder) -> None:
    runner = tiny_study.runner(folder, depth_two__tied_no__s1="memory", depth_two__tied_yes__s1="die")
    runner.run(runner.remaining())
    stale = folder.run(ARMS[0], 1) / "stale"
    stale.touch()
    again = tiny_study.runner(folder)
    todo = again.remaining(("oom",))
    assert [arm.id for arm, _ in todo] == [ARMS[0]]
    again.run(todo)
    found = trials(files.read(folder.path))
    assert found[f"{ARMS[0]}-s1"].status == "finished" and found[f"{ARMS[0]}-s1"].attempts == 2
    assert found[f"{ARMS[1]}-s1"].status == "killed" and not stale.exists()


def test_a_full_disk_ends_the_study_which_can_be_resumed(folder: StudyFolder) -> None:
    first = folder.read().trials()[0][0].id
    runner = tiny_study.runner(folder, **{f"{first}-s1".replace("-", "__"): "full"})
    with pytest.raises(RunError, match=r"runs/.*cannot be written"):
        runner.run(runner.remaining())
    assert len(started(folder)) == 1
    assert StudyJournal(folder.path).history(first, 1).status == "pending"
    again = tiny_study.runner(folder)
    assert len(again.remaining()) == 4
    again.run(again.remaining())
    assert files.read(folder.path).complete


def test_what_the_study_did_not_see_end_is_told_by_the_directories(folder: StudyFolder) -> None:
    """Simulates kill -9 of the study: one trial finished unnoticed, one failed unnoticed, and one was running."""
    journal = StudyJournal(folder.path)
    for number, arm in enumerate(ARMS[:3]):
        run = folder.run(arm, 1)
        (run / "checkpoints").mkdir(parents=True)
        journal.started(arm, 1, "cuda:0", 1, False)
        if number == 0:
            (run / "summary.json").write_text('{"val_bpb": 1.25}')
        if number == 1:
            (run / "trial.json").write_text('{"status": "oom", "reason": "too large"}')
    runner = tiny_study.runner(folder)
    assert {arm.id for arm, _ in runner.remaining()} == set(ARMS[2:])
    runner.run(runner.remaining())
    found = trials(files.read(folder.path))
    assert found[f"{ARMS[0]}-s1"].metrics["val_bpb"] == 1.25
    assert "total_seconds" not in found[f"{ARMS[0]}-s1"].metrics  # no process saw it end
    assert (found[f"{ARMS[1]}-s1"].status, found[f"{ARMS[1]}-s1"].reason) == ("oom", "too large")
    assert found[f"{ARMS[2]}-s1"].status == "finished" and found[f"{ARMS[2]}-s1"].attempts == 2


def test_a_run_that_a_person_has_resumed_by_hand_is_done(folder: StudyFolder) -> None:
    journal, run = StudyJournal(folder.path), folder.run(ARMS[0], 1)
    (run / "checkpoints" / "step-000000001").mkdir(parents=True)
    journal.started(ARMS[0], 1, "cpu", 1, False)
    journal.ended(ARMS[0], 1, "pending", "stopped by SIGTERM", 3.0)
    assert len(tiny_study.runner(folder).remaining()) == 4
    (run / "summary.json").write_text('{"val_bpb": 1.25}')
    runner = tiny_study.runner(folder)
    assert len(runner.remaining()) == 3 and not (run / "checkpoints").exists()
    assert trials(runner.write_results())[f"{ARMS[0]}-s1"].metrics["val_bpb"] == 1.25


def test_a_run_that_ended_unnoticed_without_a_finite_loss_has_diverged(folder: StudyFolder) -> None:
    run = folder.run(ARMS[0], 1)
    (run / "checkpoints").mkdir(parents=True)
    StudyJournal(folder.path).started(ARMS[0], 1, "cpu", 1, False)
    (run / "summary.json").write_text('{"val_bpb": null}')  # NaN
    assert tiny_study.runner(folder).journal.history(ARMS[0], 1).status == "diverged"


def test_results_are_there_while_the_study_runs(folder: StudyFolder) -> None:
    seen: list[set[str]] = []
    runner = tiny_study.runner(folder, devices=2)
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            if (folder.path / "results.json").exists():
                seen.append({trial.status for trial in trials(files.read(folder.path)).values()})

    looking = threading.Thread(target=look)
    looking.start()
    runner.run(runner.remaining())
    done.set()
    looking.join()
    assert {"running", "pending"} in seen and seen[0] <= {"running", "pending"}
    assert not any(path.name.startswith(".results") for path in folder.path.iterdir())


def test_trials_on_several_devices_run_at_the_same_time(folder: StudyFolder) -> None:
    runner = tiny_study.runner(folder, devices=4)
    most = 0
    begin, end, running = runner.start_trial, runner.finish_trial, 0

    def counting_begin(*given: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        return begin(*given)  # type: ignore[arg-type]

    def counting_end(*given: object) -> None:
        nonlocal running
        running -= 1
        end(*given)  # type: ignore[arg-type]

    runner.start_trial = counting_begin  # type: ignore[method-assign, assignment]
    runner.finish_trial = counting_end  # type: ignore[method-assign, assignment]
    runner.run(runner.remaining())
    assert most == 4
    assert len({trial.device for trial in trials(files.read(folder.path)).values()}) == 4


# The plan and the folder


def test_the_plan_comes_back_from_study_json(folder: StudyFolder) -> None:
    plan = tiny_study.plan()
    assert folder.read() == plan
    assert plan.difference(folder.read()) is None
    assert len(plan.with_seeds({"main": 3}).trials()) == 12
    with pytest.raises(UsageError, match="begun with 1, not 0"):
        plan.with_seeds({"main": 0})


def test_plans_that_differ_say_in_what(folder: StudyFolder) -> None:
    plan = folder.read()
    fewer = StudyPlan(**{**vars(plan), "arms": plan.arms[1:]})
    assert plan.difference(fewer) == f"arm {ARMS[0]} is in only one of them" == fewer.difference(plan)
    changed = json.loads((folder.path / "study.json").read_text())
    changed["arms"][2]["config"]["optim"]["lr"] = 0.5
    assert plan.difference(StudyPlan.from_json(changed)) == f"arm {ARMS[2]} has a different configuration"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema_version": 9}', '{"schema_version": 1}', "\x00"]
)
def test_a_damaged_study_is_one_line(folder: StudyFolder, text: str) -> None:
    (folder.path / "study.json").write_text(text)
    with pytest.raises(RunError, match=r"study\.json: is damaged \(.*\); restore it") as raised:
        folder.read()
    assert "\n" not in str(raised.value)


def test_a_folder_with_other_things_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"contains other files \(thesis\.tex\)"):
        tiny_study.begin(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_cannot_run_one_study(folder: StudyFolder) -> None:
    with (
        folder.lock(print),
        pytest.raises(UsageError, match="another process runs this study"),
        folder.lock(print),
    ):
        pass


# Devices and time


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [(0, "4"), (1, "GPU-abc"), (2, "6")]
    monkeypatch.setattr("deskside.study.execute.devices.visible", lambda: entries)
    monkeypatch.setattr("deskside.study.execute.devices.cpu_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield


@pytest.mark.usefixtures("cards")
def test_trials_are_spread_over_the_cards_that_are_asked_for() -> None:
    chosen = choose("2,1", {"auto"})
    assert [device.name for device in chosen] == ["cuda:2", "cuda:1"]
    assert chosen[1].environment == {"CUDA_VISIBLE_DEVICES": "GPU-abc", "OMP_NUM_THREADS": "8"}
    assert len(choose(None, {"auto"})) == 3
    assert choose("0", {"cuda"})[0].environment == {"CUDA_VISIBLE_DEVICES": "4"}
    assert choose(None, {"cpu"}) == [Device("cpu")]
    for asked, problem in (
        ("3", "there is no GPU 3; there is 0, 1, 2"),
        ("0,0", "named twice"),
        ("", "no GPU"),
    ):
        with pytest.raises(UsageError, match=problem):
            choose(asked, {"auto"})
    with pytest.raises(UsageError, match="none that torch can use"):
        choose("0", {"cpu"})


def test_the_time_left_follows_what_trials_took() -> None:
    clock = RemainingTime({"a": 10.0, "b": 20.0, "c": None}, devices=1)
    assert clock.estimate(["a", "b"]) == 30 and clock.estimate(["a", "c"]) is None and clock.estimate([]) == 0
    clock.add_finished("a", 15.0)
    assert clock.estimate(["b", "c"]) == pytest.approx(30 + 15)
    two = RemainingTime({"a": 10.0, "b": 20.0}, devices=2)
    assert two.estimate(["a", "b"]) == 15 and two.estimate(["b"]) == 20


def test_the_bar_reads_the_newest_whole_line(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "plan.json").write_text(
        '{"revisions": [{"step": 0, "remaining": 90}, {"step": 10, "remaining": 70}]}'
    )
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 3000)) + '{"st')
    assert read_progress(tmp_path) == (2999, 80)


def test_a_trial_that_hears_nothing_is_ended_at_last(
    folder: StudyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the study itself fails, running trials are asked to stop, and are killed if they do not."""
    monkeypatch.setattr("deskside.study.execute.runner.STOP_TIMEOUT", 0.5)
    runner = tiny_study.runner(folder, other="deaf")
    monkeypatch.setattr(runner.display, "update", lambda: 1 / 0 if running_long(folder) else None)
    with pytest.raises(ZeroDivisionError):
        runner.run(runner.remaining())
    state = StudyJournal(folder.path)
    assert [one.status for one in state.histories.values()] == ["pending"]
    assert all(one.status not in FINAL for one in state.histories.values())


def running_long(folder: StudyFolder) -> bool:
    return any((folder.path / "runs").glob("*/run.json")) and time.sleep(0.2) is None


class LosingExecutor(LocalExecutor):
    """Loses the first trials that it starts, like a cluster whose nodes die."""

    def __init__(self, losses: int):
        super().__init__([Device("cpu:0", fake_trials.environment())])
        self.losses = losses

    def start(self, job: TrialJob, device: Device, lock: int | None) -> RunningTrial:
        process = super().start(job, device, lock)
        if self.losses:
            self.losses -= 1
            assert isinstance(process, TrialProcess)
            process.kill()
            process.poll = lambda: TrialEnd(LOST, "its node died", 1.0)  # type: ignore[method-assign]
        return process


@pytest.mark.parametrize("losses", [1, MAX_LOSSES])
def test_a_lost_trial_is_repeated_up_to_a_limit(folder: StudyFolder, losses: int) -> None:
    runner = Runner(folder, folder.read(), LosingExecutor(losses), target=fake_trials.TARGET)
    runner.run(runner.remaining()[:1])
    (name,) = set(started(folder))
    trial = trials(files.read(folder.path))[name]
    assert trial.status == ("finished" if losses < MAX_LOSSES else "killed")
    assert trial.attempts == min(losses + 1, MAX_LOSSES) == len(started(folder))
    assert "its node died" in trial.reason or losses < MAX_LOSSES


def test_missing_data_is_prepared_once_as_the_arms_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[RunConfig] = []
    monkeypatch.setattr(
        "deskside.study.execute.runner.prepare_sources", lambda config, say: prepared.append(config)
    )
    data = {"sources": ["bundled:tiny_shakespeare.txt"]}
    configs = [tiny_run.config(tmp_path / "data", data=data, seed=seed) for seed in (7, 7, 8)]
    arms = [PlannedArm(f"a{i}", "", "", {}, f"a{i}", config, "60 steps") for i, config in enumerate(configs)]
    prepare_all(arms[:2], print)
    assert prepared == configs[:1]
    with pytest.raises(UsageError, match="arms a0 and a2 would prepare it differently"):
        prepare_all(arms, print)
