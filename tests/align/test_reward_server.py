"""Rewards from a server: requests, accepted answers, and what a run does when the server is gone."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from deskside.align import reward_server
from deskside.align.grpo import Grpo
from deskside.align.reward_server import RewardCase, RewardServer
from deskside.cli.main import main
from deskside.config.align import GrpoConfig
from deskside.evaluate.final_number import final_number
from deskside.train.parallel import destroy_distributed, init_distributed
from deskside.utils.errors import OutsideError, UsageError
from tests.align import tiny
from tests.train import tiny_run

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]
KEYS = ("step", "loss", "grad_norm", "reward", "answer_tokens", "entropy")
CASES = [RewardCase("3 + 4?", "7", "7", {"level": 1}), RewardCase("ü?", "no", "9", {"level": 2})]


class Server:
    """A local HTTP server that answers with `answer` and records the requests."""

    def __init__(self, answer: Answer):
        self.answer, self.requests = answer, list[dict[str, Any]]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                status, text = outer.answer(body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has stopped waiting
                    self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/score"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def right(body: dict[str, Any]) -> tuple[int, bytes]:
    """Return 1 for the right number and 0 for any other."""
    pairs = zip(body["completions"], body["columns"]["answer"], strict=True)
    return 200, json.dumps([float(final_number(text) == int(answer)) for text, answer in pairs]).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(right)
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_server, "PAUSES", (0.01, 0.01, 0.01))


def test_a_request_has_the_texts_and_the_columns(server: Server) -> None:
    assert RewardServer(server.url, 5).compute_all(CASES) == [1, 0]
    assert RewardServer(server.url, 5).compute_all([]) == []
    assert server.requests == [
        {
            "prompts": ["3 + 4?", "ü?"],
            "completions": ["7", "no"],
            "columns": {"answer": ["7", "9"], "level": [1, 2]},
        }
    ]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status: int, server: Server) -> None:
    server.answer = lambda body: (status, b"later") if len(server.requests) < 3 else right(body)
    assert RewardServer(server.url, 5).compute_all(CASES) == [1, 0]
    assert len(server.requests) == 3
    server.answer = lambda body: (status, b"later\nperhaps")
    with pytest.raises(OutsideError, match=f"status {status}: later perhaps"):
        RewardServer(server.url, 5).compute_all(CASES)
    assert len(server.requests) == 3 + 4


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_with_the_other_address(
    status: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def redirect(handler: BaseHTTPRequestHandler) -> None:
        server.requests.append({})
        handler.send_response(status)
        handler.send_header("Location", "/score/")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    monkeypatch.setattr(server.server.RequestHandlerClass, "do_POST", redirect)
    with pytest.raises(OutsideError) as raised:
        RewardServer(server.url, 5).compute_all(CASES)
    assert f"align.reward {server.url}/ " in str(raised.value) and "\n" not in str(raised.value)
    assert len(server.requests) == 1


def test_a_slow_server_is_given_up(server: Server) -> None:
    wake = threading.Event()
    server.answer = lambda body: (200, b"[1, 1]" if wake.wait(20) else b"")
    with pytest.raises(OutsideError, match="no answer in 4 attempts"):
        RewardServer(server.url, 0.1).compute_all(CASES)
    wake.set()


def test_a_server_that_never_finishes_its_answer_is_given_up(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        server.requests.append({})
        handler.send_response(200)
        handler.send_header("Content-Length", "106")
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                handler.wfile.write(b" ")
                time.sleep(0.003)
            handler.wfile.write(b"[1, 1]")

    monkeypatch.setattr(server.server.RequestHandlerClass, "do_POST", drip)
    with pytest.raises(OutsideError, match="timed out"):
        RewardServer(server.url, 0.1).compute_all(CASES)
    assert len(server.requests) == 4
    assert RewardServer(server.url, 5).compute_all(CASES) == [1, 1]


@pytest.mark.parametrize(
    ("status", "header", "text", "error"),
    [
        (200, ("Content-Length", "106"), b"[1, 1]", "no answer in 4 attempts"),
        (503, ("Transfer-Encoding", "chunked"), b"50\r\nlat", "status 503"),
    ],
    ids=["answer", "error"],
)
def test_a_response_that_is_cut_off_is_asked_for_again(
    status: int,
    header: tuple[str, str],
    text: bytes,
    error: str,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut_off(handler: BaseHTTPRequestHandler) -> None:
        server.requests.append({})
        handler.send_response(status)
        handler.send_header(*header)
        handler.end_headers()
        handler.wfile.write(text)

    monkeypatch.setattr(server.server.RequestHandlerClass, "do_POST", cut_off)
    with pytest.raises(OutsideError, match=error):
        RewardServer(server.url, 5).compute_all(CASES)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (404, b"no such page", "status 404: no such page"),
        (200, b"[1", "not JSON"),
        (200, b'{"rewards": [1, 2]}', "list of 2 numbers"),
        (200, b"[1]", "but is 1 values"),
        (200, b"[1, null]", "finite number"),
        (200, b"[1, true]", "finite number"),
        (200, b"[1, NaN]", "JSON|finite number"),
        (200, b"[1, 1e999]", "JSON|finite number"),
    ],
)
def test_a_wrong_answer_ends_it_at_once(status: int, answer: bytes, error: str, server: Server) -> None:
    server.answer = lambda body: (status, answer)
    with pytest.raises(OutsideError, match=error):
        RewardServer(server.url, 5).compute_all(CASES)
    assert len(server.requests) == 1


def arguments(folder: Path, model: Path, name: str, url: str, *more: str) -> list[str]:
    rows = [{**row, "level": n % 3} for n, row in enumerate(tiny.questions())]
    data = tiny.jsonl(folder / "questions.jsonl", rows)
    argv = ["grpo", *tiny.command_line(model, data, folder, name), "--align.reward", url]
    argv += ["--batch.sequence_length", "64", "--align.answer_tokens", "4", "--optim.lr", "2e-3"]
    return [*argv, "--questions", "4", "--align.group", "4", "--schedule.steps", "7", *more]


def test_a_run_ends_without_loss_when_the_server_is_gone(
    taught: Path, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server may vanish between two checkpoints and within a round of sampling."""
    more = (
        "--align.columns",
        '["level"]',
        "--align.steps_per_rollout",
        "2",
        "--checkpoint.every",
        "100 steps",
    )
    assert main(arguments(tmp_path, taught, "straight", server.url, *more)) == 0
    assert all(set(body["columns"]) == {"answer", "level"} for body in server.requests)
    assert {level for body in server.requests for level in body["columns"]["level"]} == {0, 1, 2}

    seen = len(server.requests)
    server.answer = lambda body: right(body) if len(server.requests) < seen + 5 else (503, b"gone")
    assert main(arguments(tmp_path, taught, "gone", server.url, *more)) == 1
    error = capsys.readouterr().err
    assert "status 503: gone" in error and "saved at step" in error
    run = tmp_path / "gone"
    saved = max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert saved == len(tiny.metrics(run)) >= 2
    server.answer = right
    assert main(["grpo", "--resume", str(run)]) == 0
    tiny.same(run, tmp_path / "straight", KEYS)


class SlowOnRankOne:
    """A source of rewards that takes longer on one process than torch's process group waits, or gives none there."""

    def __init__(self, rank: int, gives_rewards: bool):
        self.rank, self.gives_rewards = rank, gives_rewards

    def compute_all(self, cases: Sequence[RewardCase]) -> list[float]:
        if self.rank == 1 and not self.gives_rewards:
            raise OutsideError("no answer")
        time.sleep(2.5 * self.rank)
        return [1.0] * len(cases)


def reward_slowly(folder: Path) -> None:
    distributed_c10d.default_pg_timeout = timedelta(seconds=1)  # of torch: 30 minutes
    world = init_distributed("cpu", "auto")
    sampler = SimpleNamespace(update_weights=lambda: None, sample=lambda *arguments: [])
    for gives_rewards in (True, False):
        grpo: Any = Grpo(GrpoConfig())
        grpo.session, grpo.sampler = SimpleNamespace(world=world), sampler
        grpo.log = SimpleNamespace(add=lambda *arguments: None)
        grpo.reward = SlowOnRankOne(world.rank, gives_rewards)
        try:
            grpo.roll_out([], [], 0)
            result = "rewards"
        except OutsideError:
            result = "none"
        (folder / f"{world.rank}-{gives_rewards}").write_text(result)
    destroy_distributed(world)


def test_all_processes_wait_for_rewards_however_long_they_take(tmp_path: Path) -> None:
    child = tiny_run.call(reward_slowly, tmp_path, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    for rank in (0, 1):
        assert [(tmp_path / f"{rank}-{given}").read_text() for given in (True, False)] == ["rewards", "none"]


def test_records_need_no_answer_for_a_server(taught: Path, tmp_path: Path, server: Server) -> None:
    server.answer = lambda body: (200, json.dumps([len(text) / 9 for text in body["completions"]]).encode())
    argv = arguments(tmp_path, taught, "judged", server.url, "--schedule.steps", "1")
    tiny.jsonl(tmp_path / "questions.jsonl", [{"prompt": row["prompt"]} for row in tiny.questions()])
    assert main(argv) == 0
    assert all(set(body["columns"]["answer"]) == {""} for body in server.requests)
    assert [row["reward"] > 0 for row in tiny.metrics(tmp_path / "judged")] == [True]


def test_wrong_usage_is_one_line(
    taught: Path, tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.stop()
    assert main(arguments(tmp_path, taught, "off", server.url)) == 2
    assert "start it first" in capsys.readouterr().err
    assert main(arguments(tmp_path, taught, "off", "http://")) == 2
    assert not (tmp_path / "off").exists()
    with pytest.raises(ValueError, match="no effect without a reward server"):
        GrpoConfig(reward_timeout=3)
    with pytest.raises(ValueError, match="gets answer anyway"):
        GrpoConfig(columns=("answer",))
    with pytest.raises(UsageError, match="has no host"):
        RewardServer("http:///x", 1).check()


def test_a_url_that_cannot_be_sent_is_refused_before_the_run(server: Server) -> None:
    with pytest.raises(UsageError, match="percent-encode"):
        RewardServer(f"{server.url}/\N{GREEK SMALL LETTER ALPHA}", 1).check()
