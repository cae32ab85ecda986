"""Images of requests: drawn, read, written, joined and taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads import DrawnImages, Fixed, Trace, Uniform, concat, read_trace

TEXT = """arrival_s,prompt_tokens,output_tokens,images
0.0,700,5,640x480#3 1024x768
10.0,100,5,
20.0,1300,5,640x480#3 640x480
"""


def trace(n: int = 3) -> Trace:
    return Trace(arrival_ns=list(range(n)), prompt_tokens=[10] * n, output_tokens=[2] * n)


def images_of(found: Trace) -> list[list[tuple[int, int, int]]]:
    return [found.images_of(row) for row in range(len(found))]


def test_images_without_a_number_are_like_no_others(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(TEXT)
    found = images_of(read_trace(tmp_path / "images.csv"))
    assert [[size[:2] for size in each] for each in found] == [[(640, 480), (1024, 768)], [], [(640, 480)] * 2]
    contents = [content for each in found for *_, content in each]
    assert (contents[0], contents[2]) == (3, 3)
    assert len(set(contents)) == 3


def test_the_column_is_written_taken_and_joined(tmp_path: Path) -> None:
    (tmp_path / "images.csv").write_text(TEXT)
    found = read_trace(tmp_path / "images.csv")
    found.to_csv(tmp_path / "again.csv")
    again = read_trace(tmp_path / "again.csv")
    assert again.image_content is not None
    assert images_of(again) == images_of(found)
    assert images_of(again.take([1, 2])) == [[], found.images_of(2)]
    assert again.describe()["images"]["max"] == 2
    for shared, named in ((True, {3}), (False, {3, 7})):
        joined = concat([found, trace(1), again], shared_ids=shared)
        contents = [content for each in images_of(joined) for *_, content in each]
        assert {each for each in contents if each < 100} == named
        assert len(set(contents)) == len(named) + 4


@pytest.mark.parametrize("cell", ["640", "640x", "640x480#", "640x480#a", "640,480", "-1x3"])
def test_a_cell_that_is_no_image_is_refused_with_its_line(cell: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(f'arrival_s,prompt_tokens,output_tokens,images\n0,5,5,\n1,5,5,"{cell}"\n')
    with pytest.raises(ValueError, match=r"line 3, column images: expected images .* WIDTHxHEIGHT"):
        read_trace(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"image_offsets": [0, 1, 1, 1]}, "go together; got only some of them"),
        ({"image_offsets": [0, 1], "image_width": [1], "image_height": [1], "image_content": [1]}, "4 non-decreasing numbers"),
        ({"image_offsets": [0, 1, 1, 1], "image_width": [0], "image_height": [1], "image_content": [1]}, "at least 1"),
        ({"image_offsets": [0, 1, 2, 2], "image_width": [5, 6], "image_height": [1, 1], "image_content": [1, 1]}, "one size"),
    ],
)  # fmt: skip
def test_columns_that_contradict_each_other_are_refused(columns: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Trace(arrival_ns=[0, 1, 2], prompt_tokens=[1] * 3, output_tokens=[1] * 3, **columns)


def test_drawn_images_are_as_many_as_asked_and_equal_ones_have_one_size() -> None:
    drawn = DrawnImages(
        per_request=Uniform(min_tokens=0, max_tokens=3),
        width=Uniform(min_tokens=100, max_tokens=900),
        height=Fixed(tokens=300),
        distinct=7,
    )
    found = drawn.on(trace(200), seed=3)
    assert found.image_offsets is not None
    counts = np.diff(found.image_offsets)
    assert (counts.min(), counts.max()) == (0, 3)
    sizes = {content: width for each in images_of(found) for width, _, content in each}
    assert len(sizes) == 7
    assert all(sizes[content] == width for each in images_of(found) for width, _, content in each)
    assert found.prompt_tokens.tolist() == [10] * 200
    assert images_of(drawn.on(trace(200), seed=3)) == images_of(found)
    with pytest.raises(ValueError, match=r"leave workload\.images out"):
        drawn.on(found, seed=3)
    alone = DrawnImages(per_request=Fixed(tokens=2), width=Fixed(tokens=100), height=Fixed(tokens=300)).on(
        trace(), seed=1
    )
    assert sorted(content for each in images_of(alone) for *_, content in each) == list(range(6))
