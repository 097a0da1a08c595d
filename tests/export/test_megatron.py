"""megatron-core's own GPTModel computes what transformers does, from our checkpoint, and the weights come back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.export import megatron
from deskside.utils.errors import UsageError
from deskside.weights.hf import load_hf, save_hf, to_hf
from tests.data.chat_tokenizer import make as make_tokenizer
from tests.export.test_hf_parity import GEMMA2, random_model
from tests.oracles import oracle

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1e6},
    "llama": {"qk_norm": False, "tie_word_embeddings": True, "num_key_value_heads": 4},
}
# Writes the checkpoint of each model, runs megatron-core's model on it, and brings the weights back from a checkpoint
# as training would have written it. Without a GPU, dropout of 0 has no state of random numbers to take.
SCRIPT = """
import sys

def main():  # with all imports: megatron-core's writer starts a process that imports this file
    import contextlib
    from pathlib import Path
    import torch
    from deskside.export import megatron
    from deskside.weights.hf import load_hf, to_hf

    for folder in map(Path, sys.argv[1:]):
        assert megatron.main([str(folder / "hf"), "--out", str(folder / "checkpoint")]) == 0
        source, _ = to_hf(*reversed(load_hf(folder / "hf")))
        with megatron.one_process():
            from megatron.core import dist_checkpointing, tensor_parallel
            tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
            model = megatron.gpt_model(source).eval()
            state = {"model": model.sharded_state_dict()}
            model.load_state_dict(dist_checkpointing.load(state, str(folder / "checkpoint/release"))["model"])
            ids = torch.load(folder / "ids.pt")
            B, T = ids.shape
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1).expand(B, 1, T, T)  # what a token may not see
            with torch.no_grad():
                torch.save(model(ids, torch.arange(T).expand(B, T), hidden), folder / "logits.pt")
            padded = megatron.gpt_model({**source, "vocab_size": 640})  # Megatron-LM rounds vocabularies up
            state = {"model": padded.sharded_state_dict()}
            padded.load_state_dict(dist_checkpointing.load(state, str(folder / "checkpoint/release"))["model"])
            (folder / "checkpoint/iter_0000010").mkdir()
            dist_checkpointing.save({"model": padded.sharded_state_dict()}, str(folder / "checkpoint/iter_0000010"))
        (folder / "checkpoint" / megatron.TRACKER).write_text("10")
        command = [str(folder / "hf"), "--back", str(folder / "checkpoint"), "--out", str(folder / "back")]
        assert megatron.main(command) == 0
        (folder / "checkpoint/iter_0000010/.metadata").unlink()
        assert megatron.main([*command[:-1], str(folder / "damaged")]) == 1

if __name__ == "__main__":
    main()
"""


def write(folder: Path, case: dict[str, Any]) -> Path:
    model = random_model(**case, vocab_size=512)
    save_hf(model, model.config, make_tokenizer(folder), folder / "hf")
    return folder / "hf"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_layouts_are_inverse(case: dict[str, Any], tmp_path: Path) -> None:
    config, model = load_hf(write(tmp_path, case))
    _, tensors = to_hf(model, config)
    theirs = megatron.megatron_weights(tensors, config)
    assert theirs["decoder.layers.1.self_attention.linear_qkv.weight"].shape == (
        (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim,
        config.hidden_size,
    )
    back = megatron.hf_weights(theirs, config)
    assert back.keys() == tensors.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    assert all(torch.equal(back[name], tensors[name]) for name in back)


@pytest.mark.full
def test_megatron_computes_the_same(tmp_path: Path) -> None:
    folder = oracle("megatron_core")
    ids = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = {}
    for name, case in CASES.items():
        (tmp_path / name).mkdir()
        _, model = load_hf(write(tmp_path / name, case))
        torch.save(ids, tmp_path / name / "ids.pt")
        with torch.no_grad():
            ours[name] = model.eval()(ids)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), *(str(tmp_path / name) for name in CASES)]
    path = [str(Path(__file__).parents[2]), str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("deskside: ") == len(CASES)  # of the damaged ones
    for name in CASES:
        theirs = torch.load(tmp_path / name / "logits.pt")
        torch.testing.assert_close(theirs, ours[name], atol=2e-5 * float(ours[name].abs().max()), rtol=0)
        before, after = (tmp_path / name / each / "model.safetensors" for each in ("hf", "back"))
        assert before.read_bytes() == after.read_bytes()
        assert (tmp_path / name / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "case",
    [
        GEMMA2,
        {"qk_norm": False, "attention_bias": True},
        {"hidden_act": "gelu_new"},
        {"rope_theta": 10000.5},
        {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8}},
        {"num_hidden_layers": 4, "sliding_window": 5, "window_pattern": "SL"},
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ],
)
def test_what_is_not_converted_is_refused(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path, case)
    assert megatron.main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "pip install" not in capsys.readouterr().err  # megatron-core is not needed for that
    assert not (tmp_path / "out").exists()


def test_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {})
    monkeypatch.setattr(megatron.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install megatron-core"):
        megatron.to_megatron(folder, tmp_path / "out")
    with pytest.raises(UsageError, match="choose another"):
        megatron.to_megatron(folder, tmp_path)
    with pytest.raises(UsageError, match=megatron.TRACKER):
        megatron.from_megatron(folder, tmp_path, tmp_path / "out")


def test_the_options_describe_the_model(tmp_path: Path) -> None:
    config, model = load_hf(write(tmp_path, CASES["qwen3"]))
    options = " ".join(megatron.megatron_options(to_hf(model, config)[0])).split()
    assert options[options.index("--ffn-hidden-size") + 1] == str(config.intermediate_size)
    assert options[options.index("--rotary-base") + 1] == "1000000"
    assert {"--qk-layernorm", "--untie-embeddings-and-output-weights"} <= {*options}
