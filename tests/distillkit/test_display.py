from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from distillkit._utils.display import as_png, short_repr, stable_repr
from distillkit._utils.pages import Picture, Section, image_grid, render_html, render_markdown
from distillkit._utils.tables import Table
from tests.refused import refused


@dataclass
class Result:
    images: Tensor
    labels: Tensor
    scores: Mapping[str, Tensor]
    parts: tuple[Tensor, ...]
    made_by: Callable[..., Tensor]
    steps: int
    hidden: int = field(default=0, repr=False)

    __repr__ = short_repr


def test_tensors_are_shown_by_dtype_and_shape_unless_short() -> None:
    one = torch.zeros(2)
    made = Result(torch.zeros(2, 1, 4, 4), torch.arange(3), {"a": torch.ones(50).double()}, (one, one), torch.eye, 3)
    assert repr(made) == (
        "Result(images=float32 [2, 1, 4, 4], labels=[0, 1, 2], scores={'a': float64 [50]}, "
        "parts=([0.0, 0.0], [0.0, 0.0]), made_by=eye, steps=3)"
    )
    assert "parts=([0.0, 0.0], 3), " in repr(Result(one, one, {}, (one, 3), torch.eye, 3))
    assert "parts=11 tensors" in repr(Result(one, one, {}, (one,) * 11, torch.eye, 3))
    few, many = torch.zeros(1, 2), torch.arange(11)
    assert "images=float32 [1, 2], labels=int64 [11], " in repr(Result(few, many, {}, (), torch.eye, 3))
    assert f"labels={list(range(10))}, " in repr(Result(few, many[:10], {}, (), torch.eye, 3))


def test_descriptions_are_the_same_in_every_process() -> None:
    assert [stable_repr(one) for one in (3, as_png, object())] == [
        "3", "distillkit._utils.display.as_png", "builtins.object",
    ]  # fmt: skip


def levels(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as picture:
        return np.array(picture)


def test_rows_of_images_are_a_grid_on_white() -> None:
    grid = levels(as_png([torch.zeros(1, 1, 2, 3), torch.full((2, 1, 2, 3), 0.2)]))
    assert grid.shape == (2 * 3 + 1, 2 * 4 + 1)
    assert grid[1:3, 1:4].max() == 0
    assert {*grid[4:6, 5:8].flatten().tolist()} == {51}
    grid[1:3, 1:4] = grid[4:6, 1:4] = grid[4:6, 5:8] = 255
    assert grid.min() == 255
    assert levels(as_png([torch.tensor([0.0, 0.8]).view(1, 2, 1, 1)]))[1, 1] == 102
    assert levels(as_png([torch.tensor([0.2, 0.4, 0.6]).view(1, 3, 1, 1)]))[1, 1].tolist() == [51, 102, 153]


def test_pages_escape_all_texts_and_show_pixels_sharp() -> None:
    grid = image_grid([torch.tensor([-1.0, 2.0]).view(2, 1, 1, 1)], "<pixels>")
    assert levels(grid.png)[1].tolist() == [255, 0, 255, 255, 255]
    parts = ["50 % < 1\n# p", ["<i>\n\n## i"], Table(["<h>"], [["<c>"]]), grid, Picture(b"x", "<figure&>")]
    page = render_html("<t>", "<v>", [Section("<s>", parts)], "<f>")
    for text in ("<t>", "<v>", "<s>", "<i>", "<h>", "<c>", "<pixels>", "<figure&>", "<f>"):
        assert text not in page
        assert html.escape(text) in page
    assert "<p>50&nbsp;% &lt; 1\n# p</p>" in page
    assert page.count('class="pixels"') == 1
    assert re.findall('<img alt="([^"]*)" class="pixels"', page) == ["&lt;pixels&gt;"]
    text = render_markdown("a\nb", "v\n# w", [Section("s", parts)], "f")
    assert text.startswith("# a b\n\n**v # w**\n\n## s\n\n50 % &lt; 1 # p\n\n- &lt;i> ## i\n\n|")
    assert text.endswith("*Figure (in the HTML file): &lt;figure&>*\n\n*f*\n")


def test_empty_result_has_no_image() -> None:
    refused(lambda: as_png([]), ValueError, "an empty set has no picture")
