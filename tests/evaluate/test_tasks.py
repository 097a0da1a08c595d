"""The choice of tasks, the search for their data, and errors in one line."""

from pathlib import Path

import pytest

from deskside.data.corpus.sources import Source
from deskside.evaluate.datasets import READERS
from deskside.evaluate.tasks import TaskSelection, builtin_tasks, select
from deskside.utils.errors import UsageError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def names(selection: TaskSelection) -> list[str]:
    return [chosen.name for chosen in selection.chosen]


def test_the_table_is_whole() -> None:
    """Every task can be read from files and from the hub. CORE's constants equal those of its tasks."""
    tasks = builtin_tasks()
    for name, task in tasks.items():
        assert task.files, name
        if task.hub is not None:
            assert task.hub.reader in READERS, name
            assert Source.parse(task.hub.source).hub is not None, name
    core = {name: task for name, task in tasks.items() if task.core_shots is not None}
    assert len(core) == 17
    assert {name: task.chance for name, task in core.items()}["boolq"] == 0.62
    assert core["hellaswag"].core_shots == 10 and core["hellaswag_zeroshot"].core_shots == 0


def test_files_are_found_and_groups_take_what_is_there(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "eval/core/arc_easy.jsonl.gz",
        "eval/hellaswag_validation_subset.jsonl",
        "other/gsm8k_test.jsonl.zst",
    )
    touch(tmp_path, "eval/core/deep/er/still/copa.jsonl", "arc_challenge.txt", ".hidden/boolq.jsonl")
    chosen = select(["core"], str(tmp_path))
    assert names(chosen) == ["hellaswag", "hellaswag_zeroshot", "arc_easy"]
    assert {"copa", "arc_challenge", "boolq"} <= set(chosen.left_out)
    assert [each.shots for each in chosen.chosen] == [10, 0, 10]
    assert all(each.core for each in chosen.chosen)
    everything = select(["all"], str(tmp_path))
    assert names(everything) == ["hellaswag", "hellaswag_zeroshot", "arc_easy", "gsm8k"]
    assert not any(each.core for each in everything.chosen)
    mixed = select(["gsm8k", "core", "arc_easy"], str(tmp_path))
    assert names(mixed) == ["gsm8k", "hellaswag", "hellaswag_zeroshot", "arc_easy"]
    assert mixed.chosen[3].core and mixed.chosen[3].shots == 10
    # With other numbers of examples, the score would not be that metric.
    assert not any(each.core for each in select(["core"], str(tmp_path), 2).chosen)
    assert [each.shots for each in select(["arc_easy", "gsm8k"], str(tmp_path), 2).chosen] == [2, 2]


def test_the_nearest_file_is_taken(tmp_path: Path) -> None:
    touch(tmp_path, "b/copa.jsonl", "a/b/copa.jsonl", "a/copa.jsonl.gz")
    (chosen,) = select(["copa"], str(tmp_path)).chosen
    assert chosen.source == str(tmp_path / "a" / "copa.jsonl.gz")


def test_the_hub() -> None:
    chosen = select(["core", "gsm8k"], "hf:")
    assert {"gsm8k", "arc_easy", "openbook_qa"} <= set(names(chosen))
    assert "winograd" in chosen.left_out
    assert all(each.source.startswith("hf:") for each in chosen.chosen)
    with pytest.raises(UsageError, match="winograd: is not read from the hub; give --tasks-dir DIR"):
        select(["winograd"], "hf:")


@pytest.mark.parametrize(
    ("asked", "folder", "message"),
    [
        (["arc_esy"], ".", "arc_esy: there is no such task; did you mean arc_easy"),
        (["cor"], ".", "did you mean cor[ep]"),
        (["zzzz"], ".", "there are core, all, agi_eval_lsat_lr"),
        (["arc_esy"], None, "did you mean arc_easy"),
        (["core"], None, "where is the data. give --tasks-dir DIR"),
        (["arc_easy"], ".", r"no file arc_easy\.jsonl\* in .*give --tasks-dir DIR.*or --tasks-dir hf:"),
        (["core"], ".", "no data of these tasks; give"),
        (["core"], "nowhere", "nowhere: no such folder"),
    ],
)
def test_refused(
    asked: list[str], folder: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        select(asked, folder)
    assert "\n" not in str(error.value)


OWN = """
[capitals]
kind = "completion"
files = ["capitals.jsonl"]
prompt = "The capital of {country} is"
answer = "{city}"
"""


def test_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.toml").write_text(OWN)
    touch(tmp_path, "capitals.jsonl")
    (chosen,) = select(["capitals"], str(tmp_path)).chosen
    assert chosen.task.prompt == "The capital of {country} is"
    assert "capitals" in names(select(["all"], str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("capitals]", "piqa]"), "'piqa' cannot be the name of a task"),
        (OWN.replace("capitals]", "core]"), "'core' cannot be the name of a task"),
        (OWN.replace('"completion"', '"complete"'), "kind"),
        (OWN + 'score = "acc"\n', "capitals.completion.score: Extra inputs"),
        (OWN.replace("answer", "answers"), "answer"),
        ("[a\n", "is not valid TOML"),
        (
            OWN.replace("{country}", "{country"),
            "prompt: 'The capital of {country is' is not a valid template",
        ),
        (OWN.replace('["capitals.jsonl"]', "[]"), "files"),
        (OWN + 'hub = { source = "hf:a/b", reader = "arcs" }\n', "hub.reader: 'arcs' is not one of arc"),
    ],
)
def test_own_tasks_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tasks.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        select(["all"], str(tmp_path))
    (tmp_path / "tasks.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        select(["all"], str(tmp_path))
