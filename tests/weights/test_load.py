"""Every kind of path to a model, and everything that can be wrong with it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from deskside.config.model import ModelConfig
from deskside.data import tokenizer as bpe
from deskside.model.init import InitOptions, allocate, initialize
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.utils.errors import RunError, UsageError
from deskside.weights import hf, load
from deskside.weights.hf import save_hf
from deskside.weights.load import load_model
from tests.data.test_damage import check

SHAPE = ModelConfig(
    vocab_size=280,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
)
TOKENS_BT = torch.tensor([[3, 80, 81, 99, 200, 4, 4, 17]])


def made(seed: int, config: ModelConfig = SHAPE) -> Transformer:
    model = Transformer(config)
    initialize(model, seed, InitOptions(head_std=0.3, output="fan_in"))
    return model


def save(run: Path, step: int, model: Transformer, sharded: bool = False) -> Path:
    """Write a checkpoint like training does: see deskside/weights/checkpoint.py."""
    folder = run / "checkpoints" / f"step-{step:09d}"
    folder.mkdir(parents=True)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if sharded:
        writer = dcp.HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
        dcp.save({"model": tensors, "optimizer": {}}, storage_writer=writer, no_dist=True)
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "state.json").write_text("{}")
    list_files(folder)
    return folder


def list_files(folder: Path) -> None:
    """Write the manifest of a checkpoint."""
    (folder / "manifest.json").unlink(missing_ok=True)
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest = xxhash.xxh3_128(path.read_bytes()).hexdigest()
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "xxh3_128": digest}
    (folder / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": files}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "small"
    path.mkdir(parents=True)
    config = {"model": SHAPE.model_dump(mode="json")}
    (path / "run.json").write_text(json.dumps({"schema_version": 1, "name": "small", "config": config}))
    bpe.save(bpe.train(["a text of some words, and some more words"] * 3, 270), path)
    return path


def test_run_gives_its_newest_checkpoint(run: Path) -> None:
    for step in (10, 300, 20):
        save(run, step, made(step))
    loaded = load_model(run)
    assert (loaded.kind, loaded.step, loaded.run_dir, loaded.name) == ("run", 300, run, "small")
    assert torch.equal(loaded.model(TOKENS_BT), made(300)(TOKENS_BT))
    assert loaded.config == SHAPE
    end = loaded.tokenizer.token_to_id("<|endoftext|>")
    assert loaded.start_token == end
    assert loaded.eos_tokens == {end, loaded.tokenizer.token_to_id("<|im_end|>")}


def test_one_checkpoint_of_a_run(run: Path, tmp_path: Path) -> None:
    folder = save(run, 10, made(10))
    save(run, 20, made(20))
    loaded = load_model(folder)
    assert (loaded.kind, loaded.step, loaded.run_dir) == ("checkpoint", 10, run.resolve())
    assert torch.equal(loaded.model(TOKENS_BT), made(10)(TOKENS_BT))
    shutil.copytree(folder, tmp_path / "away" / folder.name)
    with pytest.raises(UsageError, match="not inside a run"):
        load_model(tmp_path / "away" / folder.name)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_checkpoint(run: Path) -> None:
    save(run, 10, made(10), sharded=True)
    assert torch.equal(load_model(run).model(TOKENS_BT), made(10)(TOKENS_BT))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("harm", ["offset", "header", "cut", "empty", "other", "pickle"])
def test_shards_that_are_not_whole(harm: str, run: Path) -> None:
    """The manifest matches, because whoever writes the files can compute their checksums."""
    save(run, 10, made(10))
    model = made(20, SHAPE.model_copy(update={"intermediate_size": 64})) if harm == "other" else made(20)
    folder = save(run, 20, model, sharded=True)
    (file,) = (folder / "sharded").iterdir()
    if harm == "pickle":
        (folder / "sharded" / ".metadata").write_bytes(b"")
    elif harm in ("empty", "cut"):
        file.write_bytes(file.read_bytes()[: 0 if harm == "empty" else -100])
    elif harm != "other":
        with safe_open(file, "pt") as stored:
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
            info = json.loads(stored.metadata()["DCP_SHARDING_INFO"])
        name = min(key for key, tensor in tensors.items() if tensor.ndim == 2)
        if harm == "offset":  # part of a tensor is missing
            tensors[name], info[name]["saved_offsets"] = tensors[name][1:].clone(), [1, 0]
        text = json.dumps(info) if harm == "offset" else "[" * 100_000
        save_file(tensors, file, metadata={"DCP_SHARDING_INFO": text})
    list_files(folder)
    warnings: list[str] = []
    if harm in ("other", "pickle"):
        remedy = "belong to another architecture" if harm == "other" else "export it with the version"
        with pytest.raises(RunError, match=remedy):
            load_model(run, warn=warnings.append)
        assert not warnings
    else:
        assert load_model(run, warn=warnings.append).step == 10
        assert len(warnings) == 1 and "step 20" in warnings[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_read_on_the_host(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are float32, and a GPU may have room for half of that and no more."""
    asked: list[tuple[str, torch.dtype]] = []

    def noted(config: Any, device: torch.device | str, dtype: torch.dtype) -> Transformer:
        asked.append((str(device), dtype))
        return allocate(config, device, dtype)

    save(run, 10, made(10), sharded=True)
    monkeypatch.setattr("deskside.weights.load.allocate", noted)
    loaded = load_model(run, "meta", torch.bfloat16)
    assert sorted(asked, key=str) == [("cpu", torch.float32), ("meta", torch.bfloat16)]
    assert {p.dtype for p in loaded.model.parameters() if p.ndim >= 2} == {torch.bfloat16}


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "manifest"])
def test_damaged_checkpoint_is_named_and_the_older_one_used(run: Path, harm: str) -> None:
    save(run, 10, made(10))
    folder = save(run, 20, made(20))
    weights = folder / "model.safetensors"
    if harm == "flip":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
    elif harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "gone":
        weights.unlink()
    else:
        (folder / "manifest.json").write_text('{"files": {')
    warnings: list[str] = []
    loaded = load_model(run, warn=warnings.append)
    assert loaded.step == 10
    assert torch.equal(loaded.model(TOKENS_BT), made(10)(TOKENS_BT))
    (warning,) = warnings
    assert "step 20" in warning
    assert str(folder) in warning
    with pytest.raises(RunError, match=r"step-000000020"):
        load_model(folder)
    shutil.rmtree(run / "checkpoints" / "step-000000010")
    with pytest.raises(RunError, match="all 1 checkpoints are damaged"):
        load_model(run, warn=warnings.append)


def test_hugging_face_directory_and_run_without_checkpoints(run: Path, tmp_path: Path) -> None:
    for folder, kind in ((tmp_path / "hf", "hf"), (run / "model", "run")):
        save_hf(made(5), SHAPE, run, folder)
        loaded = load_model(folder if kind == "hf" else run)
        assert (loaded.kind, loaded.step) == (kind, None)
        assert torch.equal(loaded.model(TOKENS_BT), made(5)(TOKENS_BT))


@pytest.mark.parametrize(
    ("ids", "added"), [(-1, set()), (10**6, set()), ([7, -1, 10**6], {7}), (True, set()), (None, set())]
)
def test_end_tokens_are_tokens_of_the_model(ids: Any, added: set[int], run: Path, tmp_path: Path) -> None:
    save_hf(made(5), SHAPE, run, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").unlink()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    without = load_model(tmp_path / "hf").eos_tokens
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert load_model(tmp_path / "hf").eos_tokens == without | added


def test_without_generation_config_the_end_tokens_are_those_of_transformers(
    run: Path, tmp_path: Path
) -> None:
    folder = save_hf(made(5), SHAPE, run, tmp_path / "hf")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    theirs = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    loaded = load_model(folder)
    assert {7, 9} == set(theirs) <= loaded.eos_tokens
    again = save_hf(loaded.model, loaded.config, folder, tmp_path / "again")
    assert json.loads((again / "generation_config.json").read_text())["eos_token_id"] == [7, 9]


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_gives_the_numbers_of_bf16_training(run: Path, tied: bool) -> None:
    config = SHAPE.model_copy(update={"tie_word_embeddings": tied})
    content = {"schema_version": 1, "name": "small", "config": {"model": config.model_dump(mode="json")}}
    (run / "run.json").write_text(json.dumps(content))
    trained = made(10, config)
    save(run, 10, trained)
    convert(trained, "bf16")
    loaded = load_model(run, dtype=torch.bfloat16)
    assert loaded.model.activation_dtype == torch.bfloat16
    assert torch.equal(loaded.model(TOKENS_BT), trained(TOKENS_BT))


@pytest.mark.parametrize("kind", ["run", "checkpoint", "exported", "hf"])
def test_what_is_read_in_bfloat16_never_takes_the_memory_of_float32(
    kind: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that holds a model in 16 bits may have no room for one in 32."""
    path = run
    if kind in ("run", "checkpoint"):
        checkpoint = save(run, 10, made(10))
        path = checkpoint if kind == "checkpoint" else run
    else:
        path = run if kind == "exported" else tmp_path / "hf"
        save_hf(made(10), SHAPE, run, run / "model" if kind == "exported" else path)
    asked: list[torch.dtype] = []

    def noted(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> Transformer:
        asked.append(dtype)
        return allocate(config, device, dtype)

    for module in (load, hf):
        monkeypatch.setattr(module, "allocate", noted)
    found = dict(load_model(path, dtype=torch.bfloat16).model.named_parameters())
    assert asked == [torch.bfloat16]
    for name, parameter in made(10).named_parameters():
        kept = torch.bfloat16 if parameter.ndim >= 2 else torch.float32
        assert torch.equal(found[name], parameter.to(kept))


def test_wrong_paths_say_what_to_do(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(UsageError, match="contains neither a run"):
        load_model(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        load_model(run / "run.json")
    with pytest.raises(UsageError, match="no checkpoint yet; make one with: deskside train --resume"):
        load_model(run)


def test_what_does_not_belong_together_is_refused(run: Path) -> None:
    save(run, 10, made(10, SHAPE.model_copy(update={"intermediate_size": 64})))
    with pytest.raises(RunError, match="belong to another architecture"):
        load_model(run)
    shutil.rmtree(run / "checkpoints")
    small = SHAPE.model_copy(update={"vocab_size": 100})
    (run / "run.json").write_text(
        json.dumps({"schema_version": 1, "config": {"model": small.model_dump(mode="json")}})
    )
    save(run, 10, made(10, small))
    with pytest.raises(RunError, match="above the model's vocabulary of 100"):
        load_model(run)
    (run / "run.json").write_text(
        json.dumps({"schema_version": 1, "config": {"model": {"hidden_size": "wide"}}})
    )
    with pytest.raises(RunError, match=r"config\.model"):
        load_model(run)
    (run / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is damaged: it is not JSON"):
        load_model(run)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "run.json"]
)
def test_values_of_the_wrong_kind_are_named(name: str, run: Path, tmp_path: Path) -> None:
    """Each value of a hand-made file is replaced in turn."""
    save(run, 1, made(1))
    folder = run if name == "run.json" else save_hf(made(1), SHAPE, run, tmp_path / "hf")
    refused = check(folder / name, lambda: load_model(folder))
    assert refused > 0 or name != "config.json"


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 9000]
)
def test_an_index_of_shards_that_is_none(content: str, run: Path, tmp_path: Path) -> None:
    folder = save_hf(made(1), SHAPE, run, tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(RunError, match=r"model\.safetensors\.index\.json(: has no weight_map| is damaged)"):
        load_model(folder)


def test_weights_of_an_unfinished_run_are_announced(run: Path) -> None:
    said = list[str]()
    save(run, 40, made(1))
    (run / "plan.json").write_text('{"revisions": [{"step": 0, "remaining": 1200}]}')
    load.warn_if_unfinished(load_model(run), said.append)
    assert len(said) == 1 and "step 40 of 1,200" in said[0]
    load.warn_if_unfinished(load_model(run / "checkpoints" / "step-000000040"), said.append)
    (run / "summary.json").write_text("{}")
    load.warn_if_unfinished(load_model(run), said.append)
    assert len(said) == 1
