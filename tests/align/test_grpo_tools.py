"""GRPO runs whose answers call tools: their logs, their rewards, and interrupted runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.cli import sft as sft_command
from deskside.cli.main import main
from deskside.config.align import GrpoConfig
from deskside.data.chat.chat_template import ChatTemplate
from deskside.data.chat.messages import Conversation
from tests.align import tiny

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
CALL = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'
TOOL = '''
def count() -> str:
    """
    Count.

    Args:
    """
    return "7"
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count.",
        "parameters": {"type": "object", "properties": {}},
    },
}
KEYS = (
    "step",
    "loss",
    "grad_norm",
    "reward",
    "answer_tokens",
    "entropy",
    "drift",
    "tool_calls",
    "tool_failures",
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `deskside sft` whose model usually calls `count` and then repeats the
    result, or answers with one of two digits.
    """
    folder = tmp_path_factory.mktemp("caller")
    text = [CALL + json.dumps(SCHEMA) + "user assistant tool system how many 5 6 7 8 \n"] * 20
    model = tiny.model(folder / "model", text=text, tokens=330)
    (folder / "template.jinja").write_text(TEMPLATE)
    rows = []
    for n, question in enumerate(tiny.questions()):
        said = ("7", "7", "8")[n % 3]
        called = [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "count", "arguments": {}}}],
            },
            {"role": "tool", "content": "7"},
        ]
        turns = [{"role": "user", "content": question["prompt"]}, *(called if n % 4 else [])]
        rows.append({"messages": [*turns, {"role": "assistant", "content": said}], "tools": [SCHEMA]})
    data = tiny.jsonl(folder / "chats.jsonl", rows)
    argv = tiny.command_line(model, data, folder, "caller")
    argv += ["--batch.sequence_length", "192", "--batch.tokens", "3072", "--optim.lr", "5e-3"]
    argv += ["--align.template", str(folder / "template.jinja"), "--schedule.steps", "120"]
    assert sft_command.run(argv) == 0
    return folder / "caller"


def arguments(folder: Path, model: Path, name: str, *more: str) -> list[str]:
    rows = [{**question, "answer": "7"} for question in tiny.questions()]
    (folder / "mine.py").write_text(TOOL)
    argv = ["grpo", *tiny.command_line(model, tiny.jsonl(folder / "q.jsonl", rows), folder, name)]
    argv += ["--batch.sequence_length", "192", "--align.answer_tokens", "64", "--optim.lr", "2e-3"]
    return [
        *argv,
        "--questions",
        "4",
        "--align.group",
        "4",
        "--align.tools",
        f"{folder / 'mine.py'}:count",
        *more,
    ]


def said(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def exact(caller: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with tools and their reward."""
    folder = tmp_path_factory.mktemp("exact")
    assert main(arguments(folder, caller, "exact", "--align.reward", "exact", "--schedule.steps", "6")) == 0
    return folder / "exact"


@pytest.mark.full
def test_a_run_with_tools_is_rewarded_for_its_last_turn(exact: Path) -> None:
    run = exact
    lines, rows = said(run), tiny.metrics(run)
    calling = [line for line in lines if line["tool_calls"]]
    assert len(calling) >= 8
    right = [line for line in calling if line["reward"]]
    assert right and all(line["text"].endswith("7") and "tool" in line["text"] for line in right)
    # Tool results do not count as the model's tokens; its calls and answers do.
    assert all(row["answer_tokens"] < 64 for row in rows)
    per_step = 16
    for n, row in enumerate(rows):
        part = lines[n * per_step : (n + 1) * per_step]
        assert row["tool_calls"] == pytest.approx(sum(line["tool_calls"] for line in part) / per_step)
        assert row["tool_failures"] == 0
        assert sum(line["tokens"] for line in part) / per_step >= row["answer_tokens"]
        # The engine's log-probabilities equal those of training, also after a tool result.
        assert abs(row["drift"]) < 1e-5 and row["clipped"] == 0
    assert (run / "tools.py").read_text() == TOOL


@pytest.mark.full
def test_killed_and_resumed_is_the_same_run(
    caller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kill comes within a round of sampling, so the answers and their masks are read from the log."""
    more = ("--schedule.steps", "6", "--align.steps_per_rollout", "4", "--align.tool_turns", "1")
    assert main(arguments(tmp_path, caller, "straight", *more)) == 0
    with monkeypatch.context() as patch:
        tiny.kill_at(patch, 4)
        with pytest.raises(tiny.Killed):
            main(["--debug", *arguments(tmp_path, caller, "killed", *more)])
    (tmp_path / "mine.py").write_text(TOOL + "\n")
    assert main(["grpo", "--resume", str(tmp_path / "killed")]) == 1
    assert "changed since the run started" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text(TOOL)
    assert main(["grpo", "--resume", str(tmp_path / "killed")]) == 0
    tiny.same(tmp_path / "killed", tmp_path / "straight", KEYS)
    assert said(tmp_path / "killed") == said(tmp_path / "straight")
    assert any(line["own"] and not all(line["own"]) for line in said(tmp_path / "straight"))


@pytest.mark.full
def test_a_prompt_shows_the_tools(caller: Path, exact: Path) -> None:
    first = json.loads((exact.parent / "exact-data" / "train.jsonl").read_text().splitlines()[0])
    question = [{"role": "user", "content": first["prompt"]}]
    schema = {**SCHEMA, "function": {**SCHEMA["function"], "return": {"type": "string"}}}  # type: ignore[dict-item]
    assert first["tokens"] == ChatTemplate(caller).prompt(Conversation(question, [schema]))


def test_wrong_usage_is_one_line(
    caller: Path, taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, options, error in (
        (caller, ("--align.tools", "mine.py"), "must name a file and its functions"),
        (caller, ("--align.tool_turns", "0"), "align.tool_turns"),
        (taught, (), "does not write tools"),
    ):
        assert main(arguments(tmp_path, model, "refused", *options)) == 2
        assert error in capsys.readouterr().err
        assert not (tmp_path / "refused").exists()
    with pytest.raises(ValueError, match="no effect without tools"):
        GrpoConfig(tool_turns=2)
