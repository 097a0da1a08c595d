"""Models by name from a local server that answers like the Hugging Face hub, and without a server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deskside.cli.main import main
from deskside.export.push import check_push, push
from deskside.utils import hub
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import save_hf
from deskside.weights.load import load_model
from tests.data.chat_tokenizer import make as make_chat
from tests.export.test_hf_parity import random_model
from tests.hub_server import TOKEN, FakeHub, running, use

NAME = "Qwen/Qwen3-0.6B"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, with files that are not needed."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = make_chat(folder / "tokenizer")
    model = random_model(vocab_size=512)
    save_hf(model, model.config, tokenizer, folder / "model")
    for extra in ("README.md", "consolidated.safetensors", "pytorch_model.bin", "onnx/model.safetensors"):
        path = folder / "model" / extra
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not needed")
    return folder / "model"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, published: Path) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    with running() as fake:
        use(monkeypatch, fake.url, tmp_path / "cache")
        fake.publish(NAME, published)
        yield fake


def stop(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the server: from here on, nothing listens at the hub's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


def test_a_name_loads_with_the_needed_files_only(server: FakeHub, published: Path) -> None:
    loaded = load_model(NAME)
    expected = load_model(published)
    sha = server.repositories[NAME].refs["main"]
    assert (loaded.source, loaded.name) == (f"hf:{NAME}@{sha}", "Qwen3-0.6B")
    ids = torch.arange(20)[None]
    assert torch.equal(loaded.model(ids), expected.model(ids))
    assert server.downloaded() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_configuration_and_tokenizer_come_alone(server: FakeHub) -> None:
    assert hub.find(NAME, "config").folder.joinpath("config.json").is_file()
    assert server.downloaded() == {"config.json"}
    hub.find(NAME, "tokenizer")
    assert "model.safetensors" not in server.downloaded()


@pytest.mark.parametrize("broken", ["stopped", "offline", "503"])
def test_a_cached_model_needs_no_hub(broken: str, server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.find(NAME)
    if broken == "stopped":
        stop(server, monkeypatch)
    elif broken == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        server.broken = 503
    notes: list[str] = []
    assert hub.find(NAME, warn=notes.append) == first
    assert len(notes) == 1 and first.folder.name[:8] in notes[0]


def test_an_incomplete_copy_is_not_used(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may contain only a part of a model, such as that of `deskside plan`, or come from a killed download."""
    hub.find(NAME, "config")
    hub.find(NAME, "tokenizer")
    stop(server, monkeypatch)
    with pytest.raises(UsageError, match="no whole copy"):
        hub.find(NAME)


def test_a_hub_that_does_not_answer(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:  # accepts connections and sends nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        start = time.monotonic()
        with pytest.raises(UsageError):
            hub.find("nobody/nothing")
        assert time.monotonic() - start < 4  # and starting the command takes another second


def test_revisions(server: FakeHub, published: Path, tmp_path: Path) -> None:
    old = server.repositories[NAME].refs["main"]
    changed = json.loads((published / "config.json").read_text("utf-8")) | {"rope_theta": 5.0}
    files = server.repositories[NAME].commits[old] | {"config.json": json.dumps(changed).encode()}
    new = server.repositories[NAME].commit(files, "v2")
    assert hub.find(f"{NAME}@v2").source == f"hf:{NAME}@{new}"
    assert hub.find(hub.with_revision(NAME, "v2")).source == f"hf:{NAME}@{new}"
    assert hub.find(f"{NAME}@{old}").source == hub.find(NAME).source == f"hf:{NAME}@{old}"
    for spec, revision in ((f"{NAME}@v2", "v3"), (str(tmp_path), "v2")):
        with pytest.raises(UsageError):
            hub.with_revision(spec, revision)
    with pytest.raises(UsageError, match="v9"):
        hub.find(f"{NAME}@v9")


def test_a_local_folder_wins(server: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert hub.find(NAME).source == NAME
    assert hub.find("runs/mistyped").source == "runs/mistyped"
    assert hub.find(f"hf:{NAME}").source.startswith(f"hf:{NAME}@")
    assert [path for _, path in server.requested if "mistyped" in path] == []


def test_what_the_hub_refuses(server: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("me/secret", published)
    server.publish("me/gated", published)
    server.repositories["me/secret"].private = server.repositories["me/gated"].gated = True
    for name, word in (("me/none", "no such model"), ("me/secret", "HF_TOKEN"), ("me/gated", "gated")):
        with pytest.raises(UsageError, match=word) as error:
            hub.find(name)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.find("me/secret").folder.is_dir() and hub.find("me/gated").folder.is_dir()


def test_a_page_instead_of_the_hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login page of the network, or an invalid address: the copy in the cache is used."""
    folder = hub.find(NAME, "config").folder
    server.page = b"<html>sign in</html>"
    warnings: list[str] = []
    assert hub.find(NAME, "config", warnings.append).folder == folder and len(warnings) == 1
    with pytest.raises(UsageError, match="does not answer as a hub"):
        hub.find("me/other")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://[bad")
    assert hub.find(NAME, "config", warnings.append).folder == folder


def test_a_model_without_safetensors(server: FakeHub) -> None:
    files = server.repositories[NAME].commits[server.repositories[NAME].refs["main"]]
    server.publish("old/bin", Path(os.devnull))
    server.repositories["old/bin"].commit({k: v for k, v in files.items() if k != "model.safetensors"})
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        hub.find("old/bin")


def command(server_url: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": server_url, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "deskside", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
        cwd=cache.parent,
    )


def test_commands_take_names(server: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From fine-tuning to export. The name of the base model is passed along with the run."""
    turns = [
        [{"role": "user", "content": f"one {n}"}, {"role": "assistant", "content": "two"}] for n in range(40)
    ]
    chats = "".join(json.dumps({"messages": each}) + "\n" for each in turns)
    (tmp_path / "chats.jsonl").write_text(chats, "utf-8")
    sha = server.repositories[NAME].refs["main"]
    sft = ["sft", NAME, "--data", "chats.jsonl", "--steps", "1", "--adapter.rank", "2", "--name", "mine"]
    small = ["--batch.sequence_length", "32", "--batch.tokens", "64", "--compute.device", "cpu"]
    assert main([*sft, *small]) == 0
    recorded = json.loads((tmp_path / "runs" / "mine" / "run.json").read_text("utf-8"))
    assert recorded["init"] == f"hf:{NAME}@{sha}"
    assert main(["export", "runs/mine", "--to", "peft", "--out", "adapters"]) == 0
    adapter = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text("utf-8"))
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, sha)
    assert f"base_model: {NAME}" in (tmp_path / "adapters" / "README.md").read_text("utf-8")
    server.repositories[NAME].commit(server.repositories[NAME].commits[sha] | {"config.json": b"{}"})
    assert torch.isfinite(load_model("adapters").model(torch.arange(20)[None])).all()  # of the old commit
    capsys.readouterr()
    assert main(["plan", "--gpu", "rtx4090", "--init", f"{NAME}@{sha}", "--tokens", "1M", "--json"]) == 0
    assert f"train --init hf:{NAME}@{sha}" in capsys.readouterr().out


def test_settings_of_the_environment(server: FakeHub, tmp_path: Path) -> None:
    refused = command("http://127.0.0.1:9", tmp_path / "empty", "eval", NAME, "--text", "chats.jsonl")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    plan = command(
        server.url, tmp_path / "home", "plan", "--gpu", "rtx4090", "--init", NAME, "--tokens", "1M"
    )
    assert plan.returncode == 0, plan.stderr


def test_push(server: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="HF_TOKEN"):
        check_push("me/model")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match="refuses"):
        check_push("me/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_push("me/model")
    push(published, "me/model", public=False)
    assert server.repositories["me/model"].private
    push(published, "me/open", public=True)
    assert not server.repositories["me/open"].private
    sent = server.repositories["me/model"].commits[server.repositories["me/model"].refs["main"]]
    assert "deskside.json" not in sent and "README.md" in sent
    assert torch.equal(
        load_model("me/model").model(torch.arange(20)[None]),
        load_model(published).model(torch.arange(20)[None]),
    )
    server.broken = 403
    for public, options in ((False, "--exclude deskside.json --private"), (True, "--exclude deskside.json")):
        with pytest.raises(RunError, match=f"complete in .*: hf upload me/model .* {options}$"):
            push(published, "me/model", public)
    with pytest.raises(UsageError):
        check_push("no-owner")
