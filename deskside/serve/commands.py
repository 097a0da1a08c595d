"""`deskside eval`, `deskside chat` and `deskside export`.

They stand here, above everything that they use, because each begins by turning a path into a model (export/load.py).
With --json standard output holds one JSON object and nothing else; all other words go to standard error.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from pydantic import ValidationError

from deskside import __version__
from deskside.config import strict_json
from deskside.config.base import first_problem
from deskside.config.commandline import MAY_BE_EMPTY, parse
from deskside.config.run import RunConfig
from deskside.data.progress import Progress
from deskside.data.rows import PackedDataset
from deskside.data.shards import checksum_file
from deskside.data.sources import BadInputLog, Source, iter_documents
from deskside.engine.sampling import Sampling
from deskside.errors import RunError, UsageError
from deskside.evaluate.bpb import BitsPerByte, evaluate_dataset, evaluate_text
from deskside.export.hf import check_out, save_hf
from deskside.export.load import Loaded, load_model
from deskside.kernels.attention import Requirements, choose
from deskside.precision.selfcheck import check
from deskside.serve.chat import ChatOptions, converse

Device = Literal["auto", "cpu", "cuda"]
HF_SEQUENCE_LENGTH = 2048  # of a model that comes without a run: the presets' own, so that numbers compare
BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Eval:
    """Bits per byte of a model, on its run's validation data or on a text.

    Example: deskside eval runs/demo --json

    Example: deskside eval runs/demo --text book.txt
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    text: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Evaluate this text instead: .txt, .jsonl[.gz|.zst] or .parquet with a text field."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Evaluate the validation split of this prepared data instead of the run's own."""
    tasks: str | None = None
    """Not available yet."""
    device: Device = "auto"
    """auto: cuda where there is one."""
    sequence_length: int | None = None
    """Tokens that the model sees at most. Default: the run's."""
    batch_tokens: int | None = None
    """Tokens per forward pass."""
    json: bool = False
    """Print one JSON object on standard output."""


@dataclass
class Chat:
    """Talk to a model. A model without a chat template continues your text.

    Example: deskside chat runs/demo

    Example: deskside chat runs/demo --prompt "Once upon a time" --temperature 0
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    prompt: Annotated[str | None, MAY_BE_EMPTY] = None
    """Answer this one text, then leave."""
    system: Annotated[str | None, MAY_BE_EMPTY] = None
    """System message of a chat model."""
    temperature: float = 0.8
    """0 always takes the most probable token."""
    top_k: int = 50
    """Draw from the k most probable tokens only; 0 switches it off."""
    top_p: float | None = None
    """Draw from the most probable tokens that hold this probability together."""
    min_p: float | None = None
    """Draw from tokens with at least this share of the best token's probability."""
    seed: int | None = None
    """Repeats a conversation exactly. Default: a new one each time."""
    max_new_tokens: int = 256
    """Tokens of one answer at most."""
    device: Device = "auto"
    """auto: cuda where there is one."""


@dataclass
class Export:
    """Write a model for other programs: AutoModelForCausalLM.from_pretrained(DIR).

    Example: deskside export runs/demo --to hf --out my-model
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must be new, empty or an earlier export."""
    to: Literal["hf"] = "hf"
    """Format: hf (Hugging Face safetensors)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the stored weights."""
    json: bool = False
    """Print one JSON object on standard output."""


def run_eval(argv: Sequence[str]) -> int:
    """`deskside eval`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Eval, argv, "deskside eval")
    if options.tasks is not None:
        raise UsageError("--tasks: tasks cannot be evaluated yet; leave it out to get bits per byte")
    if options.text is not None and options.data is not None:
        raise UsageError("--text and --data: give one of them")
    if options.batch_tokens is not None and options.batch_tokens < 1:
        raise UsageError(f"--batch-tokens {options.batch_tokens}: must be at least 1")
    device = _device(options.device)
    loaded = load_model(options.model, device, _dtype(device), _say)
    config = _run_config(loaded)
    length = options.sequence_length
    if length is None:
        longest = min(loaded.config.max_position_embeddings, HF_SEQUENCE_LENGTH)
        length = config.batch.sequence_length if config else longest
    if not 2 <= length <= loaded.config.max_position_embeddings:
        raise UsageError(
            f"--sequence-length {length}: this model takes 2 to {loaded.config.max_position_embeddings} tokens"
        )
    batch_tokens = options.batch_tokens or BATCH_TOKENS[device.type]
    if options.text is not None:
        attention = _attention(loaded, length, batch_tokens, False, device)
        result = evaluate_text(
            loaded.model,
            loaded.tokenizer,
            loaded.start_token,
            _texts(options.text),
            sequence_length=length,
            batch_tokens=batch_tokens,
            device=device,
            attention=attention,
        )
        baselines, source = {}, options.text
    else:
        masked = config.data.document_mask if config else False
        dataset = _dataset(loaded, config, options.data, length)
        attention = _attention(loaded, length, batch_tokens, masked, device)
        with Progress("evaluate", dataset.num_tokens, "tokens") as bar:
            result = evaluate_dataset(
                loaded.model,
                dataset,
                micro_rows=max(1, min(batch_tokens // length, dataset.num_rows)),
                device=device,
                attention=attention,
                document_mask=masked,
                tick=bar.advance,
            )
        split = dataset.index.splits["val"]
        baselines = {"gzip_bpb": split.gzip_bpb, "unigram_bpb": split.unigram_bpb}
        source = str(dataset.directory)
    _print_result(options, loaded, result, baselines, source, length)
    return 0


def run_chat(argv: Sequence[str]) -> int:
    """`deskside chat`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Chat, argv, "deskside chat")
    sampling = Sampling(options.temperature, options.top_k or None, options.top_p, options.min_p)
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed {options.seed}: must be 0 or more")
    device = _device(options.device)
    loaded = load_model(options.model, device, _dtype(device), _say)
    return converse(
        loaded,
        ChatOptions(sampling, options.max_new_tokens, options.seed, options.system),
        options.prompt,
    )


def run_export(argv: Sequence[str]) -> int:
    """`deskside export`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Export, argv, "deskside export")
    out = Path(options.out)
    check_out(out)  # before the work
    loaded = load_model(options.model, "cpu", torch.float32, _say)
    made = {"deskside": __version__, "from": options.model, "step": loaded.step, "dtype": options.dtype}
    try:
        save_hf(loaded.model, loaded.config, loaded.tokenizer_dir, out, DTYPES[options.dtype], made)
    except OSError as error:
        raise RunError(
            f"{error.filename2 or error.filename or out}: cannot be written: {error.strerror or error}"
        ) from None
    if options.json:
        print(
            strict_json.dumps(
                {"out": str(out), "to": options.to, "dtype": options.dtype, "step": loaded.step}
            )
        )
    else:
        print(out)
        _say(f"load it with: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _device(name: Device) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; use --device cpu")
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU that computes it right, else float32."""
    if device.type == "cpu":
        return torch.float32
    result = check("bf16", device)
    if result.ok:
        return torch.bfloat16
    _say(f"bf16 fails its self-check here ({result.reason}): using float32")
    return torch.float32


def _run_config(loaded: Loaded) -> RunConfig | None:
    if loaded.run_dir is None:
        return None
    try:
        return RunConfig.model_validate(loaded.run["config"])
    except ValidationError as error:
        raise UsageError(f"{loaded.run_dir / 'run.json'}: config.{first_problem(error)}") from None


@dataclass(frozen=True)
class _Attention:
    full: str
    windowed: str | None


def _attention(
    loaded: Loaded, length: int, batch_tokens: int, documents: bool, device: torch.device
) -> _Attention:
    """The fastest backends that compute right here at this shape, for full layers and for windowed ones."""
    config = loaded.config
    windows = {config.layer_window(layer) for layer in range(config.num_hidden_layers)}
    names: dict[bool, str] = {}
    for window in windows:
        need = Requirements(
            batch=max(1, min(4, batch_tokens // length)),
            tokens=length,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=loaded.model.activation_dtype,
            device=device,
            window=window,
            documents=documents,
        )
        names[window is not None] = choose(need).name
    return _Attention(names.get(False, names.get(True, "reference")), names.get(True))


def _dataset(loaded: Loaded, config: RunConfig | None, given: str | None, length: int) -> PackedDataset:
    """The validation split, made by the model's own tokenizer."""
    path = given or (config.data.path if config else None)
    if path is None:
        raise UsageError("this model brings no validation data; give --text FILE or --data DIR")
    if given is None and not Path(path).is_dir():
        raise UsageError(
            f"{path}: the run's data is not there any more; give --data DIR (prepared data) or --text FILE"
        )
    dataset = PackedDataset.open(path, split="val", sequence_length=length)
    if dataset.index.tokenizer.checksum != checksum_file(loaded.tokenizer_dir / "tokenizer.json"):
        raise UsageError(
            f"{path}: was made with another tokenizer than the model's; give the text itself with --text FILE"
        )
    return dataset


def _texts(spec: str) -> Iterator[str]:
    for document in iter_documents(
        Source.parse(spec), BadInputLog("refuse", remedy="Mend it, or leave it out.")
    ):
        yield document.text


def _print_result(
    options: Eval,
    loaded: Loaded,
    result: BitsPerByte,
    baselines: dict[str, float | None],
    source: str,
    length: int,
) -> None:
    if options.json:
        found: dict[str, Any] = {
            "bpb": result.bpb,
            "loss": result.loss,
            "tokens": result.tokens,
            "bytes": result.bytes,
            "tasks": {},
            "model": options.model,
            "step": loaded.step,
            "source": source,
            "sequence_length": length,
            **baselines,
        }
        print(strict_json.dumps(found))
        return
    print(f"{result.bpb:.4f} bits per byte (measured) on {result.bytes:,} bytes of {source}")
    print(f"{result.loss:.4f} nats per token on {result.tokens:,} tokens, {length} at a time")
    for name, value in baselines.items():
        if value is not None:
            print(f"{value:.4f} bits per byte of {name.removesuffix('_bpb')} on the same text")
