"""The choice of the tests of the long form (benchmarks/suite.py)."""

from pathlib import Path

from benchmarks import suite

FAST, SLOW = 0.1, 3.0


def test_a_function_is_listed_if_all_of_its_tests_are_slow() -> None:
    times = {"a.py::t[1]": SLOW, "a.py::t[2]": SLOW, "a.py::u[1]": SLOW, "a.py::u[2]": FAST, "a.py::v": FAST}
    assert suite.long_form(times, ()) == ["a.py::t", "a.py::u[1]"]


def test_what_did_not_run_stays_and_what_became_fast_does_not() -> None:
    times = {"a.py::t": FAST, "a.py::u[2]": FAST}
    assert suite.long_form(times, ["a.py::t", "a.py::u[1]", "b.py::w"]) == ["a.py::u[1]", "b.py::w"]


def test_what_is_kept_is_never_listed() -> None:
    times = {"a.py::t[1]": SLOW, "a.py::u[1]": SLOW, "a.py::u[2]": SLOW, "a.py::u[3]": FAST}
    assert suite.long_form(times, (), kept=("a.py::t", "a.py::u[2]")) == ["a.py::u[1]"]
    assert suite.long_form(times, (), kept=("a.py",)) == []


def test_the_fastest_test_of_a_file_is_never_listed() -> None:
    times = {"a.py::t[1]": 9.0, "a.py::t[2]": 8.0, "a.py::t[3]": 9.0, "b.py::t": SLOW, "b.py::u": FAST}
    assert suite.long_form(times, ()) == ["a.py::t[1]", "a.py::t[3]", "b.py::t"]


def test_times_are_those_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "times.xml").write_text(
        '<testsuites><testsuite name="pytest"><testcase classname="tests.a.test_b" name="test_c[x.y]" time="1.5"/>'
        '<testcase classname="tests.a.test_b" name="test_d" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    assert suite.measured(tmp_path / "times.xml") == {"tests/a/test_b.py::test_c[x.y]": 1.5}


def test_listed_and_kept_tests_exist() -> None:
    listed = suite.read_list()
    assert listed == sorted(set(listed))
    assert [name for name in (*listed, *suite.KEPT) if not suite.exists(name)] == []


def test_a_renamed_test_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "test_b.py").write_text("def test_c(): ...\n")
    assert suite.exists("test_b.py::test_c[1]", tmp_path)
    assert not suite.exists("test_b.py::test_d", tmp_path)
    assert not suite.exists("test_e.py::test_c", tmp_path)
