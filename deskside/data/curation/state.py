"""curate.json: the arguments and the progress of a curation, for resuming it and recognizing its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from deskside.config.base import Part
from deskside.data.corpus.prepare_state import read_state_file
from deskside.data.corpus.source_files import FileRecord
from deskside.data.reading.index import LeftOut
from deskside.utils.files import write_json
from deskside.utils.parsing import json_value

STATE = "curate.json"


def _check_label(label: str) -> str:
    value = json_value(label)
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
        raise ValueError("is not a source and a language")
    return label


OutputFile = Annotated[str, Field(pattern=r"^(kept|removed)/(kept|removed)-\d{5,}\.jsonl\.zst$")]
# A JSON list of the source and the language of documents
Label = Annotated[str, AfterValidator(_check_label)]
Counts = Annotated[dict[Label, tuple[PositiveInt, NonNegativeInt]], Field(min_length=1)]


class Sample(Part):
    """The beginning of a removed document. kept: of a duplicate, the id of the document that is kept."""

    id: str
    source: str
    lang: str
    reason: str
    detail: str
    text: str
    kept: str | None = None


class WrittenBatch(Part):
    """Record of a batch of documents that was written.

    key: checksum of the batch and of all text. files: size and checksum of each. counts: documents and bytes of text by
    "kept" or the reason, and by label. samples: the first removed documents, by reason.
    """

    key: str
    files: dict[OutputFile, tuple[NonNegativeInt, str]]
    counts: Annotated[dict[str, Counts], Field(min_length=1)]
    samples: dict[str, list[Sample]]


class CurationState(Part):
    """The state of a curation.

    arguments: everything that determines the result, apart from the content of the sources. files: those of the
    sources, None in states of earlier versions. bad_input: as in index.json. written: batches by their number.
    """

    arguments: dict[str, Any]
    files: list[FileRecord] | None = None
    bad_input: dict[str, LeftOut]
    complete: bool
    written: dict[NonNegativeInt, WrittenBatch]

    @model_validator(mode="after")
    def _check_completeness(self) -> CurationState:
        if self.complete and (not self.written or set(self.written) != set(range(len(self.written)))):
            raise ValueError("written: a batch is missing")
        return self


def read_state(directory: Path) -> CurationState | None:
    """Return the state of the curation in `directory`, or None if it has no curate.json.

    Raises RunError if curate.json is damaged or was written by another program.
    """
    return read_state_file(directory / STATE, CurationState, "deskside data curate", "delete this folder")


def write_state(directory: Path, state: CurationState) -> None:
    """Write curate.json. Raises as `write_json`."""
    write_json(directory / STATE, state.model_dump(mode="json", exclude_none=True))
