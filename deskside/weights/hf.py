"""Hugging Face directories: export for AutoModelForCausalLM and AutoTokenizer, and loading of published models.

An export lists its files with checksums in deskside.json. Only a directory in which all files are listed and unchanged
is ever replaced, so that files and edits of the user are safe.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.data.chat.renderer import TEMPLATE, TOOL_TEMPLATE, read_chat_template
from deskside.data.tokenizer import end_of_text, special_token_id
from deskside.data.tokenizer import load as load_tokenizer
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.ops.moe import ROUTER_BIAS
from deskside.utils import files as folders
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint
from deskside.utils.format import plural
from deskside.utils.parsing import read_json_object
from deskside.weights.hf_config import from_hf_config, text_part, to_hf_config
from deskside.weights.hf_families import family_of
from deskside.weights.hf_family import Family
from deskside.weights.hf_layout import from_hf_layout, hf_shape, to_hf_layout
from deskside.weights.mxfp4 import dequantize_mxfp4

TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in the name of a tensor
EXPORT_MANIFEST = "deskside.json"  # the origin of an export, and the checksums of its files


def to_hf(model: Transformer, config: ModelConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of config.json and the state dict under Hugging Face's names.

    Tensors share memory with the model, except those in which Hugging Face stacks several. Raises UsageError naming
    the options that the Hugging Face architecture does not have.
    """
    family = family_of(config)
    tensors = hf_tensors(model, family, lambda tensor: _stored_value(tensor, family))
    if family.model_type == "dots1" and not config.shared_expert_intermediate_size:
        tensors |= _empty_shared_experts(config)
    return to_hf_config(config), tensors


def _stored_value(tensor: LogicalTensor, family: Family) -> Tensor:
    """Return a weight as the architecture stores it; see `Family.norm_offset`."""
    has_offset = tensor.kind == "norm" and family.norm_offset != 0.0
    return tensor.view - family.norm_offset if has_offset else tensor.view


def _empty_shared_experts(config: ModelConfig) -> dict[str, Tensor]:
    """Return the shared experts without channels that transformers has in a dots.llm1 model without shared experts."""
    D = config.hidden_size
    shapes = {"gate_proj": (0, D), "up_proj": (0, D), "down_proj": (D, 0)}
    return {
        f"model.layers.{layer}.mlp.shared_experts.{name}.weight": torch.empty(shape)
        for layer in range(config.num_hidden_layers)
        for name, shape in shapes.items()
    }


def hf_tensors(
    model: Transformer, family: Family, value_of: Callable[[LogicalTensor], Tensor]
) -> dict[str, Tensor]:
    """Return values of all parameters (weights or gradients) under Hugging Face's names and in its layout."""
    result: dict[str, Tensor] = {}
    for name, parts in by_hf_name(model, family).items():
        result[name] = to_hf_layout([value_of(part) for part in parts], parts, family, model.config)
    return result


def save_hf(
    model: Transformer,
    config: ModelConfig,
    tokenizer_path: Path | None,
    out_dir: Path,
    dtype: torch.dtype = torch.float32,
    about: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> Path:
    """Write config.json, generation_config.json, model.safetensors, the tokenizer's files and deskside.json.

    The directory is written under a temporary name and renamed when it is complete; it may replace an earlier export.
    Raises UsageError as `to_hf` and `check_out_dir` do and for an unsuitable tokenizer, and RunError for a damaged one,
    for weights beyond float16 or a full disk.

    Args:
        tokenizer_path: A tokenizer.json, or a directory with one (and its chat template and settings), or None.
        about: Extra content of deskside.json.
        card: Content of README.md.
    """
    hf_config, state = to_hf(model, config)
    if dtype == torch.float16:
        for name, tensor in state.items():
            if tensor.numel() and not name.endswith(ROUTER_BIAS):
                check_float16(name, float(tensor.abs().max()))
    size = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
    with replaced_when_complete(out_dir, size) as folder:
        if tokenizer_path is not None:
            ids = _write_tokenizer(tokenizer_path, folder, config)
            generation |= ids
            hf_config |= {name: ids[name] for name in ("bos_token_id", "eos_token_id")}
        hf_config["dtype"] = hf_config["torch_dtype"] = str(dtype).removeprefix("torch.")
        _write_json(folder / "config.json", hf_config)
        _write_json(folder / "generation_config.json", generation)
        tensors = {
            # transformers keeps the router's bias in float32, too.
            name: tensor.to("cpu", torch.float32 if name.endswith(ROUTER_BIAS) else dtype).contiguous()
            for name, tensor in state.items()
        }
        write_safetensors(tensors, folder / "model.safetensors", out_dir)
        finish_export(folder, about, card)
    return out_dir


def check_float16(name: str, largest: float) -> None:
    """Raise RunError if the largest value of a tensor would become infinite."""
    if largest > torch.finfo(torch.float16).max:
        raise RunError(f"{name}: {largest:.3g} is beyond float16; use --dtype bfloat16 or float32")


def write_safetensors(tensors: dict[str, Tensor], file: Path, out_dir: Path) -> None:
    """Write a file of an export to `out_dir`. Raises RunError or OSError if it cannot be written."""
    try:
        # One entry: safetensors writes several in a random order, and equal models should give equal files.
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:  # for example, if the disk is full
        raise RunError(f"--out {out_dir}: cannot be written: {error}") from None


def finish_export(folder: Path, about: Mapping[str, Any] | None, card: str | None) -> None:
    """Write README.md, then deskside.json with `about` and with size and checksum of every other file."""
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    listing = {path.name: list(fingerprint(path)) for path in sorted(folder.iterdir())}
    _write_json(folder / EXPORT_MANIFEST, {**(about or {}), "files": listing})
    # safetensors files and temporary folders are readable by their owner only; give them the default permissions.
    mode = (folder / EXPORT_MANIFEST).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)
    folder.chmod(mode | (mode & 0o444) >> 2)


def check_out_dir(out_dir: Path) -> set[str]:
    """Return the file names of an earlier export in `out_dir`. The set is empty if `out_dir` is empty or missing.

    Raises UsageError if it is a file, or contains anything that an export did not write or that was changed since.
    """
    folders.check_folder(out_dir)
    if not out_dir.exists():
        return set()
    folders.check_replaceable(out_dir)
    listed = _read_manifest(out_dir).get("files")
    checksums = listed if isinstance(listed, dict) else {}
    exported = {EXPORT_MANIFEST} if checksums else set()
    for path in out_dir.iterdir():
        if path.is_file() and checksums.get(path.name) == list(fingerprint(path)):
            exported.add(path.name)
    if others := folders.unowned_files(out_dir, exported):
        raise UsageError(
            f"--out {out_dir}: contains {others[0]}, which `deskside export` did not write or which was changed since; "
            "move it away, or choose another directory"
        )
    return exported


def exported_from(out_dir: Path) -> str:
    """Return the path or the name of the model whose export is in `out_dir`; "" if there is none."""
    source = _read_manifest(out_dir).get("from")
    return source if isinstance(source, str) else ""


def _read_manifest(out_dir: Path) -> dict[str, Any]:
    """Return the manifest of the export in `out_dir`; {} if there is none."""
    manifest = out_dir / EXPORT_MANIFEST
    return read_json_object(manifest) if manifest.is_file() else {}


def load_hf(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, Transformer]:
    """Load a directory of a supported family (hf_families.py) into a model.

    dtype: dtype of weights with two or more dimensions; the others are float32. Raises UsageError for an unsupported
    architecture, option or tensor, and RunError if config.json or the weights are damaged. Of a model with images, only
    the text model is loaded, and a message says so. A head that differs from the embedding, although config.json ties
    them, is loaded as it is, as in transformers 5; a message says so, too.
    """
    source = read_json_object(folder / "config.json")
    try:
        config = from_hf_config(source)
        family, text_source = text_part(source)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    except RunError as error:
        raise RunError(f"{folder}: {error}") from None
    with ExitStack() as stack, torch.no_grad():
        stored = _StoredTensors(folder, family, stack)
        if text_source is not source:
            left_out = stored.keep_part("language_model.")
            say(
                f"{folder}: only its text model is loaded, without {plural(left_out, 'tensor')} of other parts"
            )
        if config.tie_word_embeddings and stored.has_own_head():
            say(
                f"{folder}: its output head differs from its embedding, so they are not tied, whatever its config.json "
                "says (tie_word_embeddings)"
            )
            config = ModelConfig.model_validate({**config.model_dump(), "tie_word_embeddings": False})
        model = allocate(config, device, dtype)
        for name, parts in by_hf_name(model, family).items():
            read_parts(parts, stored.read(name), config, family, f"{folder}: {name}")
        extra = stored.unread(tied=config.tie_word_embeddings)
    if extra:
        raise UsageError(
            f"{folder}: has {plural(len(extra), 'tensor')} that this architecture does not have, such as {extra[0]}"
        )
    return config, model


def read_parts(
    parts: Sequence[LogicalTensor], tensor: Tensor, config: ModelConfig, family: Family, name: str
) -> None:
    """Set our tensors from `tensor`, in which Hugging Face stacks them. Raises RunError for a wrong shape.

    name: of `tensor` in the error.
    """
    if tuple(tensor.shape) != (expected := hf_shape(parts, family, config)):
        raise RunError(f"{name} is {tuple(tensor.shape)}, its config.json needs {expected}")
    tensor = from_hf_layout(tensor, parts, family, config)
    for part, values in zip(parts, tensor.split([len(part.view) for part in parts]), strict=True):
        part.view.copy_(values)
        if part.kind == "norm":
            part.view.add_(family.norm_offset)


class _StoredTensors:
    """The tensors of a directory: one safetensors file, or else shards with an index. stack: closes the files."""

    def __init__(self, folder: Path, family: Family, stack: ExitStack):
        self.folder, self.family = folder, family
        self.names_read: set[str] = set()
        self.stored_prefix = ""
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        # As in transformers, whose save_pretrained leaves the index of earlier shards behind.
        if single.exists():
            names = [single.name]
        elif index.exists():
            files = read_json_object(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise RunError(f"{index}: has no weight_map of names to files")
            names = sorted(set(files.values()))
        else:
            raise UsageError(f"{folder} has no model.safetensors; save it with safe_serialization first")
        self.file_of: dict[str, Any] = {}
        for name in names:
            try:
                file = stack.enter_context(safe_open(folder / name, "pt"))
            except (SafetensorError, OSError) as error:
                raise RunError(f"{folder / name} cannot be read: {error}") from error
            self.file_of |= dict.fromkeys(file.keys(), file)

    def keep_part(self, prefix: str) -> int:
        """Drop the tensors whose names lack the prefix, and strip it from the others. Return how many were dropped."""
        names = [name for name in self.file_of if name.startswith(prefix)]
        left_out = len(self.file_of) - len(names)
        self.file_of = {name.removeprefix(prefix): self.file_of[name] for name in names}
        self.stored_prefix = prefix
        return left_out

    def read(self, name: str) -> Tensor:
        """Read a tensor by its full name, or by the name without the family's prefix."""
        for candidate in (name, name.removeprefix(self.family.prefix)):
            if candidate in self.file_of:
                self.names_read.add(candidate)
                return self._get(candidate)
        if f"{name}_blocks" in self.file_of and f"{name}_scales" in self.file_of:
            self.names_read |= {f"{name}_blocks", f"{name}_scales"}
            try:  # (E, out, in) in blocks along the last dimension
                return dequantize_mxfp4(self._get(f"{name}_blocks"), self._get(f"{name}_scales")).mT
            except ValueError as error:
                raise RunError(f"{self.folder}: {name}: {error}; is the file damaged?") from None
        raise RunError(f"{self.folder} has no tensor {name}, which its config.json needs; is it complete?")

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self.file_of[name].get_tensor(self.stored_prefix + name)
        return tensor

    def has_own_head(self) -> bool:
        """Return True if there is an output head with other values than the embedding."""
        head, embed = (hf_name(f"{name}.weight", self.family) for name in ("lm_head", "embed"))
        return head in self.file_of and not torch.equal(self.read(head), self.read(embed))

    def unread(self, tied: bool) -> list[str]:
        """Return the names of unknown tensors that were not read, except empty ones.

        A tied model may store its head as a copy.
        """
        known = (*self.family.buffers, *([hf_name("lm_head.weight", self.family)] if tied else []))
        unread = (name for name in self.file_of.keys() - self.names_read if not name.endswith(known))
        return sorted(
            name
            for name in unread
            if 0 not in self.file_of[name].get_slice(self.stored_prefix + name).get_shape()
        )


def by_hf_name(model: Transformer, family: Family) -> dict[str, list[LogicalTensor]]:
    """Map Hugging Face's names to our tensors, in the order in which Hugging Face stacks them."""
    result: dict[str, list[LogicalTensor]] = {}
    for tensor in logical_tensors(model):
        result.setdefault(hf_name(tensor.name, family), []).append(tensor)
    return result


def hf_name(name: str, family: Family) -> str:
    """Return the Hugging Face name of a logical tensor: layers.0.attn.q_proj.weight -> model.layers.0.self_attn..."""
    module, _, leaf = name.rpartition(".")
    numbers = _NUMBER.findall(name)
    if (whole := family.names.get(_NUMBER.sub("{}", name))) is not None:  # a name without the leaf "weight"
        return whole.format(*numbers)
    hf_module = family.names[_NUMBER.sub("{}", module)].format(*numbers)
    return f"{hf_module}.{leaf}"


def is_stacked(module: str, family: Family) -> bool:
    """Return True if Hugging Face has one module for this logical one and others, as for q, k and v in GPT-2."""
    return list(family.names.values()).count(family.names[_NUMBER.sub("{}", module)]) > 1


def _write_tokenizer(source: Path, folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Copy or write the tokenizer's files, and return the ids of the begin, end and padding tokens.

    A chat tokenizer may have several end tokens, see `read_eos_ids`.
    """
    file = source / "tokenizer.json" if source.is_dir() else source
    content = read_json_object(file)
    ids = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    try:
        tokenizer = load_tokenizer(file)
        name, end = end_of_text(tokenizer, file.parent)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    if (highest := max([end, *ids.values()])) >= config.vocab_size:
        raise UsageError(f"{file} has token {highest}, above the model's vocab_size {config.vocab_size}")
    shutil.copyfile(file, folder / "tokenizer.json")
    for extra in TOKENIZER_EXTRAS:
        if (file.parent / extra).exists():
            shutil.copyfile(file.parent / extra, folder / extra)
    if (file.parent / TOOL_TEMPLATE).exists() and (template := read_chat_template(file.parent)) is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")  # with that for tools
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": name,
            "eos_token": name,
            "pad_token": name,
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        }
        _write_json(folder / "tokenizer_config.json", settings)
    begin = special_token_id(tokenizer, folder, "bos_token")
    ends = read_eos_ids(file.parent, config.vocab_size) or [end]
    eos = ends if len(ends) > 1 else ends[0]
    return {"bos_token_id": end if begin is None else begin, "eos_token_id": eos, "pad_token_id": end}


def read_eos_ids(folder: Path, vocab_size: int) -> list[int]:
    """Return the end-of-text tokens in generation_config.json or, if it is missing, in config.json, as transformers.

    Those outside of the vocabulary, such as -1 for none, are left out.
    """
    files = (folder / name for name in ("generation_config.json", "config.json"))
    path = next((file for file in files if file.is_file()), None)
    ids = None if path is None else read_json_object(path).get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and 0 <= i < vocab_size]


@contextmanager
def replaced_when_complete(out_dir: Path, size: int = 0) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out_dir` at the end, or deleted on an error.

    size: bytes to be written. Raises RunError if the disk has less free space, otherwise as `check_out_dir` and
    `files.replace_folder` do.
    """
    if out_dir.exists():
        folders.check_replaceable(out_dir)
    _check_free_space(out_dir, size)
    out_dir = out_dir.resolve()  # replace the target of a symbolic link
    folders.create_folder(out_dir.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".partial", dir=out_dir.parent))
    try:
        yield partial
        folders.replace_folder(out_dir, partial, check_out_dir(out_dir))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_free_space(out_dir: Path, needed: int) -> None:
    """Raise RunError if the disk of `out_dir` has less than `needed` bytes free."""
    existing = out_dir.resolve()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RunError(
            f"--out {out_dir}: needs {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free there; "
            "free some space, or choose another disk"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
