"""Peer trainers on a CPU: the prototype against transformers' Qwen3, and the command with the peers installed here."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import peers, peers_models
from benchmarks.peers_prototype import CastLinear, Prototype
from benchmarks.step_config import configuration

CONFIG = configuration({"preset": "demo", "precision": "fp32", "tokens": 512})
WORK = peers_models.Work(CONFIG.model, 128, None, torch.device("cpu"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def test_names_agree() -> None:
    assert list(peers.ROWS) == list(peers_models.PEERS)


def test_the_prototype_is_the_same_model() -> None:
    """With the same weights, transformers' Qwen3ForCausalLM has the same loss and the same embedding gradient."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    shape = CONFIG.model
    prototype = Prototype(shape, 128, torch.float32)
    config = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, tie_word_embeddings=False,
    )  # fmt: skip
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {"model.embed_tokens": prototype.embed, "model.norm": prototype.norm, "lm_head": prototype.head}
    weights = {f"{name}.weight": module.weight.detach() for name, module in state.items()}
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    F = shape.intermediate_size
    for i, layer in enumerate(prototype.layers):
        into = f"model.layers.{i}"
        parts = layer.qkv.weight.detach().split([q, kv, kv])
        weights |= {f"{into}.self_attn.{n}_proj.weight": w for n, w in zip("qkv", parts, strict=True)}
        gate, up = layer.gate_up.weight.detach().split(F)
        named = {
            "self_attn.o_proj": layer.out.weight, "mlp.down_proj": layer.down.weight,
            "self_attn.q_norm": layer.q_norm.weight, "self_attn.k_norm": layer.k_norm.weight,
            "input_layernorm": layer.attention_norm.weight, "post_attention_layernorm": layer.mlp_norm.weight,
            "mlp.gate_proj": gate, "mlp.up_proj": up,
        }  # fmt: skip
        weights |= {f"{into}.{name}.weight": w.detach() for name, w in named.items()}
    other.load_state_dict(weights)
    tokens = torch.randint(0, shape.vocab_size, (2, 64))
    ours = Prototype.forward(_shortened(prototype, 64), tokens[:, :-1], tokens[:, 1:])
    theirs = other(input_ids=tokens, labels=tokens).loss
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    ours.backward()
    theirs.backward()
    assert prototype.embed.weight.grad is not None
    torch.testing.assert_close(
        prototype.embed.weight.grad, other.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-6
    )


def _shortened(model: Prototype, tokens: int) -> Prototype:
    model.cos, model.sin = model.cos[:, : tokens - 1], model.sin[:, : tokens - 1]
    return model


def test_torchao_takes_all_but_the_head() -> None:
    pytest.importorskip("torchao")
    peer = peers_models.build("prototype-torchao", WORK)
    model = peer.loss
    assert isinstance(model, Prototype)
    kinds = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert kinds.pop("head") == CastLinear.__name__
    assert set(kinds.values()) == {"Float8Linear"}
    assert len(kinds) == 4 * CONFIG.model.num_hidden_layers


def test_weights_move_and_vectors_do_not_decay() -> None:
    torch.manual_seed(0)
    peer = peers_models.build("prototype", WORK)
    before = [p.detach().clone() for p in peer.parameters]
    tokens = torch.randint(0, CONFIG.model.vocab_size, (2, 128))
    peer.loss(tokens, tokens.roll(-1, 1)).backward()
    peer.update()
    assert all(not torch.equal(a, b) for a, b in zip(before, peer.parameters, strict=True))
    assert all(p.grad is None for p in peer.parameters)


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs an available peer, a missing one, and deskside; checks rows, ratio and JSON."""
    file = tmp_path / "peers.json"
    words = "--preset demo --tokens 512 --steps 2 --warmup 1 --device cpu --only prototype,nanochat --deskside fp32"
    assert peers.main([*words.split(), "--folder", str(tmp_path), "--json", str(file)]) == 0
    prototype, nanochat, ours = json.loads(file.read_text())["rows"]
    assert nanochat["status"] == "missing" and "nanochat" in nanochat["error"]
    assert (prototype["name"], ours["name"]) == ("prototype", "deskside fp32")
    for row in (prototype, ours):
        assert row["status"] == "ok" and row["finite"]
        assert row["tokens_per_second"] == pytest.approx(512 / row["step_ms"]["median"] * 1e3)
    assert prototype["params"] == ours["params"]
    printed = capsys.readouterr().out
    wanted = ours["tokens_per_second"] / prototype["tokens_per_second"]
    assert f"{wanted:.2f}x" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only torch", "no peer torch"),
        ("--preset nothing", "no such preset"),
        ("--steps 0", "at least 1"),
        ("--tokens 1000", "not a multiple"),
    ],
)
def test_wrong_usage_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--preset", "demo", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
