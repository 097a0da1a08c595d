"""A contact sheet of pictures named NAME-FORM-SCHEME.png, such as runs-phone-dark.png: one row per name.

python -m benchmarks.contact_sheet SHEET.webp DIR...
"""

import argparse
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

SIZES = {"desktop": {"width": 1440, "height": 900}, "phone": {"width": 390, "height": 844}}
FORMS = tuple(itertools.product(SIZES, ("light", "dark")))
PICTURE_NAME = re.compile(r"(.+)-(desktop|phone)-(light|dark)\.png")
HEIGHT, GAP, LABEL = 300, 16, 20  # in pixels: of a picture, between pictures, and of a name
MAX_ROWS = 36  # in a column of the sheet; WebP allows 16,383 pixels


def contact_sheet(folders: Sequence[Path]) -> Image.Image:
    """Return one image of the pictures in the folders: a row per name, with a picture per form (sizes and schemes).

    More than `MAX_ROWS` names are set in several columns.
    """
    found: dict[str, dict[tuple[str, str], Path]] = {}
    for file in sorted(file for folder in folders for file in folder.glob("*.png")):
        if match := PICTURE_NAME.fullmatch(file.name):
            found.setdefault(match[1], {})[match[2], match[3]] = file
    if not found:
        raise SystemExit(
            "no picture named NAME-FORM-SCHEME.png, such as runs-phone-dark.png, in these folders"
        )
    widths = [round(HEIGHT * SIZES[form]["width"] / SIZES[form]["height"]) for form, _ in FORMS]
    row_width, row_height = sum(widths) + GAP * (len(FORMS) + 1), HEIGHT + LABEL + GAP
    columns = math.ceil(len(found) / MAX_ROWS)
    rows = math.ceil(len(found) / columns)
    sheet = Image.new("RGB", (row_width * columns, row_height * rows + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (name, pictures) in enumerate(found.items()):
        left, top = GAP + row_width * (index // rows), GAP + row_height * (index % rows)
        draw.text((left, top), name, fill="black")
        for form, width in zip(FORMS, widths, strict=True):
            if form in pictures:
                sheet.paste(_first_screen(pictures[form], width), (left, top + LABEL))
            left += width + GAP
    return sheet


def _first_screen(path: Path, width: int) -> Image.Image:
    """Return a picture at a width. That of a whole page is cut to one screen."""
    with Image.open(path) as image:
        shown = image.convert("RGB")
    shown = shown.crop((0, 0, shown.width, min(shown.height, round(shown.width * HEIGHT / width))))
    return shown.resize((width, round(shown.height * width / shown.width)), Image.Resampling.LANCZOS)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sheet", type=Path, metavar="SHEET", help="image to write, by its suffix WebP or PNG")
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    options = parser.parse_args()
    contact_sheet(options.folders).save(options.sheet, quality=80, method=6)


if __name__ == "__main__":
    main()
