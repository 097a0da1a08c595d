"""Hand a model to Megatron-LM as a distributed checkpoint (its format torch_dist), and bring it back.

    python -m deskside.export.megatron runs/124m/model --out megatron/checkpoint
    python -m deskside.export.megatron runs/124m/model --back megatron/checkpoint --out back

The first prints the options of Megatron-LM that describe the model. The second takes the configuration and tokenizer of
that model, and the weights that Megatron-LM saved last. Both need megatron-core (`pip install megatron-core`) and no
GPU: megatron-core builds the model from its own modules and writes or reads the checkpoint, which does not depend on
the number of GPUs that share the model, nor on transformer-engine.
"""

import argparse
import contextlib
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.utils.console import command_lines
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.utils.parsing import read_json_object
from deskside.weights.hf import by_hf_name, load_hf, read_parts, save_hf, to_hf
from deskside.weights.hf_config import to_hf_config
from deskside.weights.hf_families import family_of

TRACKER = "latest_checkpointed_iteration.txt"  # names the folder beside it that Megatron-LM reads
RELEASE = "release"  # its name for weights without optimizer states
FAMILIES = ("qwen3", "llama")


def to_megatron(folder: Path, out: Path) -> list[str]:
    """Write a Hugging Face directory as a distributed checkpoint. Return the options of Megatron-LM for this model.

    Raises UsageError for an architecture that is not Qwen3 or Llama, if megatron-core is missing, and if `out` is not
    empty; RunError if the model is damaged or the disk is full.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {out}: exists; choose another directory")
    config, model, source = _read(folder)
    with one_process():
        theirs = gpt_model(source)
        weights = megatron_weights(to_hf(model, config)[1], config)
        missing = theirs.load_state_dict(weights, strict=False)
        assert not [name for name in missing.missing_keys if "_extra_state" not in name], missing
        assert not missing.unexpected_keys, missing
        try:
            (out / RELEASE).mkdir(parents=True)
            _save(
                {"model": theirs.sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0},
                out / RELEASE,
            )
            write_atomically(out / TRACKER, RELEASE)  # last: without it Megatron-LM finds no checkpoint
        except OSError as error:
            shutil.rmtree(out / RELEASE, ignore_errors=True)
            raise RunError(f"--out {out}: cannot be written: {error.strerror or error}") from None
    return megatron_options(source)


def from_megatron(folder: Path, checkpoint: Path, out: Path) -> Path:
    """Write Megatron-LM's newest weights as a Hugging Face directory. folder: the model that Megatron-LM was given.

    Raises UsageError as `to_megatron` does and if there is no checkpoint, and RunError if it is damaged or is of
    another model.
    """
    newest = _newest(checkpoint)
    config, model, source = _read(folder)
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    with one_process():
        theirs = gpt_model(source)
        try:
            loaded = _load({"model": theirs.sharded_state_dict()}, newest)["model"]
        except (
            CheckpointingException,
            CheckpointException,
            KeyError,
            OSError,
            RuntimeError,
            ValueError,
        ) as error:
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(f"{newest}: is damaged, or of another model than {folder}: {why[-1]}") from None
    with torch.no_grad():
        stored, family = hf_weights(loaded, config), family_of(config)
        for name, parts in by_hf_name(model, family).items():
            read_parts(parts, stored[name], config, family, f"{newest}: {name}")
    tokenizer = folder if (folder / "tokenizer.json").exists() else None
    dtype = torch.bfloat16 if _stored_dtype(folder) == "bfloat16" else torch.float32
    return save_hf(model, config, tokenizer, out, dtype, about={"origin": f"Megatron-LM, {newest.name}"})


def megatron_weights(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return Hugging Face's weights under Megatron's names and in its layout.

    Megatron stacks the projections of attention by group of queries, (group: its queries, its key, its value), and the
    gate of an MLP on its up projection.
    """
    rest = dict(tensors)
    D = config.hidden_size
    found = {
        "embedding.word_embeddings.weight": rest.pop("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": rest.pop("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = rest.pop("lm_head.weight")
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, hf in _same_in_both(config).items():
            found[theirs + name] = rest.pop(ours + hf)
        q, k, v = (rest.pop(f"{ours}self_attn.{name}_proj.weight") for name in "qkv")
        groups = config.num_key_value_heads
        stacked = torch.cat([each.view(groups, -1, D) for each in (q, k, v)], dim=1)
        found[f"{theirs}self_attention.linear_qkv.weight"] = stacked.reshape(-1, D)
        gate_and_up = [rest.pop(f"{ours}mlp.{name}_proj.weight") for name in ("gate", "up")]
        found[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(gate_and_up)
    assert not rest.keys() - {"lm_head.weight"}, rest.keys()
    return found


def hf_weights(found: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return Megatron's weights under Hugging Face's names; the inverse of `megatron_weights`."""
    tensors = {
        "model.embed_tokens.weight": found["embedding.word_embeddings.weight"],
        "model.norm.weight": found["decoder.final_layernorm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = found["output_layer.weight"]
    groups, D, C = config.num_key_value_heads, config.hidden_size, config.head_dim
    queries = config.num_attention_heads // groups * C
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        for name, hf in _same_in_both(config).items():
            tensors[ours + hf] = found[theirs + name]
        stacked = found[f"{theirs}self_attention.linear_qkv.weight"].view(groups, -1, D)
        for name, part in zip("qkv", stacked.split([queries, C, C], dim=1), strict=True):
            tensors[f"{ours}self_attn.{name}_proj.weight"] = part.reshape(-1, D)
        gate, up = found[f"{theirs}mlp.linear_fc1.weight"].chunk(2)
        tensors |= {f"{ours}mlp.gate_proj.weight": gate, f"{ours}mlp.up_proj.weight": up}
    return tensors


def _same_in_both(config: ModelConfig) -> dict[str, str]:
    """Return Megatron's names of a layer's weights that have the same layout -> Hugging Face's."""
    names = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    }
    if config.qk_norm:
        names["self_attention.q_layernorm.weight"] = "self_attn.q_norm.weight"
        names["self_attention.k_layernorm.weight"] = "self_attn.k_norm.weight"
    return names


def megatron_options(source: dict[str, Any]) -> list[str]:
    """Return the options of Megatron-LM for a model. source: its config.json."""
    options = [
        f"--num-layers {source['num_hidden_layers']}",
        f"--hidden-size {source['hidden_size']}",
        f"--ffn-hidden-size {source['intermediate_size']}",
        f"--num-attention-heads {source['num_attention_heads']}",
        f"--group-query-attention --num-query-groups {source['num_key_value_heads']}",
        f"--kv-channels {source['head_dim']}",
        f"--max-position-embeddings {source['max_position_embeddings']}",
        f"--position-embedding-type rope --rotary-base {source['rope_theta']:.0f}",
        f"--normalization RMSNorm --norm-epsilon {source['rms_norm_eps']:g}",
        "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0",
    ]
    if source["model_type"] == "qwen3":
        options.append("--qk-layernorm")
    if not source["tie_word_embeddings"]:
        options.append("--untie-embeddings-and-output-weights")
    return options


def _read(folder: Path) -> tuple[ModelConfig, Transformer, dict[str, Any]]:
    """Return a model that can be converted, with the content of its config.json as deskside writes it."""
    config, model = load_hf(folder)
    source = to_hf_config(config)
    _check_supported(folder, source)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise UsageError("needs megatron-core: pip install megatron-core")
    return config, model, source


def _check_supported(folder: Path, source: dict[str, Any]) -> None:
    """Raise UsageError for a model that Megatron-LM's options do not describe."""
    if source["model_type"] not in FAMILIES:
        raise UsageError(
            f"{folder}: is a {source['model_type']} model; only {' and '.join(FAMILIES)} are converted, "
            "Megatron Bridge knows others"
        )
    unsupported = {
        "scaled rotary embeddings": source["rope_parameters"].get("rope_type", "default") != "default",
        "attention windows": bool(source.get("use_sliding_window")),
        "biases": bool(source.get("attention_bias") or source.get("mlp_bias")),
        f"the activation {source['hidden_act']}": source["hidden_act"] != "silu",
        "a fractional rope_theta": source["rope_theta"] % 1 != 0,  # --rotary-base is a whole number
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise UsageError(f"{folder}: has {' and '.join(found)}, which are not converted")


def _stored_dtype(folder: Path) -> str:
    source = read_json_object(folder / "config.json")
    return str(source.get("dtype") or source.get("torch_dtype"))


def _newest(checkpoint: Path) -> Path:
    """Return the folder of the checkpoint that Megatron-LM wrote last."""
    try:
        name = (checkpoint / TRACKER).read_text("utf-8").strip()
    except OSError:
        raise UsageError(
            f"--back {checkpoint}: has no {TRACKER}; give the directory of Megatron-LM's --save"
        ) from None
    folder = checkpoint / (name if name == RELEASE else f"iter_{name.zfill(7)}")
    if not (folder / "metadata.json").is_file():
        raise RunError(f"{folder}: is not a checkpoint in the format torch_dist")
    return folder


def gpt_model(source: dict[str, Any]) -> Any:
    """Return megatron-core's model on the CPU, with uninitialized weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    qk_norm = source["model_type"] == "qwen3"
    config = TransformerConfig(
        num_layers=source["num_hidden_layers"],
        hidden_size=source["hidden_size"],
        ffn_hidden_size=source["intermediate_size"],
        num_attention_heads=source["num_attention_heads"],
        num_query_groups=source["num_key_value_heads"],
        kv_channels=source["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=source["rms_norm_eps"],
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
        vocab_size=source["vocab_size"],
        max_sequence_length=source["max_position_embeddings"],
        share_embeddings_and_output_weights=source["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=source["rope_theta"],
    )


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """A process group of only this process, which megatron-core needs."""
    # Warnings that apex, which computes the same faster, is missing.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with without_cuda():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Context manager in which megatron-core's `torch.cuda` calls work without a GPU: they return the CPU."""
    if torch.cuda.is_available():
        yield
        return
    device, synchronize = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = device, synchronize


def _save(state: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(state, str(folder))


def _load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code: 0, 1 for a damaged model, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m deskside.export.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="Hugging Face directory, such as runs/NAME/model")
    parser.add_argument(
        "--back", type=Path, help="directory of Megatron-LM's --save, whose weights are brought back"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        if options.back:
            print(from_megatron(options.model, options.back, options.out))
        else:
            described = to_megatron(options.model, options.out)
            print(f"{options.out}: written. Megatron-LM's options for it:")
            print(
                "\n".join(command_lines(" ".join(["--load", str(options.out), "--finetune", *described]), 80))
            )
    except (UsageError, RunError) as error:
        print(f"deskside: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
