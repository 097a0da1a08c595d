"""The journal: what it records of each trial, however it was cut off."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.study.execute.journal import FILE, FINAL, StudyJournal, TrialHistory, replay_file
from deskside.utils.errors import RunError

ENDINGS = st.sampled_from([*FINAL, "pending"])


def write(folder: Path, events: list[tuple[Any, ...]]) -> StudyJournal:
    journal = StudyJournal(folder)
    for arm, seed, what, *rest in events:
        if what == "started":
            journal.started(arm, seed, "cuda:0", 7, rest[0])
        else:
            journal.ended(arm, seed, rest[0], "why", rest[1])
    return journal


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    keys = st.tuples(st.sampled_from(["a", "b-ä", 'c"\n']), st.integers(1, 3))
    events: list[tuple[Any, ...]] = []
    for arm, seed in draw(st.lists(keys, max_size=12)):
        events.append((arm, seed, "started", draw(st.booleans())))
        if draw(st.booleans()):
            seconds = draw(st.one_of(st.none(), st.floats(0, 1e6)))
            events.append((arm, seed, "ended", draw(ENDINGS), seconds))
    return events


@settings(max_examples=60, deadline=None)
@given(histories(), st.data())
def test_a_journal_cut_anywhere_tells_of_the_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = write(folder, events)
    path = folder / FILE
    assert replay_file(path) == journal.histories
    content = path.read_bytes() if path.exists() else b""
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    reopened = StudyJournal(folder)
    expected = tmp_path_factory.mktemp("expected")
    times = [json.loads(line)["time"] for line in content.splitlines()]
    assert strip(reopened.histories) == strip(write(expected, events[:whole]).histories)
    # The next entry is appended on a separate line.
    reopened.ended("new", 1, "failed", "", 1.0)
    assert replay_file(path)["new", 1].status == "failed"
    assert len(path.read_bytes().splitlines()) == whole + 1 <= len(times) + 1


def strip(past: dict[Any, TrialHistory]) -> dict[Any, tuple[Any, ...]]:
    """Return the journal without the times, which differ."""
    return {key: (p.status, p.reason, p.attempts, p.seconds, p.device) for key, p in past.items()}


@settings(max_examples=60, deadline=None)
@given(histories())
def test_counts_and_states(tmp_path_factory: pytest.TempPathFactory, events: list[tuple[Any, ...]]) -> None:
    past = write(tmp_path_factory.mktemp("journal"), events).histories
    for key, one in past.items():
        own = [event for event in events if event[:2] == key]
        assert one.attempts == sum(event[2] == "started" for event in own)
        assert one.status == ("running" if own[-1][2] == "started" else own[-1][3])
        begun = max(i for i, e in enumerate(own) if i == 0 or (e[2] == "started" and not e[3]))
        since = own[begun:]
        ends = [event[4] for event in since if event[2] == "ended"]
        unseen = any(a[2] == "started" and b[2] == "started" and b[3] for a, b in pairwise(since))
        # If a trial's first start is a resume, the trial began before this journal. It counts as a start from zero.
        known = not unseen and None not in ends
        assert (one.seconds is not None) == known
        if known:
            assert one.seconds == pytest.approx(sum(ends))


def test_damage_is_named_by_its_line(tmp_path: Path) -> None:
    journal = write(tmp_path, [("a", 1, "started", False), ("a", 1, "ended", "finished", 2.0)])
    good = journal.path.read_bytes()
    for bad in (b"{\n", b"[]\n", b'{"arm": "a", "seed": 1, "event": "danced"}\n', b"\xff\n", b"null\n"):
        journal.path.write_bytes(good + bad)
        with pytest.raises(RunError, match=r"journal\.jsonl: line 3 is damaged"):
            StudyJournal(tmp_path)


def test_no_journal_is_no_past(tmp_path: Path) -> None:
    assert StudyJournal(tmp_path).history("a", 1) == TrialHistory() and not (tmp_path / FILE).exists()
