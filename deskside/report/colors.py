"""Colors of report pages and figures on a light and on a dark background.

The colors of data are those of Okabe and Ito (2008), which people with any color vision can distinguish. Texts keep a
contrast of at least 4.5:1 (WCAG 2.2) on their background.
"""

INK, GREY, PALE, GRID, PAPER = "#1f2328", "#57606a", "#bdc4cc", "#e2e6ea", "#ffffff"
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#b5518a", "#56b4e9"
BETTER, WORSE = BLUE, VERMILION

# Figures are drawn in the colors on the left; a browser shows those on the right if its user prefers a dark page.
DARK_FIGURE_COLORS = {
    "#000000": "#e6edf3",
    INK: "#e6edf3",
    GREY: "#9aa4af",
    PALE: "#57606a",
    GRID: "#2b323b",
    PAPER: "#0d1117",
    BLUE: "#4aa8e8",
    ORANGE: "#f0b429",
    GREEN: "#2dc296",
    VERMILION: "#f5834b",
    PURPLE: "#e39ac2",
    SKY: "#8fd0f7",
}

# CSS variables of a page: name -> (light, dark).
PAGE_COLORS = {
    "page": (PAPER, "#0d1117"),
    "text": (INK, "#e6edf3"),
    "quiet": (GREY, "#9aa4af"),
    "box": ("#f3f5f8", "#161b22"),
    "rule": ("#d0d7de", "#3d444d"),
    "link": ("#0069a6", "#6cb6f0"),
}
# A verdict's colors: kind -> ((text, background) on a light page, (text, background) on a dark page).
CHIP_COLORS = {
    "better": (("#004a75", "#d9edf9"), ("#a8dcff", "#0b3a5a")),
    "partly": (("#1b4b63", "#eef6fb"), ("#b9d9ec", "#14293a")),
    "worse": (("#7d2f00", "#fde3d3"), ("#ffc7a3", "#5a2606")),
    "doubtful": (("#70400f", "#fdf3e7"), ("#f0cfa6", "#36271a")),
    "open": (("#424a53", "#e9edf1"), ("#c3ccd5", "#262c34")),
}


def figure_style() -> str:
    """Return the style sheet that changes the colors of SVG figures on a dark background."""
    rules = [
        f'[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in DARK_FIGURE_COLORS.items()
        for attribute in ("fill", "stroke")
    ]
    return f"@media screen and (prefers-color-scheme:dark){{{''.join(rules)}}}"


def page_style() -> str:
    """Return the style sheet that defines the CSS variables of pages and the colors of chips in both color schemes."""
    sheets = []
    for scheme in (0, 1):
        variables = ";".join(f"--{name}:{colors[scheme]}" for name, colors in PAGE_COLORS.items())
        chips = "".join(
            f".{kind}{{color:{colors[scheme][0]};background:{colors[scheme][1]}}}"
            for kind, colors in CHIP_COLORS.items()
        )
        sheets.append(f":root{{{variables}}}{chips}")
    light, dark = sheets
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{{dark}}}"
