"""The terminal recording: the SVG contains a command's output legibly, and the
committed one shows the current commands.
"""

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("pyte")

from benchmarks.cast import COLUMNS, OUT, ROWS, SCENES, Scene, frames_of, record, speed
from benchmarks.terminal_svg import BACKGROUND, FOREGROUND, PALETTE, TITLE_COLOUR, Frame, Run, svg

PRINTED = r"printf '\033[32mloss\033[0m 1.5\n'; sleep 0.2; printf '\033[1A\033[2Kloss <1> & done\n'"


def contrast(first: str, second: str) -> float:
    """Return WCAG's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def texts(image: str) -> list[str]:
    return [
        element.text or "" for element in ElementTree.fromstring(image).iter() if element.tag.endswith("text")
    ]


def test_a_recording_has_every_screen(tmp_path: Path) -> None:
    screens = record(["bash", "-c", PRINTED], tmp_path, 40, 5)
    assert screens[0][1][0] == (Run(0, "loss", "green"), Run(5, "1.5"))
    assert screens[-1][1] == ((Run(0, "loss <1> & done"),),)
    assert screens[-1][0] > 0.15 and speed(screens) == 1.0
    frames = frames_of(Scene("cmd", 3.0), screens)
    assert frames[-1] == Frame(((Run(0, "$ cmd", bold=True),), (Run(0, "loss <1> & done"),)), 3.0)
    assert "loss <1> & done" in texts(svg(frames, 40, 5, "title", 'a "description"'))


def test_a_command_that_fails_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 3"):
        record(["bash", "-c", "exit 3"], tmp_path)


def test_colours_are_readable() -> None:
    for colour in (FOREGROUND, TITLE_COLOUR, *PALETTE.values()):
        assert contrast(colour, BACKGROUND) >= 4.5, colour


def test_lines_are_stored_once_and_the_last_frame_stays_without_motion() -> None:
    line = (Run(0, "again"),)
    image = svg([Frame((line,), 1.0), Frame((line, (Run(0, "more"),)), 2.0)], 20, 4, "t", "d")
    assert texts(image).count("again") == 1 and image.count("<use ") == 3
    assert "prefers-reduced-motion" in image and "translateY(-76px)" in image


def test_the_committed_recording_is_of_these_commands() -> None:
    image = OUT.read_text("utf-8")
    shown = texts(image)
    for scene in SCENES:
        assert f"$ {scene.command}" in shown, "python -m benchmarks.cast records it again"
        assert shlex.split(scene.command)[0] == "deskside"
    assert any("bits per byte" in text for text in shown)
    assert (
        OUT.stat().st_size < 300_000
        and "<script" not in image
        and not re.search(r"(href|src)=\"(?!#)", image)
    )
    assert max(len(text) for text in shown[1:]) <= COLUMNS and ROWS > 20
