"""Writes matplotlib figures as SVG that fits a light and a dark page, as a file of its own and inside of an HTML page.

Text stays text, in the font of the page. Colors are attributes (`fill="#1f2328"`) instead of inline styles, because a
style sheet can change attributes: `colors.figure_style` does on a dark page, and programs that ignore style sheets show
the light colors.
"""

import io
import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from deskside.report.colors import INK, figure_style

NAMESPACE, XLINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
NUMBERS = ("d", "x", "y", "width", "height", "transform")  # attributes whose numbers are rounded
FONT_FAMILY = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG. Its ids begin with the name of the file, so figures of one folder can share a page.

    Raises OSError.
    """
    buffer = io.BytesIO()
    options = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "path.simplify_threshold": 0.4}
    with mpl.rc_context(options), warnings.catch_warnings():
        # The font lacks some characters, which matters for the layout only: a browser has other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_themed(buffer.getvalue(), path.stem), "utf-8")


def inline(path: Path) -> str:
    """Return the markup of a file that `save` has written, for a page that has `colors.figure_style`."""
    # HTML needs no namespace.
    return re.sub(r' xmlns="[^"]*"|<style>.*?</style>', "", path.read_text("utf-8"), count=2)


def _themed(svg: bytes, name: str) -> str:
    root = ElementTree.fromstring(svg)
    values = " ".join(value for element in root.iter() for value in element.attrib.values())
    references = set(re.findall(r"#([\w.-]+)", values))
    for element in root.iter():
        for child in [c for c in element if c.tag.rpartition("}")[2] in ("metadata", "style")]:
            element.remove(child)
        _simplify(element.attrib, name, references)
        element.text, element.tail = (element.text if (element.text or "").strip() else None), None
    width, height = root.get("viewBox", "").split()[2:]
    root.attrib |= {"width": width, "height": height, "fill": INK, "font-family": FONT_FAMILY}
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
    style = ElementTree.Element(f"{{{NAMESPACE}}}style")
    style.text = figure_style()
    root.insert(0, style)
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _simplify(attributes: dict[str, str], name: str, references: set[str]) -> None:
    """Turn an inline style into attributes, round numbers to hundredths of a point, and put `name` before ids."""
    for declaration in attributes.pop("style", "").split(";"):
        key, _, value = declaration.partition(":")
        if value and key.strip() != "font-family":
            attributes[key.strip()] = value.strip()
    if XLINK in attributes:
        attributes["href"] = attributes.pop(XLINK).replace("#", f"#{name}-")
    identity = attributes.pop("id", "")
    if identity in references:
        attributes["id"] = f"{name}-{identity}"
    for key, value in attributes.items():
        if key in NUMBERS:
            value = re.sub(
                r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value
            )
            value = " ".join(value.split())
        attributes[key] = value.replace("url(#", f"url(#{name}-")
