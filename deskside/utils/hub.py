"""Models on the Hugging Face hub by name: owner/name, with a branch, tag or commit as owner/name@revision.

huggingface_hub finds, downloads and caches the files. Its settings hold here too (HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE), and models that other programs have downloaded are not downloaded again.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.parsing import read_json_object

Need = Literal["model", "tokenizer", "config"]

PREFIX = "hf:"
CONTACT_SECONDS = 3.0  # how long the hub may take for its first answer, name resolution included
_NAME = re.compile(
    r"(?:hf:)?(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./+-]+))?", re.A
)
_CONFIG = ("config.json",)
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
_MODEL = (
    *_CONFIG,
    "generation_config.json",
    *_TOKENIZER,
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
)
_FILES: dict[Need, tuple[str, ...]] = {"model": _MODEL, "tokenizer": _TOKENIZER, "config": _CONFIG}
_REQUIRED: dict[Need, tuple[str, ...]] = {
    "model": ("config.json", "tokenizer.json", "model.safetensors"),
    "tokenizer": ("tokenizer.json",),
    "config": ("config.json",),
}


@dataclass(frozen=True)
class HubModel:
    """A model on the hub. name: owner/name. revision: a branch, tag or commit."""

    name: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"


@dataclass(frozen=True)
class Found:
    """A model's folder on this machine. source: how to find it again; from the hub, hf:owner/name@commit."""

    folder: Path
    source: str


def hub_model(spec: str) -> HubModel | None:
    """Return the hub model that a command line or run.json names, or None for a path.

    A path that exists is never a name. Nor is one whose first part is a folder here, such as runs/NAME with a typing
    error, unless it begins with "hf:".
    """
    match, first = _NAME.fullmatch(spec), spec.split("/")[0]
    is_path = not spec.startswith(PREFIX) and (first == "runs" or Path(first).exists())
    return None if match is None or is_path else HubModel(match["name"], match["revision"] or "main")


def with_revision(spec: str, revision: str | None) -> str:
    """Return the spec with the revision of --revision. Raises UsageError if it is a path or has a revision already."""
    if revision is None:
        return spec
    if hub_model(spec) is None:
        raise UsageError(
            f"--revision {revision}: is for models of the hub, and {spec} is a path; leave it out"
        )
    if "@" in spec:
        raise UsageError(f"--revision {revision}: {spec} names a revision already; give one of them")
    return f"{spec}@{revision}"


def find(spec: str | Path, need: Need = "model", warn: Callable[[str], None] = say) -> Found:
    """Return the folder of a model: the path itself, or a hub model's folder in the cache, downloaded if needed.

    If the hub does not answer, a copy in the cache is used, and `warn` is called with a sentence that says so.

    need: "model" takes the safetensors weights, the tokenizer and the configuration; the others only these files.
    Raises UsageError for a name or revision that the hub does not have or does not give to this user, for one without
    safetensors weights, and if neither the hub nor a whole copy in the cache can be read.
    """
    model = hub_model(str(spec))
    if model is None:
        return Found(Path(spec), str(spec))
    problem = _contact(model)
    folder = _cached(model, need) if problem is not None else _download(model, need)
    if folder is None:
        raise UsageError(
            f"{spec}: no such directory; {problem}, and its cache has no whole copy of {model}; "
            "connect to the network, or give a local directory"
        )
    if not _complete(folder, need):
        raise UsageError(
            f"{spec}: is published without some of what is needed here, {' and '.join(_REQUIRED[need])}; "
            "give another model or revision"
        )
    if problem is not None:
        warn(f"{model}: {problem}; using the copy in its cache, commit {folder.name[:8]}")
    return Found(folder, f"{PREFIX}{model.name}@{folder.name}")


def short_name(source: str) -> str:
    """Return the last part of a path or hub name, without its revision: Qwen3-0.6B."""
    name = owner_and_name(source)
    return Path(source).resolve().name if name is None else name.split("/")[1]


def owner_and_name(source: str) -> str | None:
    """Return owner/name of a source from the hub ("hf:owner/name@commit"), or None for a path."""
    match = _NAME.fullmatch(source) if source.startswith(PREFIX) else None
    return None if match is None else match["name"]


def ask(request: Callable[[], object]) -> Exception | None:
    """Make a first request to the hub. Return its error, TimeoutError after `CONTACT_SECONDS`, or None.

    It is made in a thread, because name resolution has no time limit.
    """
    from huggingface_hub.errors import HTTPError

    outcome: list[Exception | None] = []

    def call() -> None:
        try:
            request()
            outcome.append(None)
        except (OSError, ValueError, HTTPError) as error:  # HTTPError has the library's connection errors
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(CONTACT_SECONDS)
    return outcome[0] if outcome else TimeoutError(f"no answer within {CONTACT_SECONDS:g} s")


def _contact(model: HubModel) -> str | None:
    """Return None if the hub has the model, or the reason why it cannot be asked. Raises UsageError if it has not."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    error = ask(lambda: HfApi().model_info(model.name, revision=model.revision, timeout=CONTACT_SECONDS))
    return None if error is None else _reason(model, error)


def _reason(model: HubModel, error: Exception) -> str:
    """Return why the hub cannot be used. Raises UsageError if it has no such model, or none for this user."""
    from huggingface_hub import constants, errors

    url = f"{constants.ENDPOINT}/{model.name}"
    if isinstance(error, errors.GatedRepoError):
        raise UsageError(
            f"{model}: is gated; accept its conditions at {url} and set HF_TOKEN to a token of that account"
        ) from None
    if isinstance(error, errors.RepositoryNotFoundError):
        raise UsageError(
            f"{model}: no such directory here, and no such model at {constants.ENDPOINT}; check the name, or set "
            "HF_TOKEN if it is private"
        ) from None
    if isinstance(error, errors.RevisionNotFoundError):
        raise UsageError(f"{model.name}: has no revision {model.revision}; see {url}/tree/main") from None
    if isinstance(error, errors.HFValidationError):
        raise UsageError(f"{model}: is not a name of the hub: {first_line(error)}") from None
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None and isinstance(error, ValueError):  # such as the login page of a network
        return f"{constants.ENDPOINT} does not answer as a hub does ({first_line(error)})"
    return f"{constants.ENDPOINT} " + ("cannot be reached" if status is None else f"answers {status}")


def _download(model: HubModel, need: Need) -> Path:
    """Download the files that are not in the cache yet, and return the folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model.name, revision=model.revision, allow_patterns=list(_FILES[need]))
    except (HfHubHTTPError, HTTPError, LocalEntryNotFoundError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        reason = _reason(model, cause if isinstance(cause, Exception) else error)
        raise RunError(f"{model}: its download stopped: {reason}; the same command continues it") from None
    return Path(folder)


def _cached(model: HubModel, need: Need) -> Path | None:
    """Return the folder in the cache if it has every file that is needed, else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns: Any = list(_FILES[need])
    try:
        folder = snapshot_download(
            model.name, revision=model.revision, allow_patterns=patterns, local_files_only=True
        )
    except LocalEntryNotFoundError:  # of an incomplete copy, too
        return None
    return Path(folder) if _complete(Path(folder), need) else None


def _complete(folder: Path, need: Need) -> bool:
    """Return True if the folder has the files without which a model or tokenizer cannot be loaded."""
    names = set(_REQUIRED[need])
    index = folder / "model.safetensors.index.json"
    if need == "model" and (folder / "adapter_config.json").is_file():
        names = {"adapter_model.safetensors"}
    elif need == "model" and index.is_file() and not (folder / "model.safetensors").is_file():
        weight_map = read_json_object(index).get("weight_map")
        shards = weight_map.values() if isinstance(weight_map, dict) else ()
        names = names - {"model.safetensors"} | {str(name) for name in shards}
    return all((folder / name).is_file() for name in names)
