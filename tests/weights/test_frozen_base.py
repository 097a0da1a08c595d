"""The files of a run with adapters: the base once, and adapters in checkpoints. Both are restored bitwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.precision.frozen import FrozenLinear
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint
from deskside.weights import frozen_base
from deskside.weights.checkpoint_folder import WEIGHTS, files_of, folder_name
from deskside.weights.load import load_model
from deskside.weights.merge_adapters import load_adapted_model, load_adapted_run, merge_into, merged
from tests.budget.test_adapters import Live
from tests.export.adapted import BIASED_MOE, TINY, trained

TOKENS = torch.tensor([[3, 5, 17, 60, 3, 9, 11, 2, 44, 5]])
FORMATS = ["bf16", "int8", "nf4"]


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def write_run(
    folder: Path, model: Transformer, adapter: dict[str, Any], steps: tuple[int, ...] = (7,)
) -> None:
    """Write a run like training does, as far as reading its model needs it."""
    config = RunConfig.model_validate(
        {"model": TINY, "adapter": {"rank": 4, "alpha": 8, **adapter}, "optim": {"name": "adamw"}, "seed": 5,
         "batch": {"sequence_length": 32, "tokens": 256}}
    )  # fmt: skip
    run = {
        "schema_version": 1,
        "name": "tuned",
        "init": "some/model",
        "config": config.model_dump(mode="json"),
    }
    (folder / "run.json").write_text(json.dumps(run))
    frozen_base.save(model, folder)
    tokens = ["<|endoftext|>", *(f"t{i}" for i in range(60))]
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": [
                {"id": 0, "content": tokens[0], "special": True, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False}],
             "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, "truncation": None,
             "padding": None,
             "model": {"type": "WordLevel", "vocab": {t: i for i, t in enumerate(tokens)}, "unk_token": tokens[0]}}
        )
    )  # fmt: skip
    for step in steps:
        place = folder / "checkpoints" / folder_name(step)
        place.mkdir(parents=True)
        save_file(weights(model), place / WEIGHTS)
        files = {
            p.name: dict(zip(("bytes", "xxh3_128"), fingerprint(p), strict=True)) for p in files_of(place)
        }
        (place / "manifest.json").write_text(json.dumps({"schema_version": 1, "files": files}))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [(), (3, 60)])
def test_reopened_it_is_the_same_to_the_last_bit(
    format: str, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    model, options = trained({"base": format}, tokens)
    frozen_base.save(model, tmp_path)
    again = frozen_base.load(tmp_path, model.config, options, 5, "cpu")
    again.embed.output_dtype = torch.float32
    assert weights(again).keys() == weights(model).keys()
    fresh = frozen_base.load(tmp_path, model.config, options, 6, "cpu")
    name = "layers.0.attn.input.projections.0.adapter.a.q_proj"
    assert not torch.equal(weights(again)[name], weights(fresh)[name])  # by the seed
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights(model)[name])
    assert torch.equal(again(TOKENS), model(TOKENS))
    stored = load_file(tmp_path / frozen_base.BASE)
    assert not any("adapter" in name or "trained" in name for name in stored)
    frozen = [module for module in again.modules() if isinstance(module, FrozenLinear)]
    assert len(frozen) == (0 if format == "bf16" else 8)


@pytest.mark.parametrize("format", FORMATS)
def test_biases_of_experts_come_back(format: str, tmp_path: Path) -> None:
    model, options = trained({"base": format}, (), **BIASED_MOE)
    frozen_base.save(model, tmp_path)
    again = frozen_base.load(tmp_path, model.config, options, 5, "cpu")
    saved = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    assert saved and all(torch.equal(again.get_parameter(name), p) for name, p in saved.items())


@pytest.mark.parametrize("format", FORMATS)
def test_merging_needs_one_weight_at_a_time(format: str) -> None:
    """In float32, with its adapter's contribution. A table that nothing trains is copied."""
    model, _ = trained({"base": format}, intermediate_size=512, vocab_size=2000)
    plain = allocate(model.config, "cpu", torch.bfloat16)
    with Live(*plain.parameters(), *model.parameters(), *model.buffers()) as live:
        before = live.peak
        merge_into(plain, model)
    largest = 2 * 512 * 64  # gate and up together
    assert 4 * largest <= live.peak - before <= 1.75 * 4 * largest < 4 * 2000 * 64


@pytest.mark.parametrize("format", FORMATS)
def test_a_base_is_read_on_the_host(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have room for the merged model and no more."""
    model, _ = trained({"base": format})
    write_run(tmp_path, model, {"base": format})
    where: list[torch.device | str] = []

    def noted(*given: Any) -> Transformer:
        where.append(given[3])
        return load_adapted_model(*given)

    monkeypatch.setattr("deskside.weights.load.load_adapted_model", noted)
    monkeypatch.setattr(
        "deskside.weights.load.merged", lambda found, *given: where.append(given[0]) or merged(found)
    )
    load_model(tmp_path, "meta", torch.bfloat16)
    assert where == ["cpu", "meta"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_is_loaded_as_the_merged_model(format: str, tmp_path: Path) -> None:
    model, _ = trained({"base": format}, (60,))
    write_run(tmp_path, model, {"base": format})
    loaded = load_model(tmp_path)
    assert (loaded.step, loaded.kind) == (7, "run")
    expected = dict(merged(model).named_parameters())
    assert {n: p.shape for n, p in loaded.model.named_parameters()} == {
        n: p.shape for n, p in expected.items()
    }
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    apart = load_adapted_run(tmp_path, pytest.fail)
    assert (apart.step, apart.init) == (7, "some/model")
    assert all(torch.equal(tensor, weights(model)[name]) for name, tensor in weights(apart.model).items())


def test_of_a_damaged_checkpoint_the_older_one_is_taken(tmp_path: Path) -> None:
    model, _ = trained()
    write_run(tmp_path, model, {}, steps=(7, 9))
    newest = tmp_path / "checkpoints" / folder_name(9) / WEIGHTS
    newest.write_bytes(newest.read_bytes()[:-1])
    told: list[str] = []
    assert load_model(tmp_path, warn=told.append).step == 7
    assert load_adapted_run(tmp_path, told.append).step == 7
    assert len(told) == 2 and all("step 9 is not used" in line for line in told)


def test_a_relative_init_is_found_from_any_directory(tmp_path: Path) -> None:
    run_dir, base = tmp_path / "tuned", tmp_path / "runs" / "base"
    for folder in (run_dir, base):
        folder.mkdir(parents=True)
    (base / "run.json").write_text("{}")
    write_run(run_dir, trained()[0], {})
    run = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**run, "init": "runs/base", "directory": str(tmp_path)}))
    assert load_adapted_run(run_dir, pytest.fail).init == str(base / "model")


def test_a_base_that_was_changed_is_refused(tmp_path: Path) -> None:
    model, options = trained()
    write_run(tmp_path, model, {})
    file = tmp_path / frozen_base.BASE
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"base.safetensors: is damaged: its checksum differs from base.json"):
        load_model(tmp_path)
    file.unlink()
    with pytest.raises(RunError, match=r"base.safetensors: cannot be read .*restore it"):
        frozen_base.load(tmp_path, model.config, options, 5, "cpu")
    (tmp_path / frozen_base.FACTS).write_text("{}")
    with pytest.raises(RunError, match=r"base.json: bytes: Field required; restore it"):
        frozen_base.load(tmp_path, model.config, options, 5, "cpu")


def test_a_run_without_adapters_has_none_to_open(tmp_path: Path) -> None:
    model, _ = trained()
    write_run(tmp_path, model, {})
    run = json.loads((tmp_path / "run.json").read_text())
    run["config"]["adapter"] = None
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(UsageError, match=r"was trained without adapters; .*--adapter.rank 16"):
        load_adapted_run(tmp_path, pytest.fail)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(frozen_base, "save_file", full)
    with pytest.raises(RunError, match=r"base.safetensors: cannot be written: No space left on device"):
        frozen_base.save(trained()[0], tmp_path)
    assert not list(tmp_path.iterdir())
