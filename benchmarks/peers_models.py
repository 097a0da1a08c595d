"""Construction of each peer: its own model class at the common shape, its own precision and optimizer.

No code of a peer is copied: packages are imported, and the two repositories are loaded from a folder. Each peer
compiles its model together with the loss, which is the fastest option for all of them.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers_prototype import Prototype
from deskside.config.model import ModelConfig
from deskside.kernels.attention import Requirements, choose
from deskside.utils.errors import RunError, UsageError

BETAS, EPS, DECAY, CLIP, LR = (0.9, 0.95), 1e-8, 0.1, 1.0, 2e-4
NANOCHAT_HEAD_DIM = 128


@dataclass
class Peer:
    """A peer that is ready to train.

    loss(tokens_BT, targets_BT) is the mean loss of a micro-batch. update() clips if the peer does, and steps.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    update: Callable[[], None]
    compiled: bool
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """The workload of every peer."""

    model: ModelConfig
    sequence_length: int
    folder: Path | None
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """BF16 on a GPU, float32 on a CPU, where the benchmark only checks that every peer runs."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def missing(name: str, folder: Path | None) -> str | None:
    """Return a message about the package or folder that a peer lacks here, or None. Imports nothing."""
    spec = PEERS[name]
    for package in spec.packages:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
    if spec.repository:
        repository = (Path("--folder") if folder is None else folder) / spec.repository
        if folder is None or not (repository / spec.repository).is_dir():
            return f"there is no {repository}; benchmarks/README.md says how to export it"
    return None


def build(name: str, work: Work) -> Peer:
    """Build a peer. Raises UsageError for a peer that cannot run here."""
    reason = missing(name, work.folder)
    if reason is None and PEERS[name].cuda and work.device.type != "cuda":
        reason = "its FP8 products need a GPU"
    if reason is not None:
        raise UsageError(f"{name}: {reason}")
    return PEERS[name].build(work)


def _transformers(work: Work) -> Peer:
    return _qwen3(work, compiled=True)


def _transformers_liger(work: Work) -> Peer:
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3  # type: ignore[import-not-found]

    apply_liger_kernel_to_qwen3()
    peer = _qwen3(work, compiled=False)
    peer.notes.append("eager, with Liger's fused linear cross-entropy, norms, RoPE and SwiGLU")
    return peer


def _qwen3(work: Work, compiled: bool) -> Peer:
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = work.model
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=work.sequence_length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.to(work.device).train()

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        # transformers shifts the labels itself, so the last token of each row has no target: 1 in 2048.
        with _autocast(work):
            mean_loss: Tensor = model(input_ids=tokens_BT, labels=tokens_BT).loss
        return mean_loss

    notes = ["labels are shifted by the model: one target per row less"]
    return _with_adamw(work, model, loss, compiled, notes)


def _litgpt(work: Work) -> Peer:
    assert work.folder is not None
    _load_litgpt(work.folder / "litgpt")
    from litgpt.config import Config  # type: ignore[import-not-found]
    from litgpt.model import GPT  # type: ignore[import-not-found]

    shape = work.model
    config = Config(
        name="peer",
        block_size=work.sequence_length,
        n_layer=shape.num_hidden_layers,
        n_embd=shape.hidden_size,
        vocab_size=shape.vocab_size,
        padded_vocab_size=shape.vocab_size,
        n_head=shape.num_attention_heads,
        head_size=shape.head_dim,
        n_query_groups=shape.num_key_value_heads,
        intermediate_size=shape.intermediate_size,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape.norm_eps,
        norm_qk=shape.qk_norm,
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    model.apply(model._init_weights)
    model.to(work.device)

    def loss(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        with _autocast(work):
            return F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())

    return _with_adamw(work, model, loss, True, ["plain cross-entropy, compiled with the model"])


def _load_litgpt(repository: Path) -> None:
    """Make litgpt.config and litgpt.model importable without the rest of litgpt, which needs lightning.

    The model module imports one function of the checkpoint converter, which is only used for old checkpoints.
    """

    def unused(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("old checkpoints are not read here")

    package, scripts = ModuleType("litgpt"), ModuleType("litgpt.scripts")
    package.__path__ = [str(repository / "litgpt")]
    scripts.__path__ = []
    converter = ModuleType("litgpt.scripts.convert_hf_checkpoint")
    converter.qkv_reassemble = unused  # type: ignore[attr-defined]
    for module in (package, scripts, converter):
        sys.modules[module.__name__] = module


def _nanochat(work: Work) -> Peer:
    return _build_nanochat(work, fp8=False)


def _nanochat_fp8(work: Work) -> Peer:
    return _build_nanochat(work, fp8=True)


def _build_nanochat(work: Work, fp8: bool) -> Peer:
    assert work.folder is not None
    sys.path.insert(0, str(work.folder / "nanochat"))
    from nanochat import flash_attention  # type: ignore[import-not-found]
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    shape = work.model
    windows = "SSSL" if flash_attention.USE_FA3 else "L"
    heads = max(1, shape.hidden_size // NANOCHAT_HEAD_DIM)
    config = GPTConfig(
        sequence_len=work.sequence_length,
        vocab_size=shape.vocab_size,
        n_layer=shape.num_hidden_layers,
        n_head=heads,
        n_kv_head=heads,
        n_embd=shape.hidden_size,
        window_pattern=windows,
    )
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=work.device)
    model.init_weights()
    if fp8:
        from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

        config8 = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=config8, module_filter_fn=_nanochat_converts)
    optimizer = model.setup_optimizer()

    def update() -> None:
        optimizer.step()
        model.zero_grad(set_to_none=True)

    notes = [
        f"own shape ({heads} heads of {shape.hidden_size // heads}, ReLU^2, value embeddings), own Muon, no clipping",
        f"window pattern {windows}" + ("" if windows == "SSSL" else ": its own SSSL needs FlashAttention-3"),
    ]
    return Peer(_compiled(model, work), list(model.parameters()), update, work.device.type == "cuda", notes)


def _nanochat_converts(module: nn.Module, name: str) -> bool:
    """Return True if nanochat's training script converts this layer to FP8."""
    if not isinstance(module, nn.Linear):
        return False
    sizes = (module.in_features, module.out_features)
    return all(size % 16 == 0 for size in sizes) and min(sizes) >= 128


def _prototype(work: Work) -> Peer:
    model = Prototype(work.model, work.sequence_length, work.dtype).to(work.device)
    return _with_adamw(work, model, model, True, _prefer_cudnn(work))


def _prototype_torchao(work: Work) -> Peer:
    from torchao.float8 import (  # type: ignore[import-untyped]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    model = Prototype(work.model, work.sequence_length, work.dtype).to(work.device)
    config = Float8LinearConfig(emulate=work.device.type != "cuda")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
    notes = ["float8 tensorwise, dynamic scales, head in BF16", *_prefer_cudnn(work)]
    return _with_adamw(work, model, model, True, notes)


def _prefer_cudnn(work: Work) -> list[str]:
    """Make SDPA use cuDNN in the whole process if it works here. Return a note that says what is used."""
    if work.device.type != "cuda":
        return []
    shape = work.model
    need = Requirements(
        2,
        work.sequence_length,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        work.dtype,
        work.device,
    )
    try:
        choose(need, ["cudnn"])
    except RunError as error:
        return [f"attention is torch's own choice, because cuDNN's does not run here: {error}"]
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    return ["attention is cuDNN's"]


def _with_adamw(
    work: Work,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    compiled: bool,
    notes: list[str],
) -> Peer:
    """Add fused AdamW for all parameters and clipping at 1, as in deskside; vectors have no weight decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    compiled = compiled and work.device.type == "cuda"
    return Peer(_compiled(loss, work) if compiled else loss, parameters, update, compiled, notes)


def _compiled(loss: Callable[[Tensor, Tensor], Tensor], work: Work) -> Callable[[Tensor, Tensor], Tensor]:
    if work.device.type != "cuda":
        return loss
    return torch.compile(loss, dynamic=False)


@contextlib.contextmanager
def _autocast(work: Work) -> Iterator[None]:
    with torch.autocast(work.device.type, torch.bfloat16, enabled=work.device.type == "cuda"):
        yield


@dataclass(frozen=True)
class _Spec:
    """Requirements and constructor of a peer."""

    build: Callable[[Work], Peer]
    packages: tuple[str, ...] = ()
    repository: str = ""
    cuda: bool = False


PEERS = {
    "transformers": _Spec(_transformers, ("transformers",)),
    "transformers-liger": _Spec(_transformers_liger, ("transformers", "liger_kernel", "triton")),
    "litgpt": _Spec(_litgpt, ("yaml",), "litgpt"),
    "nanochat": _Spec(_nanochat, (), "nanochat"),
    "nanochat-fp8": _Spec(_nanochat_fp8, (), "nanochat", cuda=True),
    "prototype": _Spec(_prototype),
    "prototype-torchao": _Spec(_prototype_torchao, ("torchao",)),
}
