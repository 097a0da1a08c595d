"""The work of `deskside export`, apart from its options, which are parsed without torch."""

import errno
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from deskside import __version__
from deskside.cli.export_options import ExportOptions
from deskside.cli.output import print_json
from deskside.data.tokenizer import GGUF_PRE_TOKENIZER
from deskside.export.card import model_card
from deskside.export.gguf import TYPE_NAMES, check_gguf, gguf_name, plain_name, save_gguf
from deskside.export.gguf_quantize import BLOCK, QUANTIZED, check_quantizer
from deskside.export.gguf_tokenizer import gguf_tokenizer
from deskside.export.ollama import MODELFILE, modelfile
from deskside.export.peft import OriginalUnavailable, merge_into_original, save_peft
from deskside.export.push import check_push, push
from deskside.run.record import mapping
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import plural
from deskside.utils.progress import ProgressBar
from deskside.weights.hf import check_out_dir, exported_from, save_hf
from deskside.weights.load import Loaded, load_model, warn_if_unfinished
from deskside.weights.merge_adapters import load_adapted_run
from deskside.weights.peft_config import is_peft

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_model(options: ExportOptions) -> int:
    """Write the model, print where it is, and return the exit code. Raises UsageError and RunError."""
    out = Path(options.out)
    check_out_dir(out)
    if options.dtype in QUANTIZED:
        check_quantizer()
    if options.push is not None:
        check_push(options.push)
    loaded = load_model(options.source, "cpu", torch.float32, say, options.base, options.weights)
    warn_if_unfinished(loaded)
    earlier = exported_from(out)
    if earlier and earlier != loaded.source:
        say(f"{out}: replaces the export of {earlier}")
    adapter = mapping(mapping(loaded.run.get("config")).get("adapter"))
    in_base_format = options.dtype == "bfloat16" and adapter.get("base") == "bf16"
    if adapter and options.to != "peft" and not in_base_format:
        try:
            path = merge_into_original(loaded, say)
            say(f"the adapters are merged into the original weights, {path}")
        except OriginalUnavailable as error:
            say(
                f"the adapters are merged into the weights that the run kept in {adapter.get('base')}, so the exported "
                f"{options.dtype} weights are rounded; for the original precision, use --to peft and merge the "
                f"adapters into the original model ({error})"
            )
    provenance = {
        "deskside": __version__,
        "from": loaded.source,
        "step": loaded.step,
        "dtype": options.dtype,
        "to": options.to,
    }
    write: dict[str, Callable[[ExportOptions, Loaded, Path, dict[str, Any]], dict[str, Any]]] = {
        "hf": _hf,
        "gguf": _gguf,
        "peft": _peft,
    }
    try:
        details = write[options.to](options, loaded, out, provenance)
    except OSError as error:
        name = error.filename2 or error.filename or out
        # numpy's error on a full disk has no errno, only a text such as "8 requested and 0 written".
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested" in str(error)
        reason = "the disk is full; free some space there" if full else error.strerror or error
        raise RunError(f"{name}: cannot be written: {reason}") from None
    if options.push is not None:
        details["pushed"] = push(out, options.push, options.public)
        say(f"pushed to {details['pushed']}")
    if options.json:
        common = {"out": str(out), "to": options.to, "dtype": options.dtype, "step": loaded.step}
        print_json({**common, **details})
    else:
        print(details.get("file", out))
    return 0


def _hf(options: ExportOptions, loaded: Loaded, out: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    card = model_card(loaded, "hf", options.dtype, say, where=options.push)
    save_hf(loaded.model, loaded.config, loaded.tokenizer_dir, out, DTYPES[options.dtype], provenance, card)
    say(f"load it with: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    return {}


def _gguf(options: ExportOptions, loaded: Loaded, out: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    check_gguf(loaded.config)
    tokenizer = gguf_tokenizer(loaded.tokenizer_dir, loaded.config.vocab_size, loaded.start_token)
    name = gguf_name(loaded.name, options.dtype)
    notes = []
    if tokenizer.pre == GGUF_PRE_TOKENIZER:
        # Supported since February 2026 (ggml-org/llama.cpp, pull request 19468). Older versions report "unknown
        # pre-tokenizer type".
        notes.append(
            f"It needs a llama.cpp that has the pre-tokenizer `{tokenizer.pre}`, which came with Qwen3.5."
        )
    if tokenizer.nfc:
        notes.append(
            "Its tokenizer converts text to NFC but llama.cpp does not: give it text that is in NFC."
        )
    needs = " ".join(notes) or None
    card = model_card(loaded, "gguf", TYPE_NAMES[options.dtype], say, name, needs, options.push)
    stops = [tokenizer.tokens[number] for number in tokenizer.ends]
    content, has_template = modelfile(name, loaded.tokenizer_dir, stops)
    texts = {"README.md": card, MODELFILE: content}
    millions = sum(loaded.model.num_params().values()) / 1e6
    with ProgressBar("write and read back", millions, "million weights") as bar:

        def tick(weights: int) -> None:
            # A weight counts half when it is written and half when it is read back.
            bar.advance(weights / 2e6)

        saved = save_gguf(loaded.model, tokenizer, out, options.dtype, loaded.name, provenance, texts, tick)
    if saved.fallback:
        kind, size = ("float16", 32) if options.dtype == "q8_0" else ("larger types", BLOCK)
        say(
            f"{plural(len(saved.fallback), 'tensor')} in {kind}, such as {saved.fallback[0]}: {options.dtype} has "
            f"blocks of {size} values, and the row length is not a multiple of {size}"
        )
    say(f"load it with: llama-server -m {shlex.quote(str(saved.file))}" + (f" ({needs})" if needs else ""))
    say(f"or: ollama create {plain_name(loaded.name).lower()} -f {shlex.quote(str(out / MODELFILE))}")
    if not has_template:
        say(
            f"{MODELFILE}: has no TEMPLATE, because the chat template is more than fixed texts around messages; Ollama "
            "chooses one of its own that resembles it, so compare its prompts, or write one"
        )
    return {"file": str(saved.file), "fallback": list(saved.fallback)}


def _peft(options: ExportOptions, loaded: Loaded, out: Path, provenance: dict[str, Any]) -> dict[str, Any]:
    if loaded.run_dir is None:
        raise UsageError(
            f"{options.model}: is not a run, and --to peft writes the adapters of a run; use --to hf"
        )
    run = load_adapted_run(loaded.run_dir, say, weights=options.weights, step=loaded.step)
    card = model_card(loaded, "peft", "float32", say, where=options.push)
    save_peft(run.model, run.adapter, run.init, out, {**provenance, "step": run.step}, card)
    base = run.init or "its base model"
    if run.init is not None and is_peft(Path(run.init)):
        source = shlex.quote(run.init)
        base = (
            f"BASE of: deskside export {source} --out BASE, since PEFT does not merge the adapters of a base"
        )
    say(f"load it with: PeftModel.from_pretrained(base, {str(out)!r}), where base is {base}")
    return {}
