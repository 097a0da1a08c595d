"""Models whose block weights are quantized for generation."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from deskside.cli.chat import run as chat
from deskside.engine.generate import generate
from deskside.ops.linear import Linear
from deskside.precision.frozen import Format, FrozenLinear, frozen_layer, quantize_for_generation
from deskside.utils.errors import UsageError
from deskside.weights.load import load_for_generation, load_model
from tests.engine.test_generate import PROMPTS, VARIANTS, make, plain
from tests.serve.made_run import make as make_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["gqa", "window", "learned", "capped"])
def test_generation_is_that_of_the_weights_that_the_codes_stand_for(name: str, format: Format) -> None:
    model, dense = make(**VARIANTS[name]), make(**VARIANTS[name])
    quantize_for_generation(model, format, CPU)
    replaced = 0
    for path, module in dense.named_modules():
        if isinstance(stored := model.get_submodule(path), FrozenLinear):
            assert isinstance(module, Linear)
            module.weight.data = stored.dense()
            replaced += 1
    assert replaced == sum(isinstance(m, Linear) and m.role == "matrix" for m in dense.modules()) > 0
    assert all(torch.equal(p, dict(dense.named_parameters())[n]) for n, p in model.named_parameters())
    for prompt, answer in zip(PROMPTS, generate(model, PROMPTS, max_new_tokens=12), strict=True):
        assert answer.tokens == plain(dense, prompt, 12)


def test_fp8_codes_are_the_nearest() -> None:
    source = Linear(40, [("o_proj", 24)])
    torch.nn.init.normal_(source.weight)
    with torch.no_grad():
        source.weight[3] = 0
        layer = frozen_layer(source, "fp8")
    assert isinstance(layer, FrozenLinear)
    weight, scale = source.weight.detach().numpy(), layer.row_scale.numpy()
    largest = np.abs(weight).max(1)
    np.testing.assert_allclose(scale, np.where(largest > 0, largest, 1) / 448, rtol=1e-6)
    expected = (weight / scale[:, None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(layer.codes.float().numpy(), expected)


def test_what_cannot_be_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="experts"):
        quantize_for_generation(make(**VARIANTS["moe"]), "int8", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(UsageError, match=r"8\.9.*int8"):
        quantize_for_generation(make(), "fp8", torch.device("cuda"))


def test_commands_load_quantized_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path).path
    loaded = load_for_generation(run, CPU, torch.float32, "int8")
    exact = load_model(run)
    assert any(isinstance(module, FrozenLinear) for module in loaded.model.modules())
    tokens = torch.arange(12)[None] * 7
    with torch.no_grad():
        got, wanted = loaded.model(tokens), exact.model(tokens)
    assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.05
    options = [
        str(run),
        "--prompt",
        "the sea",
        "--temperature",
        "0",
        "--max-new-tokens",
        "4",
        "--device",
        "cpu",
    ]
    assert chat([*options, "--quantize", "int8"]) == 0
    assert capsys.readouterr().out.strip()
    with pytest.raises(UsageError):
        chat([*options, "--quantize", "int3"])
