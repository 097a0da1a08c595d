"""Colours of the light and the dark theme, and the switch between them."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import streamlit as st

from deskside.report.colors import DARK_FIGURE_COLORS

# Backgrounds and texts keep a contrast of at least 4.5:1 (WCAG 2.2), also for captions.
LIGHT = {
    "primaryColor": "#0069A6",
    "backgroundColor": "#ffffff",
    "secondaryBackgroundColor": "#f3f5f8",
    "textColor": "#13171c",
    "linkColor": "#0069A6",
    "borderColor": "#d0d7de",
    "grayTextColor": "#57606a",
}
DARK = {
    "primaryColor": "#2474B5",
    "backgroundColor": "#0d1117",
    "secondaryBackgroundColor": "#1a212b",
    "textColor": "#e6edf3",
    "linkColor": "#6CB6F0",
    "borderColor": "#3d444d",
    "grayTextColor": "#9aa4af",
}
# Charts are built in the first color of each pair, and drawn in the second one on a dark background.
DARK_CHART_COLORS = {
    **DARK_FIGURE_COLORS,
    "#7f7f7f": "#9aa4af",
    "#333333": "#c9d1d9",
    "black": "#e6edf3",
}
STYLE = """<style>
[data-testid="stMainBlockContainer"] {padding: 3.5rem 2rem 3rem 2rem; max-width: 1500px}
[data-testid="stMain"] h1 {font-size: 1.75rem; padding: 0 0 0.25rem 0}
[data-testid="stMain"] h2 {font-size: 1.35rem; padding: 0.75rem 0 0.25rem 0}
[data-testid="stMain"] h3 {font-size: 1.1rem; padding: 0.5rem 0 0.25rem 0}
/* White text is read on the primary color, so on the dark background, text in the primary color is not. */
:is([data-testid="stSliderThumbValue"], [data-testid="stTab"][aria-selected="true"], button[data-selected="true"]),
:is([data-testid="stSliderThumbValue"], [data-testid="stTab"][aria-selected="true"], button[data-selected="true"]) * {
  color: inherit !important; font-weight: 600}
/* Captions are translucent: on the background of code, their text would have too little contrast. */
[data-testid="stCaptionContainer"] code {padding: 0; background: none; color: inherit}
[data-stale="true"] {opacity: 1 !important}
[data-testid="stMetricValue"] {font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums}
.sample {padding: 0.8rem 1rem; border: 1px solid rgba(127,127,127,0.35); border-radius: 8px; white-space: pre-wrap;
  overflow-wrap: anywhere; line-height: 1.5}
.sample small {display: block; opacity: 0.75}
[data-testid="stMain"] ul.numbered {display: flex; flex-wrap: wrap; gap: 0.15rem 1.25rem; margin: 0;
  padding: 0; list-style: none; font-size: 0.875rem}
ul.numbered li {margin: 0; overflow-wrap: anywhere}
.runs-legend {width: 100%; border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums}
.runs-legend :is(th, td) {padding: 0.3rem 0.6rem 0.3rem 0; text-align: right; border: 0}
.runs-legend :is(th, td):first-child {width: 3rem}
.runs-legend :is(th, td):nth-child(-n+2) {text-align: left; overflow-wrap: anywhere}
.runs-legend thead th {font-weight: 400; opacity: 0.75}
.runs-legend hr {width: 2rem; margin: 0; border: 0; border-top: 3px solid}
[data-testid="stSidebarHeader"]::before {content: "deskside"; font-size: 1.2rem; font-weight: 700}
[data-testid="stSidebarNavItems"] > li::before {display: block; padding: 0.9rem 0 0.15rem 0; font-size: 0.875rem;
  font-weight: 600}
.st-key-theme-switch {position: fixed; top: 0.7rem; right: 1rem; z-index: 1000000; width: auto}
@media (max-width: 640px) {
  [data-testid="stMainBlockContainer"] {padding: 3.75rem 1rem 2rem 1rem}
  .runs-legend :is(th, td):nth-child(n+5) {display: none}
}
</style>"""


def options() -> dict[str, str]:
    """Return Streamlit's theme options. The browser follows the system's theme until the switch is used."""
    themes = {"light": LIGHT, "dark": DARK}
    return {f"theme.{name}.{key}": color for name, colors in themes.items() for key, color in colors.items()}


def apply(paths: Sequence[str], headings: Mapping[str, str]) -> None:
    """Draw the style sheet and the switch (system, light, dark).

    paths: the address paths of the pages but the first. headings: those in the navigation, by the path below them.

    Streamlit has a theme menu of its own, but it hides behind three dots, and a choice in it holds only for the address
    path at which the browser came in. The switch stores the choice for all paths.
    """
    st.html(STYLE + "<style>" + "".join(map(_heading_style, headings.items())) + "</style>")
    with st.container(key="theme-switch", width="content"):
        _switch()(key="theme", data={"paths": ["", *paths]})


def _heading_style(heading: tuple[str, str]) -> str:
    path, text = heading
    return f'[data-testid="stSidebarNavItems"] > li:has(a[href$="/{path}"])::before {{content: "{text}"}}'


def is_dark() -> bool:
    """Return True if the browser shows the dark theme."""
    return st.context.theme.type == "dark"


def chart_colors(figure: Any) -> Any:
    """Return a plotly figure or a part of it, in JSON form, with the colors of the dark theme."""
    if isinstance(figure, dict):
        return {key: chart_colors(value) for key, value in figure.items()}
    if isinstance(figure, list | tuple):
        return [chart_colors(value) for value in figure]
    return DARK_CHART_COLORS.get(figure, figure) if isinstance(figure, str) else figure


def read_asset(name: str) -> str:
    """Return the text of a file in assets/."""
    return files("deskside.dashboard").joinpath("assets", name).read_text("utf-8")


@st.cache_resource(show_spinner=False)
def _switch() -> Any:
    return st.components.v2.component(
        "deskside_theme",
        html='<div class="switch"></div>',
        css=read_asset("theme_switch.css"),
        js=read_asset("theme_switch.js"),
    )
