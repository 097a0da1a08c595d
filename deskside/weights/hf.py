"""Hugging Face directories: export for AutoModelForCausalLM and AutoTokenizer, and loading of published models.

An export lists its files with checksums in deskside.json. Only a directory with nothing but unchanged listed files
is ever replaced, so user files and edits are safe.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.data.tokenizer import end_of_text
from deskside.data.tokenizer import load as load_tokenizer
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.utils import files as folders
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint
from deskside.utils.parsing import read_json_object
from deskside.weights.hf_config import from_hf_config, to_hf_config
from deskside.weights.hf_families import FAMILIES, Family, family_of

TOKENIZER_EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MARK = "deskside.json"  # the origin of an export, and its files


def to_hf(model: Transformer, config: ModelConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of config.json and the state dict under Hugging Face's names.

    Tensors are new only where Hugging Face stacks several. Raises UsageError naming options without a Hugging Face
    form.
    """
    return to_hf_config(config), hf_tensors(model, family_of(config), lambda tensor: tensor.view)


def hf_tensors(
    model: Transformer, family: Family, value_of: Callable[[LogicalTensor], Tensor]
) -> dict[str, Tensor]:
    """Return per-parameter values (weights, gradients) under Hugging Face's names and in their layout."""
    result: dict[str, Tensor] = {}
    for name, parts in _by_hf_name(model, family).items():
        values = [value_of(part) for part in parts]
        tensor = values[0] if len(values) == 1 else torch.cat(values)
        result[name] = tensor.T if _is_transposed(family, parts[0]) else tensor
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

    The directory is written under a temporary name and renamed when complete; it may replace an earlier export.
    Raises UsageError for options without a Hugging Face form, a bad tokenizer, or as `check_out` does, and RunError
    if the disk is too small.

    Args:
        tokenizer_path: A tokenizer.json, or a directory with one (and its chat template and settings), or None.
        about: Extra content of deskside.json.
        card: Content of README.md.
    """
    hf_config, state = to_hf(model, config)
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
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in state.items()}
        try:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors reports a full disk so
            raise RunError(f"--out {out_dir}: cannot be written: {error}") from None
        seal(folder, about, card)
    return out_dir


def seal(folder: Path, about: Mapping[str, Any] | None, card: str | None) -> None:
    """Write README.md, then deskside.json: `about`, and size and checksum of every other file."""
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")
    listing = {path.name: list(fingerprint(path)) for path in sorted(folder.iterdir())}
    _write_json(folder / MARK, {**(about or {}), "files": listing})
    # safetensors files and temporary folders are readable by their owner only; give them the default permissions.
    mode = (folder / MARK).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)
    folder.chmod(mode | (mode & 0o444) >> 2)


def check_out(out_dir: Path) -> set[str]:
    """Return the file names of an earlier export in `out_dir`, or none if it is empty or missing.

    Raises UsageError if it is a file, or contains anything that an export did not write.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise UsageError(f"--out {out_dir}: is a file; choose a directory")
    if not out_dir.exists():
        return set()
    folders.check_replaceable(out_dir)
    listed = read_json_object(out_dir / MARK).get("files") if (out_dir / MARK).is_file() else None
    seen = listed if isinstance(listed, dict) else {}
    own = {p.name for p in out_dir.iterdir() if p.is_file() and seen.get(p.name) == list(fingerprint(p))}
    own |= {MARK} if seen else set()
    if others := folders.unowned_files(out_dir, own):
        raise UsageError(
            f"--out {out_dir}: holds {others[0]}, which `deskside export` did not write or which was changed since; "
            "move it away, or choose another directory"
        )
    return own


def load_hf(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, Transformer]:
    """Load a Qwen3, Qwen3-MoE, Llama or GPT-2 directory into a model.

    dtype: of weights with two or more dimensions; the others are float32. Raises UsageError for an unsupported
    architecture or option, RunError if config.json or the weights are damaged.
    """
    source = read_json_object(folder / "config.json")
    try:
        config = from_hf_config(source)
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from None
    except RunError as error:
        raise RunError(f"{folder}: {error}") from None
    family = FAMILIES[source["model_type"]]
    model = allocate(config, device, dtype)
    with ExitStack() as stack, torch.no_grad():
        stored = _Stored(folder, family, stack)
        wanted = _by_hf_name(model, family)
        for name, parts in wanted.items():
            tensor = stored.read(name)
            if _is_transposed(family, parts[0]):
                tensor = tensor.T
            rows = [part.view.shape[0] for part in parts]
            expected = (sum(rows), *parts[0].view.shape[1:])
            if tuple(tensor.shape) != expected:
                raise RunError(f"{folder}: {name} is {tuple(tensor.shape)}, its config.json needs {expected}")
            for part, values in zip(parts, tensor.split(rows), strict=True):
                part.view.copy_(values)
        extra = stored.unread(tied=config.tie_word_embeddings)
    if extra:
        raise UsageError(
            f"{folder}: {len(extra)} tensors that this architecture does not have, such as {extra[0]}"
        )
    return config, model


class _Stored:
    """The tensors of a directory: one safetensors file, or shards with an index."""

    def __init__(self, folder: Path, family: Family, stack: ExitStack):
        self.folder, self.family = folder, family
        self.seen: set[str] = set()
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            files = read_json_object(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise RunError(f"{index}: has no weight_map of names to files")
            names = sorted(set(files.values()))
        elif single.exists():
            names = [single.name]
        else:
            raise UsageError(f"{folder} has no model.safetensors; save it with safe_serialization first")
        self.file_of: dict[str, Any] = {}
        for name in names:
            try:
                file = stack.enter_context(safe_open(folder / name, "pt"))
            except (SafetensorError, OSError) as error:
                raise RunError(f"{folder / name} cannot be read: {error}") from error
            self.file_of |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> Tensor:
        """Read a tensor by its full name, or by the name without the family's prefix."""
        for candidate in (name, name.removeprefix(self.family.prefix)):
            if candidate in self.file_of:
                self.seen.add(candidate)
                tensor: Tensor = self.file_of[candidate].get_tensor(candidate)
                return tensor
        raise RunError(f"{self.folder} has no tensor {name}; its config.json says it should")

    def unread(self, tied: bool) -> list[str]:
        """Return the tensors that were not read. A tied model may store its head once more."""
        known = (*self.family.buffers, *(["lm_head.weight"] if tied else []))
        return sorted(name for name in self.file_of if name not in self.seen and not name.endswith(known))


def _by_hf_name(model: Transformer, family: Family) -> dict[str, list[LogicalTensor]]:
    """Map Hugging Face's names to our tensors, in the order in which Hugging Face stacks them."""
    result: dict[str, list[LogicalTensor]] = {}
    for tensor in logical_tensors(model):
        result.setdefault(hf_name(tensor.name, family), []).append(tensor)
    return result


def hf_name(name: str, family: Family) -> str:
    """Return the Hugging Face name of a logical tensor."""
    module, _, leaf = name.rpartition(".")
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", module)
    return f"{family.names[re.sub(r'(?<=[.])[0-9]+(?=[.])', '{}', module)].format(*numbers)}.{leaf}"


def _is_transposed(family: Family, tensor: LogicalTensor) -> bool:
    return family.transposed and tensor.kind == "matrix"


def _write_tokenizer(source: Path, folder: Path, config: ModelConfig) -> dict[str, Any]:
    """Copy or write the tokenizer's files; return the ids of the begin, end and padding tokens.

    A chat tokenizer has several end tokens: those of the generation_config.json beside it.
    """
    file = source / "tokenizer.json" if source.is_dir() else source
    content = read_json_object(file)
    ids = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    try:
        name, end = end_of_text(load_tokenizer(file), file.parent)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    if max(ids.values(), default=end) >= config.vocab_size:
        raise UsageError(
            f"{file} has token {max(ids.values())}, above the model's vocab_size {config.vocab_size}"
        )
    shutil.copyfile(file, folder / "tokenizer.json")
    for extra in TOKENIZER_EXTRAS:
        if (file.parent / extra).exists():
            shutil.copyfile(file.parent / extra, folder / extra)
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
    settings, ends = (
        read_json_object(folder / "tokenizer_config.json"),
        file.parent / "generation_config.json",
    )
    begin = settings.get("bos_token")
    begin = begin.get("content") if isinstance(begin, dict) else begin
    stops = read_json_object(ends).get("eos_token_id", end) if ends.is_file() else end
    return {"bos_token_id": ids.get(begin, end), "eos_token_id": stops, "pad_token_id": end}


@contextmanager
def replaced_when_complete(out_dir: Path, size: int = 0) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `out_dir` at the end, and deleted on an error.

    size: bytes to be written. Raises RunError if the disk has less free space, otherwise as `check_out` and
    `files.replace_folder` do.
    """
    if out_dir.exists():
        folders.check_replaceable(out_dir)
    _enough_room(out_dir, size)
    out_dir = out_dir.resolve()  # replace the target of a symbolic link
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".partial", dir=out_dir.parent))
    try:
        yield partial
        folders.replace_folder(out_dir, partial, check_out(out_dir))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _enough_room(out_dir: Path, needed: int) -> None:
    """Raise RunError if the disk of `out_dir` has less than `needed` bytes free."""
    place = out_dir.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise RunError(
            f"--out {out_dir}: needs {needed / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free there; "
            "free some space, or choose another disk"
        )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
