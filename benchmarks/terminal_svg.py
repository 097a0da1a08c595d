"""Frames of a terminal as one animated SVG that a browser shows as an image: no script, no fonts of its own.

All frames lie below each other in one long strip, which a CSS animation moves behind a window. A line that occurs in
several frames is stored once. Readers who ask for less motion see the last frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

FONT_SIZE = 14
CHARACTER, LINE = 8.43, 19  # width of a character and height of a line, in pixels
BORDER, TITLE = 16, 34  # around the text, and above it
BACKGROUND, FRAME, TITLE_COLOUR = "#11161c", "#465463", "#aebac6"
FOREGROUND = "#e3e8ee"
FONTS = "ui-monospace,SFMono-Regular,'DejaVu Sans Mono',Menlo,Consolas,monospace"
# The colours of the terminal, each at least 4.5:1 on the background; "brown" is what terminals call dark yellow.
PALETTE = {
    "default": FOREGROUND,
    "black": "#8b98a5",
    "red": "#ff7b72",
    "green": "#6fd08c",
    "brown": "#e8c268",
    "blue": "#7db8f5",
    "magenta": "#d6a2f5",
    "cyan": "#6fd3d8",
    "white": "#e3e8ee",
}
BRIGHT = "bright"


@dataclass(frozen=True)
class Run:
    """Adjacent characters of one style. column: of the first one. colour: a key of PALETTE, or six hex digits."""

    column: int
    text: str
    colour: str = "default"
    bold: bool = False


Line = tuple[Run, ...]


@dataclass(frozen=True)
class Frame:
    """The lines of the terminal, and the seconds that they are shown."""

    lines: tuple[Line, ...]
    seconds: float


def svg(frames: Sequence[Frame], columns: int, rows: int, title: str, description: str) -> str:
    """Return the animation as SVG text, repeated for ever.

    description: what the frames show, for readers who cannot see them.
    """
    if not frames:
        raise ValueError("there are no frames")
    width, height = columns * CHARACTER + 2 * BORDER, rows * LINE + TITLE + BORDER
    names: dict[Line, str] = {}
    for frame in frames:
        for line in frame.lines[:rows]:
            if line and line not in names:
                names[line] = f"l{len(names)}"
    definitions = "".join(f'<g id="{name}">{"".join(map(_run, line))}</g>' for line, name in names.items())
    strip = "".join(
        f'<use href="#{names[line]}" y="{(number * rows + row) * LINE}"/>'
        for number, frame in enumerate(frames)
        for row, line in enumerate(frame.lines[:rows])
        if line
    )
    last = (len(frames) - 1) * rows * LINE
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
    return f"""<svg {head} aria-label={quoteattr(description)}>
<style>
text {{ font: {FONT_SIZE}px {FONTS}; white-space: pre; }}
.b {{ font-weight: 700; }}
#strip {{ animation: strip {sum(frame.seconds for frame in frames):.1f}s steps(1, end) infinite; }}
@keyframes strip {{ {_stops(frames, rows)} }}
@media (prefers-reduced-motion: reduce) {{ #strip {{ animation: none; transform: translateY(-{last}px); }} }}
</style>
<defs>{definitions}</defs>
<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1}" rx="9" fill="{BACKGROUND}" stroke="{FRAME}"/>
<text x="{BORDER}" y="22" fill="{TITLE_COLOUR}">{escape(title)}</text>
<path d="M0 {TITLE - 2}.5H{width:.0f}" stroke="{FRAME}"/>
<svg x="{BORDER}" y="{TITLE}" width="{width - 2 * BORDER:.1f}" height="{rows * LINE}"><g id="strip">{strip}</g></svg>
</svg>
"""


def _stops(frames: Sequence[Frame], rows: int) -> str:
    """Return the stops of the animation: at the share of time at which a frame begins, the strip moves to it."""
    total, begun, stops = sum(frame.seconds for frame in frames), 0.0, []
    for number, frame in enumerate(frames):
        stops.append(f"{100 * begun / total:.3f}% {{ transform: translateY(-{number * rows * LINE}px); }}")
        begun += frame.seconds
    stops.append(f"100% {{ transform: translateY(-{(len(frames) - 1) * rows * LINE}px); }}")
    return " ".join(stops)


def _run(run: Run) -> str:
    # textLength keeps the columns aligned in whatever font the reader has.
    bold = ' class="b"' if run.bold else ""
    return (
        f'<text x="{run.column * CHARACTER:.1f}" y="{FONT_SIZE}" fill="{colour(run.colour)}"{bold} '
        f'textLength="{len(run.text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs">{escape(run.text)}</text>'
    )


def colour(name: str) -> str:
    """Return the colour of a terminal's colour name or six hex digits. Bright colours are shown as the others."""
    name = name.removeprefix(BRIGHT)
    return PALETTE.get(name) or f"#{name}"
