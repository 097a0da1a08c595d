"""Export to GGUF: one file with weights, shape and tokenizer for llama.cpp and programs built on it.

Names, layouts and keys are those that llama.cpp's loader expects (ggml-org/llama.cpp: src/models/, and gguf-py for
the names). There are four differences from a Hugging Face directory: the rows of Llama's q and k are paired for
interleaved rotation, GPT-2's matrices are (out, in), the experts of a layer are one tensor, and so are the divisors of
Llama 3's rotary frequencies. Options that llama.cpp would compute differently are refused, because such a file would
load but give other results.

Tensors are written one by one, and all are read back and compared with their sources before the file gets its name.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.config.rope import RopeScaling
from deskside.export.gguf_quantize import QUANTIZED, check_quantizer, quantize
from deskside.export.gguf_tokenizer import GgufTokenizer
from deskside.model.transformer import Transformer
from deskside.ops.rope import frequency_divisors
from deskside.utils.errors import RunError, UsageError
from deskside.weights.hf import check_float16, finish_export, hf_tensors, replaced_when_complete
from deskside.weights.hf_families import family_of

if TYPE_CHECKING:
    import gguf

GgufType = Literal["float32", "float16", "bfloat16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"]
TYPE_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "q8_0": "Q8_0",
    "q4_k_m": "Q4_K_M",
    "q5_k_m": "Q5_K_M",
    "q6_k": "Q6_K",
}
# Our families -> llama.cpp's architectures.
ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen2": "qwen2",
    "llama": "llama",
    "mistral": "llama",
    "gpt2": "gpt2",
}
# Small tensors, which llama.cpp keeps in full precision for every file type.
_FULL_PRECISION = ("ffn_gate_inp.weight", "position_embd.weight")
COMPARED_AT_ONCE = 1 << 22  # weights at a time, because the bounds are in float64
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_ROTATED = re.compile(r".*\.(q|k)_proj\.(weight|bias)")


@dataclass(frozen=True)
class SavedGguf:
    """The exported file. fallback: names of tensors in a type with smaller blocks, because of their row lengths."""

    file: Path
    fallback: tuple[str, ...]


@dataclass(frozen=True)
class GgufTensor:
    """A tensor with its GGUF name. shape: in numpy's order, outermost dimension first. make: computes its values."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray[np.float32]]


def check_gguf(config: ModelConfig) -> str:
    """Return llama.cpp's name of this architecture.

    Raises UsageError naming unsupported options, or if the `gguf` package is missing.
    """
    _package()
    family = family_of(config)
    if family.model_type not in ARCHITECTURES:
        raise UsageError(f"--to gguf: {family.architecture} is not supported yet; use --to hf")
    name = ARCHITECTURES[family.model_type]
    act = "gelu_new" if name == "gpt2" else "silu"
    wrong = []
    if config.hidden_act != act:
        wrong.append(f"hidden_act = {config.hidden_act} (it computes {act})")
    if config.sliding_window is not None:
        wrong.append(f"sliding_window = {config.sliding_window} (it has full attention only)")
    if name.startswith("qwen3") and config.attention_bias:
        wrong.append("attention_bias = true (it reads no such biases)")
    if name == "qwen3moe" and not config.norm_topk_prob:
        wrong.append("norm_topk_prob = false (it makes the experts' weights sum to one)")
    kinds = ("yarn", "linear", "llama3") if name == "llama" else ("yarn", "linear")
    if (scaling := config.rope_scaling) is not None and scaling.rope_type not in kinds:
        wrong.append(f"rope_type = {scaling.rope_type} (only {' and '.join(kinds)})")
    elif scaling is not None and scaling.rope_type == "yarn":
        only_factor = RopeScaling(
            factor=scaling.factor, original_max_position_embeddings=scaling.original_max_position_embeddings
        )
        if not scaling.truncate or scaling.attention_scale != only_factor.attention_scale:
            wrong.append("rope_scaling with truncate false or another attention factor (it computes its own)")
    if wrong:
        raise UsageError(f"--to gguf: llama.cpp's {name} cannot do {'; '.join(wrong)}; use --to hf")
    return name


def gguf_tensors(model: Transformer) -> list[GgufTensor]:
    """Return every tensor of the file, in order. Raises UsageError as `check_gguf` does."""
    gguf, config = _package(), model.config
    name = check_gguf(config)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    groups: dict[tuple[str, bool], list[Tensor]] = {}
    for hf_name, tensor in hf_tensors(model, family_of(config), lambda tensor: tensor.view).items():
        expert = _EXPERT.fullmatch(hf_name)
        key = (f"{expert[1]}.{expert[2]}", True) if expert else (hf_name, False)
        groups.setdefault(key, []).append(tensor)
    result = []
    if (scaling := config.rope_scaling) is not None and scaling.rope_type == "llama3":
        positions = config.max_position_embeddings
        divisors = frequency_divisors(config.rotary_dim, config.rope_theta, scaling, positions)
        rope_name = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight"
        result.append(GgufTensor(rope_name, tuple(divisors.shape), divisors.numpy))
    for (hf_name, stacked), parts in groups.items():
        tensor_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if tensor_name is None:
            raise RunError(f"{hf_name}: the gguf package has no name for this tensor of {name}; update gguf")
        heads = None  # of q or k, if the rows have to be paired
        if name == "llama" and (match := _ROTATED.fullmatch(hf_name)):
            heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        transpose = name == "gpt2" and parts[0].ndim == 2 and ".h." in hf_name
        shape = tuple(reversed(parts[0].shape)) if transpose else tuple(parts[0].shape)
        shape = (len(parts), *shape) if stacked else shape
        make = partial(_values, parts, stacked, heads, transpose)
        result.append(GgufTensor(tensor_name, shape, make))
    return result


def save_gguf(
    model: Transformer,
    tokenizer: GgufTokenizer,
    out_dir: Path,
    dtype: GgufType = "float32",
    name: str = "model",
    about: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    tick: Callable[[int], None] = lambda weights: None,
) -> SavedGguf:
    """Write OUT/NAME-TYPE.gguf, text files and deskside.json; they may replace an earlier export.

    The types of `QUANTIZED` are made from a temporary file in float32. Raises UsageError as `check_gguf`,
    `check_quantizer` and `check_out_dir` do, and RunError if weights do not fit the type, the disk is too small, or the
    file reads back differently.

    Args:
        about: Extra content of deskside.json.
        texts: Content of other files by name, such as README.md.
        tick: Called for each tensor with its number of weights, once when it is written and once when it is read back.
    """
    gguf = _package()
    tensors = gguf_tensors(model)
    quantized = next((each for each in QUANTIZED if each == dtype), None)
    if quantized is not None:
        check_quantizer()
    written: GgufType = dtype if quantized is None else "float32"
    types = {tensor.name: _type_of(tensor, written) for tensor in tensors}
    sizes = {t.name: math.prod(gguf.quant_shape_to_byte_shape(t.shape, types[t.name])) for t in tensors}
    file = gguf_name(name, dtype)
    with replaced_when_complete(out_dir, sum(sizes.values())) as folder:
        path = folder / gguf_name(name, written)
        writer = gguf.GGUFWriter(path, check_gguf(model.config))
        try:
            _describe(writer, model.config, tokenizer, name, written)
            for t in tensors:
                # The dtype is given as float32, because the writer would interpret the shape of raw bytes as bytes.
                writer.add_tensor_info(
                    t.name, t.shape, np.dtype(np.float32), sizes[t.name], raw_dtype=types[t.name]
                )
            writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for t in tensors:
                writer.write_tensor_data(_encoded(t, types[t.name]))
                tick(math.prod(t.shape))
        finally:
            writer.close()
        _compare(path, tensors, types, tick)
        fallback = tuple(t.name for t in tensors if written == "q8_0" and types[t.name].name == "F16")
        if quantized is not None:
            fallback = quantize(path, folder / file, quantized)
            path.unlink()
        for text_name, text in (texts or {}).items():
            (folder / text_name).write_text(text, "utf-8")
        finish_export(folder, about, None)
    return SavedGguf(out_dir / file, fallback)


def gguf_name(name: str, dtype: GgufType) -> str:
    """Return the file name for a model, such as my-model-Q8_0.gguf."""
    return f"{plain_name(name)}-{TYPE_NAMES[dtype]}.gguf"


def plain_name(name: str) -> str:
    """Return the name of a model with only characters that file names, and models in Ollama, may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _package() -> Any:
    """Import the optional `gguf` package. Raises UsageError if it is missing."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise UsageError(
            "--to gguf: needs the gguf package; install it: pip install 'deskside[gguf]'"
        ) from None
    return gguf


def _type_of(tensor: GgufTensor, dtype: GgufType) -> "gguf.GGMLQuantizationType":
    kinds = _package().GGMLQuantizationType
    if len(tensor.shape) == 1 or tensor.name.endswith(_FULL_PRECISION):
        return kinds.F32
    wanted = kinds[TYPE_NAMES[dtype]]
    return kinds.F16 if wanted == kinds.Q8_0 and tensor.shape[-1] % 32 else wanted


def _values(parts: list[Tensor], stacked: bool, heads: int | None, transpose: bool) -> NDArray[np.float32]:
    """Return the values of one GGUF tensor. heads: the number of heads whose rows have to be paired, or None."""
    tensor = torch.stack(parts) if stacked else parts[0]
    tensor = tensor.detach().to("cpu", torch.float32)
    if heads is not None:
        # Rotation pairs row i with row i + half of a head here, and row 2 i with row 2 i + 1 in llama.cpp.
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    values: NDArray[np.float32] = (tensor.T if transpose else tensor).contiguous().numpy()
    return values


def _encoded(tensor: GgufTensor, kind: "gguf.GGMLQuantizationType") -> NDArray[Any]:
    values = tensor.make()
    largest = float(np.abs(values).max(initial=0.0))
    if not math.isfinite(largest):
        raise RunError(f"{tensor.name}: contains numbers that are not finite; export an earlier checkpoint")
    if kind.name == "F16":
        check_float16(tensor.name, largest)
    encoded: NDArray[Any] = _package().quantize(values, kind)
    return encoded


def _describe(
    writer: "gguf.GGUFWriter", config: ModelConfig, tokenizer: GgufTokenizer, name: str, dtype: GgufType
) -> None:
    """Write all metadata that llama.cpp needs."""
    gguf = _package()
    kinds = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[kinds[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.norm == "layernorm":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.position_embedding == "rope":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        # llama3 is a tensor of divisors instead.
        if (scaling := config.rope_scaling) is not None and scaling.rope_type != "llama3":
            writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.rope_type))
            writer.add_rope_scaling_factor(scaling.factor)
        if scaling is not None and scaling.rope_type == "yarn":
            assert scaling.original_max_position_embeddings is not None
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
            writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
            writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name of byte-level BPE
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(tokenizer.tokens)
    writer.add_token_types(tokenizer.types)
    writer.add_token_merges(tokenizer.merges)
    writer.add_bos_token_id(tokenizer.start)
    writer.add_eos_token_id(tokenizer.end)
    writer.add_pad_token_id(tokenizer.padding)
    writer.add_add_bos_token(tokenizer.add_start)
    if tokenizer.chat_template is not None:
        writer.add_eot_token_id(tokenizer.ends[0])
        writer.add_chat_template(tokenizer.chat_template)
    # llama.cpp stops at three tokens (eos, eot and eom), and at tokens that it knows by name.
    other_ends = [token for token in tokenizer.ends[1:] if token != tokenizer.end]
    if other_ends:
        writer.add_eom_token_id(other_ends[0])


def _compare(
    file: Path,
    tensors: list[GgufTensor],
    types: Mapping[str, "gguf.GGMLQuantizationType"],
    tick: Callable[[int], None],
) -> None:
    """Raise RunError unless the file contains exactly these tensors, with values as precise as their types allow."""
    gguf = _package()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if stored.keys() != {tensor.name for tensor in tensors}:
        unmatched = min(stored.keys() ^ {tensor.name for tensor in tensors})
        raise RunError(
            f"{file.name}: was not written correctly: only one of file and model has '{unmatched}'; check the disk"
        )
    for tensor in tensors:
        read, kind = stored[tensor.name], types[tensor.name]
        values = tensor.make()
        same = read.tensor_type == kind and tuple(reversed(read.shape.tolist())) == tensor.shape
        rows = max(1, COMPARED_AT_ONCE * values.shape[0] // values.size)
        for start in range(0, values.shape[0] if same else 0, rows):
            part = values[start : start + rows]
            read_part = gguf.dequantize(read.data[start : start + rows], kind).reshape(part.shape)
            same = same and bool((np.abs(read_part - part) <= rounding_bound(part, kind.name)).all())
        if not same:
            raise RunError(f"{file.name}: {tensor.name} reads back differently; check the disk")
        tick(math.prod(tensor.shape))


def rounding_bound(values: NDArray[np.float32], kind: str) -> NDArray[np.float64]:
    """Return an upper bound of the error of each value after conversion to a type and back.

    For 16-bit floats, it covers half a unit in the last place; the constant term is for subnormal numbers. In q8_0, 32
    values share d = max / 127, which is stored as float16. The error is at most d / 2 from rounding the values, plus
    127 times the rounding error of d.
    """
    size = np.abs(values.astype(np.float64))
    if kind == "F32":
        return np.zeros_like(size)
    if kind == "BF16":
        return size * 2.0**-8 + 2.0**-134
    if kind == "F16":
        return size * 2.0**-11 + 2.0**-25
    blocks = size.reshape(-1, 32)
    d = blocks.max(axis=1, keepdims=True) / 127
    bound = d * (0.5 + 127 * 2.0**-11 + 1e-6) + 127 * 2.0**-25
    return np.broadcast_to(bound, blocks.shape).reshape(size.shape)
