"""Drawings that explain techniques. None of their numbers are measured."""

from collections.abc import Sequence

import plotly.graph_objects as go

from deskside.dashboard.plotly_charts import BLUE, EDGE_COLOR, GREY, ORANGE, SKY, VERMILION, apply_layout

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, FP4
# One NVFP4 block: sixteen values that share a scale. The values were drawn at random once.
SAMPLE_VALUES = (
    -0.652, -0.175, 1.664, 0.659, -1.641, -0.005, -0.623, 0.149,
    -1.608, 0.242, 0.235, 1.576, 0.317, 0.511, -1.493, 2.253,
)  # fmt: skip
BLOCKS = 8  # transformer blocks in the drawing
INK = "#111111"  # of letters on colored marks; the dark theme leaves it, as it leaves the marks bright
INPUT_SIZE = 0.12  # a block's input as a fraction of all its activations, in the drawing


def heads(queries: int, keys: int) -> go.Figure:
    """Draw `queries` query heads, joined by lines to the `keys` key-value heads below that they share."""
    figure = go.Figure()
    queries_per_key = queries // keys
    centres = [queries_per_key * k + (queries_per_key - 1) / 2 for k in range(keys)]
    x: list[float | None] = []
    y: list[float | None] = []
    for q in range(queries):
        x += [q, centres[q // queries_per_key], None]
        y += [1, 0, None]
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": GREY, "width": 1.5}, hoverinfo="skip")
    for xs, height, symbol, color, letter in (
        (list(range(queries)), 1, "circle", SKY, "q"),
        (centres, 0, "square", ORANGE, "kv"),
    ):
        figure.add_scatter(
            x=xs,
            y=[height] * len(xs),
            mode="markers+text",
            marker={"symbol": symbol, "size": 19, "color": color, "line": {"color": EDGE_COLOR, "width": 1}},
            text=[letter] * len(xs),
            textfont={"size": 10, "color": INK},
            hoverinfo="skip",
        )
    apply_layout(figure, 190, showlegend=False)
    figure.update_layout(margin={"t": 28})
    figure.update_xaxes(visible=False, range=[-0.8, queries - 0.2])
    figure.update_yaxes(visible=False, range=[-0.4, 1.4])
    return figure


def fp4() -> go.Figure:
    """Draw a block of sixteen values before and after rounding to NVFP4: eight magnitudes, a sign and one scale."""
    scale = max(abs(value) for value in SAMPLE_VALUES) / E2M1[-1]
    grid = sorted({sign * size * scale for size in E2M1 for sign in (-1, 1)})
    rounded = [_nearest(grid, value) for value in SAMPLE_VALUES]
    figure = go.Figure()
    dotted = {"color": GREY, "width": 0.8, "dash": "dot"}
    grid_line = {"type": "line", "xref": "x domain", "yref": "y", "x0": 0, "x1": 1, "line": dotted}
    # All shapes at once: fifteen calls of add_hline take a tenth of a second.
    figure.update_layout(shapes=[{**grid_line, "y0": level, "y1": level} for level in grid])
    positions = list(range(1, len(SAMPLE_VALUES) + 1))
    x: list[float | None] = []
    y: list[float | None] = []
    for position, before, after in zip(positions, SAMPLE_VALUES, rounded, strict=True):
        x += [position, position, None]
        y += [before, after, None]
    figure.add_scatter(x=x, y=y, mode="lines", line={"color": VERMILION, "width": 2}, name="rounding error")
    figure.add_scatter(
        x=positions,
        y=SAMPLE_VALUES,
        mode="markers",
        name="value",
        marker={"symbol": "circle-open", "size": 9, "color": BLUE, "line": {"width": 2}},
    )
    figure.add_scatter(
        x=positions,
        y=rounded,
        mode="markers",
        name="in FP4",
        marker={"symbol": "square", "size": 8, "color": ORANGE},
    )
    apply_layout(figure, 330)
    figure.update_xaxes(title="place in the block", showgrid=False)
    figure.update_yaxes(title="value, no unit", showgrid=False)
    return figure


def _nearest(levels: Sequence[float], value: float) -> float:
    return min(levels, key=lambda level: abs(level - value))


def recomputation() -> go.Figure:
    """Draw the activations in memory during a forward and backward pass, with and without recomputation."""
    steps = list(range(2 * BLOCKS + 1))
    kept = [float(min(step, 2 * BLOCKS - step)) for step in steps]
    # With recomputation, the inputs of the blocks are kept, and in the backward pass one block is recomputed at a time.
    inputs = [INPUT_SIZE * size for size in kept]
    recomputed = [
        size + (1.0 if BLOCKS <= step < 2 * BLOCKS else 0.0) for step, size in zip(steps, inputs, strict=True)
    ]
    figure = go.Figure()
    for y, name, dash, color in (
        (kept, "everything is kept", "solid", BLUE),
        (recomputed, "blocks are recomputed", "dash", VERMILION),
    ):
        figure.add_scatter(
            x=steps,
            y=y,
            mode="lines",
            name=name,
            line={"shape": "hv", "dash": dash, "width": 3, "color": color},
        )
    figure.add_vline(x=BLOCKS, line={"color": GREY, "width": 1})
    for x, text in ((BLOCKS / 2, "forward"), (1.5 * BLOCKS, "backward")):
        figure.add_annotation(x=x, y=BLOCKS + 1, text=text, showarrow=False)  # between two lines of the grid
    apply_layout(figure, 300)
    figure.update_xaxes(title="time, blocks passed", showgrid=False)
    figure.update_yaxes(title="activations held, in blocks", rangemode="tozero")
    return figure


def micro_batches(rows: int, micro: int) -> go.Figure:
    """Draw one optimizer step: passes of `micro` rows each until `rows` rows are processed, then the update."""
    passes = rows // micro
    outline = {"color": EDGE_COLOR, "width": 1}
    figure = go.Figure()
    for x, heights, color in (
        ([index + 0.5 for index in range(passes)], [micro] * passes, SKY),
        ([passes + 0.5], [rows], ORANGE),
    ):
        figure.add_bar(x=x, y=heights, width=0.84, marker={"color": color, "line": outline}, hoverinfo="skip")
    figure.add_annotation(
        x=passes + 0.5, y=rows / 2, text="update", textangle=-90, showarrow=False, font={"color": INK}
    )
    apply_layout(figure, 230, showlegend=False)
    figure.update_layout(margin={"t": 28})
    figure.update_xaxes(
        title="passes through the model, then the update",
        range=[0, passes + 1],
        showticklabels=False,
        showgrid=False,
    )
    figure.update_yaxes(title="rows in memory", range=[0, rows * 1.05])
    return figure
