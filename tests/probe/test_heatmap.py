"""The heat map: measured cells are coloured, others are not, and it is a readable PNG."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps, image

from deskside.measurements.store import Row
from deskside.probe import heatmap
from deskside.probe.grid import Point, make_point
from deskside.probe.heatmap import draw
from deskside.utils.errors import RunError
from tests.probe.test_grid import depth, grid
from tests.probe.test_table import make_result


def row(point: Point, status: str = "ok", speed: float = 1e5) -> tuple[Point, Row]:
    point_result = make_result(point, status, tokens_per_second=speed)
    assert point_result.row is not None
    return point, point_result.row


def has_color(picture: np.ndarray, color: tuple[float, ...]) -> int:
    """Return the number of pixels with this colour."""
    return int((np.abs(picture[..., :3] - np.array(color[:3])).max(axis=-1) < 0.01).sum())


def test_cells_have_the_colours_of_their_values(tmp_path: Path) -> None:
    points = grid([4, 8], [512, 1024], ["muon"], ["none"])
    path = tmp_path / "new" / "map.png"
    rows = [row(points[0], speed=1e5), row(points[1], speed=1e4), row(points[2], "oom")]
    draw(rows, "NVIDIA H200", path)
    picture = image.imread(path)
    colors = colormaps["cividis"]
    assert has_color(picture, colors(1.0)) > 5000, "the fastest, and the memory that is the same in both"
    assert has_color(picture, colors(0.0)) > 2000, "the slowest"
    assert has_color(picture, (0xEE / 255,) * 3) > 1000, "not measured"


def test_options_share_a_panel_only_where_no_cell_is_taken_twice() -> None:
    model = depth(8).model
    apart = [row(make_point(model, 512, 8192)), row(make_point(model, 1024, 8192, "adamw"))]
    ((title, cells),) = heatmap._groups(apart)
    assert title == "" and len(cells) == 2
    same = [
        row(make_point(model, 512, 8192)),
        row(make_point(model, 512, 8192, "adamw", checkpointing="block")),
    ]
    assert [title for title, _ in heatmap._groups(same)] == ["muon", "adamw, block"]
    ((title, _),) = heatmap._groups(apart[:1])
    assert title == "muon"


def test_nothing_but_failures_can_be_drawn(tmp_path: Path) -> None:
    points = grid([8], [512, 1024, 2048], ["muon"], ["none"])
    rows = [row(*pair) for pair in zip(points, ("oom", "failed", "timeout"), strict=True)]
    draw(rows, "card", tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="the map cannot be written"):
        draw([row(make_point(depth(8).model, 512, 8192))], "card", tmp_path / "file" / "map.png")
