"""Parsing of untrusted text: it gives a value within the limits of the module, or raises Unreadable."""

import ast
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.cli.main import main
from deskside.utils.errors import RunError
from deskside.utils.parsing import MAX_DEPTH, Unreadable, json_value, read_json_object, toml_table
from tests.sources import PACKAGE, files
from tests.weights.test_load import made, run, save

__all__ = ["run"]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_json_value_equals_json_loads(value: Any) -> None:
    text = json.dumps(value)
    assert json_value(text) == json_value(text.encode()) == json.loads(text)


HOSTILE = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "deep but closed": b"[" * 900 + b"]" * 900,
    "just too deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "long integer": b"9" * 5000,
    "integer of no float": b"-" + b"9" * 400,
    "other bytes": b'"\xff\xfe"',
    "half a surrogate": b'"\xed\xa0\x80"',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nothing": b"",
    "half": b'{"a": ',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_one_kind_of_error_in_one_line(name: str) -> None:
    with pytest.raises(Unreadable) as caught:
        json_value(HOSTILE[name])
    assert str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_json_value_limits() -> None:
    assert json_value("9" * 400, big_integers=True) == int("9" * 400)
    assert [json_value(str(number)) for number in (2**64 - 1, 1 - 2**64)] == [2**64 - 1, 1 - 2**64]
    assert json_value("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert json_value(b"\xef\xbb\xbf[1]") == [1]
    for number in ("NaN", "Infinity", "1e999"):
        assert json_value(number) is not None
        with pytest.raises(Unreadable):
            json_value(number, finite=True)


TOML = {
    "deep key": ".".join("a" * 5001) + " = 1",
    "deep table": "[" + ".".join("a" * 5001) + "]",
    "deep list": "a = " + "[" * 5000 + "]" * 5000,
    "long integer": "a = " + "9" * 5000,
    "integer beyond 64 bits": "a = [{b = " + "9" * 40 + "}]",
    "no TOML": "a",
    "date that is none": "a = 2020-13-45",
}


@pytest.mark.parametrize("name", TOML)
def test_hostile_toml_is_one_kind_of_error_in_one_line(name: str) -> None:
    with pytest.raises(Unreadable) as caught:
        toml_table(TOML[name])
    assert str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 320


def test_toml_table_equals_tomllib_loads() -> None:
    for path in files(PACKAGE, "*.toml"):
        assert toml_table(path.read_bytes()) == tomllib.loads(path.read_text("utf-8"))


def test_memory_error_becomes_unreadable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("deskside.utils.parsing.json.JSONDecoder.decode", full)
    monkeypatch.setattr("deskside.utils.parsing.tomllib.loads", full)
    (tmp_path / "a.json").write_text("{}")
    for parse in (json_value, toml_table):
        with pytest.raises(Unreadable, match="memory"):
            parse("{}")
    with pytest.raises(RunError, match=r"a\.json is damaged: it is not JSON: it needs more memory"):
        read_json_object(tmp_path / "a.json")


# Damaged files given to commands


@pytest.mark.parametrize("name", ["deep list", "long integer", "integer of no float", "other bytes"])
def test_a_hostile_manifest_leads_to_the_older_checkpoint(name: str, run: Path) -> None:
    from deskside.weights.load import load_model

    save(run, 10, made(10))
    folder = save(run, 20, made(20))
    (folder / "manifest.json").write_bytes(HOSTILE[name])
    warnings: list[str] = []
    assert load_model(run, warn=warnings.append).step == 10
    assert len(warnings) == 1 and "manifest.json is damaged" in warnings[0] and "\n" not in warnings[0]


FILES = [
    "run.json",
    "plan.json",
    "summary.json",
    "environment.json",
    "metrics.jsonl",
    "go.json",
    "tokenizer_config.json",
]


@pytest.mark.parametrize("name", ["deep but closed", "integer of no float"])
def test_a_hostile_file_of_a_run_is_one_line(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 10, made(10))
    for file in FILES:
        before = (run / file).read_bytes() if (run / file).exists() else None
        hostile = HOSTILE[name]
        (run / file).write_bytes(
            b'{"step": 1, "config": ' + hostile + b', "schema_version": ' + hostile + b"}\n"
        )
        for argv in (
            ["chat", str(run), "--prompt", "a"],
            ["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")],
            ["report", str(run)],
            ["train", "--resume", str(run)],
            ["go", "--resume", str(run)],
        ):
            model = ("run.json", "tokenizer_config.json")
            reads = {"chat": model, "export": model, "go": ("go.json",)}
            if file not in reads.get(argv[0], FILES):
                continue
            if file == "tokenizer_config.json" and name == "integer of no float":
                continue  # transformers writes integers of any length there, which we do not use
            code = main(argv)
            stderr = capsys.readouterr().err
            assert "unexpected" not in stderr and "Traceback" not in stderr, (argv, stderr)
            # Reports are also made of damaged runs.
            expected_codes = (0, 1, 2) if argv[0] == "report" else (1, 2)
            assert code in expected_codes, (file, argv, stderr)
        (run / file).unlink()
        if before is not None:
            (run / file).write_bytes(before)


@pytest.mark.parametrize("name", TOML)
def test_a_hostile_toml_file_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(TOML[name])
    value = TOML[name].partition("= ")[2]
    for argv in (
        ["train", "my.toml"],
        ["study", "my.toml"],
        ["train", "demo", "--optim.betas", f"[{value}]"],
    ):
        assert main(argv) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith("deskside: ") and stderr.count("\n") == 1 and "unexpected" not in stderr
        assert len(stderr) < 12_000


# Modules that parse


# The sandbox's processes import nothing of deskside, and their channels have their own limits.
ALLOWED = ("utils/parsing.py", "evaluate/sandboxed/", "evaluate/sandbox.py")


def parsers(source: str) -> list[str]:
    """Return the names and imports of a module's source that parse JSON, TOML or a similar format."""
    found = []
    for node in ast.walk(ast.parse(source)):
        # A name is enough: `map(json.loads, lines)` parses without a visible call.
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node)
            if name in (
                "json.load",
                "json.loads",
                "json.JSONDecoder",
                "tomllib.load",
                "tomllib.loads",
                "literal_eval",
            ):
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.ImportFrom) and node.module in (
            "json",
            "tomllib",
            "ast",
            "configparser",
            "plistlib",
        ):
            found.append(f"{node.lineno}: from {node.module}")
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            found += [
                f"{node.lineno}: import {name}"
                for name in names & {"tomllib", "ujson", "orjson", "simplejson"}
            ]
    return found


def test_json_and_toml_are_parsed_in_one_module_only() -> None:
    assert all((PACKAGE / name).exists() for name in ALLOWED)
    found = {}
    for path in files(PACKAGE, "*.py"):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(ALLOWED) and (lines := parsers(path.read_text("utf-8"))):
            found[name] = lines
    assert not found


@pytest.mark.parametrize(
    "source",
    ["json.loads(x)", "from json import loads", "import tomllib", "json.load(f)", "map(json.loads, x)"],
)
def test_parser_calls_are_detected(source: str) -> None:
    assert parsers(source) and sys.getrecursionlimit() > MAX_DEPTH
