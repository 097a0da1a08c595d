"""The store: appended rows are read back, a torn line is skipped, and processes do not disturb each other."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.measurements.store import STATUSES, Busy, Machine, hash_of, make_key, make_row, open_store, slug
from deskside.utils.errors import RunError, UsageError
from tests.probe import fakes

MACHINE = Machine(
    "NVIDIA GeForce RTX 4090", "cuda", 25_300_000_000, 0, "580.1", 450, "2.11.0+cu128", "12.8", "3.6.0", "0.1.0+ab"
)  # fmt: skip
FILE = "geforce-rtx-4090.jsonl"
SPEC: dict[str, Any] = {
    "model": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "sequence_length": 512,
    "tokens": 4096,
    "micro_tokens": "auto",
    "optimizer": "muon",
    "precision": "auto",
    "activation_checkpointing": "none",
}
RESULT = fakes.answer(SPEC)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
specs = st.dictionaries(st.sampled_from(["flavour", "number", "more"]), values)


def row(
    spec: dict[str, Any], status: str = "ok", machine: Machine = MACHINE, **result: Any
) -> dict[str, Any]:
    """Return a valid row, with additions to its spec and its result."""
    return make_row("point", make_key(machine, SPEC | spec), status, RESULT | result)


@settings(deadline=None)
@given(st.lists(st.tuples(specs, st.sampled_from(STATUSES), values), max_size=8))
def test_rows_come_back_as_they_were(written: list[tuple[dict[str, Any], str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        rows = [row(spec, status, value=value) for spec, status, value in written]
        for one in rows:
            store.add(one)
        lines = (
            [json.loads(line) for line in store.path(MACHINE.card).read_bytes().splitlines()] if rows else []
        )
        assert lines == rows
        # Brute force over the list: the last final row of a key, otherwise its last row.
        standing = {}
        for key in {one["hash"] for one in rows}:
            same = [one for one in rows if one["hash"] == key]
            standing[key] = ([one for one in same if one["status"] in ("ok", "oom")] or same)[-1]
        assert {one["hash"]: one for one in store.rows(MACHINE)} == standing
        assert all(store.find(one["key"]) == standing[one["hash"]] for one in rows)


@settings(deadline=None)
@given(st.data())
def test_a_file_cut_anywhere_loses_the_last_row_alone(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        for number in range(3):
            store.add(row({"number": number}))
        path = store.path(MACHINE.card)
        whole = path.read_bytes()
        second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
        cut = data.draw(st.integers(second, len(whole)))
        path.write_bytes(whole[:cut])
        # A missing newline, or a single first byte, is tested separately.
        torn = second + 1 < cut < len(whole) - 1
        if torn:
            assert [one["key"]["spec"]["number"] for one in store.rows(MACHINE)] == [0, 1]
            assert len(store.notes()) == 1
            assert "cut off" in store.notes()[0]
        store.add(row({"number": 9}))
        found = [one["key"]["spec"]["number"] for one in store.rows(MACHINE)]
        assert found[:2] == [0, 1] and found[-1] == 9
        assert path.read_bytes().startswith(whole[:cut]), "existing rows were rewritten"


def test_the_first_row_may_be_torn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        store.add(row({}))
        path = store.path(MACHINE.card)
        path.write_bytes(path.read_bytes()[:50])
        assert store.rows(MACHINE) == []
        assert "cut off" in store.notes(MACHINE)[0]


WRITER = """
import json, sys
from deskside.measurements.store import open_store
store, rows = open_store(sys.argv[1]), json.loads(sys.stdin.read())
for row in rows:
    store.add(row)
"""


def test_several_processes_append_at_once(tmp_path: Path) -> None:
    batches = [[row({"number": n, "writer": w}, text="x" * 3000) for n in range(40)] for w in range(4)]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdin=subprocess.PIPE, text=True)
        for _ in batches
    ]
    for writer, batch in zip(writers, batches, strict=True):
        assert writer.stdin is not None
        writer.stdin.write(json.dumps(batch))
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = open_store(tmp_path).rows(MACHINE)
    assert len(found) == 160
    for number, batch in enumerate(batches):  # each writer's rows are in its order
        assert [one for one in found if one["key"]["spec"]["writer"] == number] == batch


@pytest.mark.parametrize("name", ["driver", "torch", "cuda", "triton", "power_limit_watts", "code"])
def test_rows_of_another_machine_are_not_used_and_said_so(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    other = dataclasses.replace(MACHINE, **{name: 300 if name == "power_limit_watts" else "1.2.3"})
    store.add(row({}, machine=other))
    before = store.path(MACHINE.card).read_bytes()
    assert store.rows(MACHINE) == []
    assert store.find(make_key(MACHINE, SPEC)) is None
    (note,) = store.notes(MACHINE)
    assert name.replace("_", " ") in note and "here" in note and "deskside probe" in note
    with pytest.raises(UsageError, match="measure again with: deskside probe --probes"):
        store.require(MACHINE)
    assert store.path(MACHINE.card).read_bytes() == before
    store.add(row({}))
    assert len(store.require(MACHINE)) == 1
    assert len(store.rows()) == 2


def test_no_rows_are_no_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "nowhere")
    assert (store.rows(MACHINE), store.notes(MACHINE), store.require(MACHINE), store.rows()) == (
        [],
        [],
        [],
        [],
    )
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "content", [b"\x00\xff\xfe garbage", b"[1, 2]\n", b"{}\n{}\n", b'{"schema": 2}\n', b"[" * 100_000 + b"\n"]
)
def test_a_file_that_cannot_be_read_at_all_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        open_store(tmp_path).rows(MACHINE)
    assert FILE in str(caught.value) and "deskside probe" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert path.read_bytes() == content
    assert open_store(tmp_path).rows() == []  # of any card: it is skipped
    (note,) = open_store(tmp_path).notes()
    assert note.startswith(f"{path}: ") and "skipped" in note and "\n" not in note


def test_damaged_lines_between_good_ones_are_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(row({"number": 1}))
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'not json\n\n{"schema": 1, "kind": "point"}\n{"schema": 7}\n')
    store.add(row({"number": 2}))
    assert len(store.rows(MACHINE)) == 2
    (note,) = store.notes(MACHINE)
    assert note.startswith(
        f"{tmp_path / FILE}: 3 lines are skipped (line 2: this is not JSON; line 4: a field of "
    )
    assert "; line 5: this is a probe result of schema 7" in note
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"[]\n" * 8)
    (note,) = store.notes(MACHINE)
    assert "11 lines are skipped" in note and note.endswith("; and 8 more)") and len(note) < 400


def test_the_length_of_measuring_is_no_part_of_the_key() -> None:
    key = make_key(MACHINE, {"tokens": 4, "seconds": 3, "warmup_seconds": 1, "steps": 9})
    assert hash_of(key) == hash_of(make_key(MACHINE, {"tokens": 4}))
    assert hash_of(key) != hash_of(make_key(MACHINE, {"tokens": 5}))
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.add(row({}, loss=math.nan, more=[math.inf, 1.5]))
    assert store.rows(MACHINE)[0]["result"] == RESULT | {"loss": None, "more": [None, 1.5]}


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        open_store(tmp_path / "file")
    (tmp_path / FILE).mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        open_store(tmp_path).rows(MACHINE)
    assert open_store(tmp_path).notes() == [f"{tmp_path / FILE}: cannot be read: Is a directory"]
    with pytest.raises(RunError, match="cannot be stored"):
        open_store(tmp_path).add(row({}))


def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    store.add(row({"number": 1}))
    before = (tmp_path / FILE).read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:40]))
    with pytest.raises(RunError, match="cannot be stored: no space left"):
        store.add(row({"number": 2}))
    monkeypatch.undo()
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 5060 Ti", "geforce-rtx-5060-ti"),
        ("Intel(R) Xeon(R) Processor", "intel-r-xeon-r-processor"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "card"),
    ],
)
def test_file_names(card: str, name: str) -> None:
    assert slug(card) == name


def test_bytes_that_are_no_text_can_be_stored(tmp_path: Path) -> None:
    words = b"gcc: \xff\xfe".decode("utf-8", errors="surrogateescape")
    open_store(tmp_path).add(row({}, words=words))
    assert open_store(tmp_path).rows(MACHINE)[0]["result"]["words"] == words


def test_wrong_words_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        make_row("point", make_key(MACHINE, {}), "fine")


# Measuring


HOLDER = """
import sys
from deskside.measurements.store import open_store
with open_store(sys.argv[1]).measuring(sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_measures_at_a_time(tmp_path: Path) -> None:
    store = open_store(tmp_path / "probes")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.folder), MACHINE.card],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with (
        pytest.raises(Busy, match=rf"another probe \(process {holder.pid}\) is measuring on NVIDIA"),
        store.measuring(MACHINE.card),
    ):
        pytest.fail("two measure at once")
    with store.measuring("another card"):
        pass
    store.add(row({}))  # storing does not need the lock
    holder.kill()  # the lock ends with its process, however that ends
    holder.communicate()
    with store.measuring(MACHINE.card):
        pass
    with store.measuring(MACHINE.card):
        pass
    assert len(store.rows()) == 1


@pytest.mark.parametrize("folder", ["/proc/probes", "/sys/probes", "file/probes"])
def test_a_store_that_cannot_be_written_is_told_before(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"probes: results could not be stored there: .*--probes$") as caught,
        open_store(tmp_path / folder).measuring(MACHINE.card),
    ):
        pytest.fail("it is measured")
    assert not isinstance(caught.value, Busy) and "\n" not in str(caught.value)


def test_a_file_of_rows_that_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()  # root can write every file
    with (
        pytest.raises(UsageError, match="results could not be stored there"),
        open_store(tmp_path).measuring(MACHINE.card),
    ):
        pytest.fail("it is measured")


def test_a_full_disk_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:4096], at))
    with (
        pytest.raises(UsageError, match="results could not be stored there: no space left"),
        open_store(tmp_path).measuring(MACHINE.card),
    ):
        pytest.fail("it is measured")
    monkeypatch.undo()
    assert [path.stat().st_size < 16 for path in tmp_path.iterdir()] == [True]
    with open_store(tmp_path).measuring(MACHINE.card):
        pass
