"""Upload of an export to the Hugging Face hub, through huggingface_hub."""

import re
import shlex
from pathlib import Path
from typing import Any

from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.hub import ask
from deskside.weights.hf import EXPORT_MANIFEST

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.A)


def check_push(name: str) -> None:
    """Raise UsageError unless `name` is owner/name and the hub accepts the user's token.

    For a check before the export, which may take long.
    """
    from huggingface_hub import HfApi, constants, get_token

    if not _NAME.fullmatch(name):
        raise UsageError(f"--push {name}: give owner/name")
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if get_token() is None:
        raise UsageError(f"--push {name}: set HF_TOKEN to a token with write access, or run: hf auth login")
    error = ask(lambda: HfApi().whoami())
    if error is not None:
        raise UsageError(f"--push {name}: {_why(error)}")


def push(folder: Path, name: str, public: bool) -> str:
    """Upload the files of an export and return the URL of its page. Raises RunError; the folder is not changed.

    A repository that does not exist is created, private unless `public`; one that exists keeps its visibility.
    deskside.json is left out: it contains paths of this machine.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        url = api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            ignore_patterns=[EXPORT_MANIFEST],
            commit_message="Upload of deskside export",
        )
    except (OSError, ValueError, HTTPError) as error:
        command = f"hf upload {name} {shlex.quote(str(folder))} --exclude {EXPORT_MANIFEST}"
        command += "" if public else " --private"
        raise RunError(
            f"--push {name}: {_why(error)}; the export is complete in {folder}, and this uploads it: {command}"
        ) from None
    return str(url)


def _why(error: Any) -> str:
    """Return the reason of a failed request in a few words."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses the token ({status}); give one with write access as HF_TOKEN"
    if status is not None:
        return f"{constants.ENDPOINT} answers {status}"
    return f"{constants.ENDPOINT} cannot be reached ({first_line(error)})"
