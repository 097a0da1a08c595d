"""Names of published checkpoints on the Hugging Face hub, for names that were written without their owner."""

from pathlib import Path

from deskside.facts.data_files import toml_file


def hub_name_hint(written: str | Path) -> str | None:
    """Return "did you mean owner/name?" for the name of a published checkpoint without its owner, such as gpt2.

    Case does not matter, and "hf:" may be in front. Returns None for any other name.
    """
    name = str(written).removeprefix("hf:").lower()
    full = next((full for full in toml_file("checkpoints.toml") if full.split("/")[1].lower() == name), None)
    return None if full is None else f"did you mean {full}? Models of the hub are written owner/name"
