"""The report of `deskside data curate`: what was kept and removed, for each reason, source and language."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deskside.data.curation.state import WrittenBatch
from deskside.data.curation.worker import KEPT
from deskside.utils.format import plural
from deskside.utils.parsing import json_value

REPORT = "report.json"
_SAMPLES = 3


def build_report(
    written: Iterable[WrittenBatch],
    bad_input: Mapping[str, Any],
    ignored: Sequence[str],
    too_short: Mapping[str, int],
) -> dict[str, Any]:
    """Return the report.

    documents, text_bytes: by "kept" and reason. by_tag: the same for each source and language. samples: the first
    removed documents of each reason. bad_input: what could not be read, as in index.json; removed/unreadable.jsonl has
    all of it. ignored_files: of other types. evaluation_items_too_short: items that were not looked for, by task.
    """
    documents: dict[str, int] = {KEPT: 0}
    text_bytes: dict[str, int] = {KEPT: 0}
    by_tag: dict[str, dict[str, list[int]]] = {}
    samples: dict[str, list[Any]] = {}
    for entry in written:
        for reason, by_label in entry.counts.items():
            for tag, (count, size) in by_label.items():
                documents[reason] = documents.get(reason, 0) + count
                text_bytes[reason] = text_bytes.get(reason, 0) + size
                cell = by_tag.setdefault(tag, {}).setdefault(reason, [0, 0])
                cell[0] += count
                cell[1] += size
        for reason, few in entry.samples.items():
            known = samples.setdefault(reason, [])
            known += [sample.model_dump(exclude_none=True) for sample in few[: _SAMPLES - len(known)]]
    tags = [(*json_value(tag), cells) for tag, cells in sorted(by_tag.items())]
    return {
        "documents": documents,
        "text_bytes": text_bytes,
        "by_tag": [
            {
                "source": source,
                "lang": lang,
                "documents": {reason: count for reason, (count, _) in sorted(cells.items())},
                "text_bytes": {reason: size for reason, (_, size) in sorted(cells.items())},
            }
            for source, lang, cells in tags
        ],
        "samples": samples,
        "bad_input": dict(bad_input),
        "ignored_files": {"count": len(ignored), "first": list(ignored[:5])} if ignored else {},
        "evaluation_items_too_short": {task: count for task, count in too_short.items() if count},
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as a page."""
    documents, sizes = report["documents"], report["text_bytes"]
    total, total_bytes = sum(documents.values()), sum(sizes.values())
    lines = [
        "# Curated text",
        "",
        "| | documents | share | MB of text | share |",
        "|---|---:|---:|---:|---:|",
    ]
    for reason, count in sorted(documents.items(), key=lambda item: (item[0] != KEPT, -item[1], item[0])):
        size = sizes[reason]
        lines.append(
            f"| {reason} | {count:,} | {count / total:.2%} | {size / 1e6:,.1f} | {size / max(1, total_bytes):.2%} |"
        )
    lines += [
        "",
        "## By source and language",
        "",
        "| source | language | kept | removed |",
        "|---|---|---:|---:|",
    ]
    for row in report["by_tag"]:
        kept = row["documents"].get(KEPT, 0)
        removed = sum(row["documents"].values()) - kept
        lines.append(f"| {_cell(row['source'])} | {_cell(row['lang'])} | {kept:,} | {removed:,} |")
    if report["bad_input"]:
        lines += ["", "## Not readable", ""]
        lines += [
            f"- {entry['count']:,} x {reason}, first {_cell(entry['first'][0])}"
            for reason, entry in report["bad_input"].items()
        ]
    if ignored := report["ignored_files"]:
        lines += [
            "",
            f"Not read: {plural(ignored['count'], 'file')} of other types, first {_cell(ignored['first'][0])}.",
        ]
    for reason, few in sorted(report["samples"].items()):
        lines += ["", f"## Removed: {reason}", ""]
        for sample in few:
            lines += [
                f"- `{_cell(sample['id'])}`: {_cell(sample['detail'])}",
                "",
                f"  > {_cell(sample['text'])}",
                "",
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return a text on one line, without characters that Markdown or a terminal would interpret."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    for character in "|<>`[]":
        printable = printable.replace(character, " ")
    return " ".join(printable.split())
