"""The list of measurements and the scheduler that spreads them over GPUs."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from benchmarks import release
from benchmarks.release import FILE, Job, Release
from deskside.utils.errors import UsageError
from tests.sources import ROOT


def run(jobs: list[Job], out: Path, gpus: list[str], seconds: float = 60.0) -> tuple[int, dict[str, str]]:
    code = Release(jobs, gpus, out, {"data": "D", "sets": "S"}).run(time.monotonic() + seconds)
    state = json.loads((out / "state.json").read_text())
    return code, {name: row["status"] for name, row in state.items()}


@pytest.mark.parametrize(
    "name", ["release.toml", "mixture.toml", "speed.toml", "recipe.toml", "scaling.toml"]
)
def test_a_list_is_well_formed(name: str) -> None:
    """Options of benchmarks are in their sources; those with a dot are keys of the configuration."""
    words = dict.fromkeys(("data", "sets", "out", "work", "gpus"), "X")
    for job in release.read(FILE.with_name(name)):
        assert (ROOT / job.document).exists()
        lines = job.run.format(**words).replace("\\\n", " ")
        for command in re.split(r"\n|;|&&", lines):
            parts = shlex.split(command)
            if parts[:2] != ["python", "-m"] or not parts[2].startswith("benchmarks."):
                continue
            # benchmarks.first_step takes the options of benchmarks.step.
            modules = (parts[2], *(["benchmarks.step"] if parts[2] == "benchmarks.first_step" else []))
            source = "".join((ROOT / f"{m.replace('.', '/')}.py").read_text("utf-8") for m in modules)
            for option in (part for part in parts[3:] if part.startswith("--") and "." not in part):
                assert f'"{option.partition("=")[0]}"' in source, command


def test_a_job_brings_those_that_must_succeed_first() -> None:
    names = [job.name for job in release.chosen(release.read(FILE), ["grpo"])]
    assert names == ["parity-bf16", "sft", "dpo", "grpo"]


def test_only_orders_the_jobs_of_several_files() -> None:
    jobs = release.read(FILE, FILE.with_name("recipe.toml"))
    names = [job.name for job in release.chosen(jobs, ["own-[ht]?", "dpo", "sft", "short"])]
    assert names == ["own-hi", "own-ta", "parity-bf16", "sft", "dpo", "short"]


def test_jobs_have_their_gpus_to_themselves(tmp_path: Path) -> None:
    log = tmp_path / "log"
    note = f"echo begin $CUDA_VISIBLE_DEVICES {{gpus}} >> {log}; sleep 0.4; echo end {{gpus}} >> {log}"
    jobs = [Job("one", note), Job("two", note, gpus=2), Job("three", note), Job("four", note, gpus=9)]
    code, state = run(jobs, tmp_path / "out", ["4", "7"])
    assert code == 0 and set(state.values()) == {"ok"}
    held: list[str] = []
    for line in log.read_text().splitlines():
        what, *gpus = line.split()
        if what == "begin":
            assert gpus[0] == gpus[1]
            assert not set(held) & set(gpus[0].split(","))
            held += gpus[0].split(",")
        else:
            for gpu in gpus[0].split(","):
                held.remove(gpu)
    lines = log.read_text().splitlines()
    # `three` would have fitted beside `one`, but it does not overtake `two`, which waits for both GPUs.
    assert lines[:3] == ["begin 4 4", "end 4", "begin 4,7 4,7"]


def test_what_follows_a_failure_does_not_begin_and_all_goes_on_later(tmp_path: Path) -> None:
    jobs = [
        Job("good", f"echo x >> {tmp_path}/good"),
        Job("bad", f"test -f {tmp_path}/repaired"),
        Job("after", "true", after=("bad",)),
        Job("last", "true", after=("after",)),
    ]
    began = time.monotonic()
    code, state = run(jobs, tmp_path / "out", [], seconds=20.0)
    assert time.monotonic() - began < 20.0  # it does not wait for jobs that can no longer start
    assert code == 1 and state == {"good": "ok", "bad": "failed"}
    (tmp_path / "repaired").touch()
    code, state = run(jobs, tmp_path / "out", [])
    assert code == 0 and set(state.values()) == {"ok"} and len(state) == 4
    assert (tmp_path / "good").read_text() == "x\n"  # it was not repeated


def test_time_is_hard_and_a_job_may_save(tmp_path: Path) -> None:
    saving = f"trap 'echo saved > {tmp_path}/saved; exit 1' INT; while true; do sleep 0.05; done"
    code, state = run([Job("long", saving), Job("next", "true")], tmp_path / "out", ["0"], seconds=1.0)
    assert code == 1 and state == {"long": "cut off"}
    assert (tmp_path / "saved").exists()
    code, state = run([Job("slow", saving, minutes=0.01)], tmp_path / "other", ["0"])
    assert code == 1 and state == {"slow": "cut off"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[job]]\nname = "a"\n', "a name and a command"),
        ('[[job]]\nname = "a"\nrun = "x"\ncard = 1\n', "a name and a command"),
        ('[[job]]\nname = "a"\nrun = "x"\n[[job]]\nname = "a"\nrun = "x"\n', "two jobs"),
        ('[[job]]\nname = "a"\nrun = "x"\nafter = ["b"]\n', "not above it"),
        ("job = [", "cannot be read"),
    ],
)
def test_a_wrong_list_is_one_line(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        release.read(path)
    assert release.main(["--file", str(path), "--list"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_only_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["--only", "step*", "--list"]) == 0
    assert all(line.startswith("step") for line in capsys.readouterr().out.splitlines())
    assert release.main(["--only", "nothing"]) == 2
