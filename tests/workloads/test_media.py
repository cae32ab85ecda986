"""Images and clips of speech of requests: drawn, read, written, joined and taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads import Drawn, Fixed, Trace, Uniform, concat, read_trace

TEXT = """arrival_s,prompt_tokens,output_tokens,images
0.0,700,5,640x480#3 1024x768
10.0,100,5,
20.0,1300,5,640x480#3 640x480
"""


def trace(n: int = 3) -> Trace:
    return Trace(arrival_ns=list(range(n)), prompt_tokens=[10] * n, output_tokens=[2] * n)


def images_of(found: Trace) -> list[list[tuple[int, ...]]]:
    return [found.media_of("image", row) for row in range(len(found))]


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
    assert images_of(again.take([1, 2])) == [[], found.media_of("image", 2)]
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
    size = {"width": Uniform(min_tokens=100, max_tokens=900), "height": Fixed(tokens=300)}
    drawn = Drawn(medium="image", per_request=Uniform(min_tokens=0, max_tokens=3), size=size, distinct=7)
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
    alone = Drawn(medium="image", per_request=Fixed(tokens=2), size=size).on(trace(), seed=1)
    assert sorted(content for each in images_of(alone) for *_, content in each) == list(range(6))


SPEECH = """arrival_s,prompt_tokens,output_tokens,audio_s
0.0,700,5,12.5#3 4
10.0,100,5,
20.0,1300,5,0.2505 12.5#3
"""


def test_clips_of_speech_are_read_written_taken_and_joined(tmp_path: Path) -> None:
    (tmp_path / "speech.csv").write_text(SPEECH)
    found = read_trace(tmp_path / "speech.csv")
    found.to_csv(tmp_path / "again.csv")
    for each in (found, read_trace(tmp_path / "again.csv")):
        clips = [each.media_of("audio", row) for row in range(3)]
        assert [[ms for ms, _ in clip] for clip in clips] == [[12_500, 4000], [], [250, 12_500]]
        contents = [content for clip in clips for _, content in clip]
        assert (contents[0], contents[3], len(set(contents))) == (3, 3, 3)
    assert found.take([2]).media_of("audio", 0) == found.media_of("audio", 2)
    twice = concat([found, trace(1), found], shared_ids=True)
    assert twice.media_of("audio", 4) == twice.media_of("audio", 0)[:1] + twice.media_of("audio", 4)[1:]
    assert found.describe()["audio"]["max"] == 2


@pytest.mark.parametrize("cell", ["12s", "1.", ".5", "-3", "0", "1e3", "3#", "3#x"])
def test_a_cell_that_is_no_clip_is_refused(cell: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(f"arrival_s,prompt_tokens,output_tokens,audio_s\n0,5,5,\n1,5,5,{cell}\n")
    with pytest.raises(ValueError, match=r"expected clips .* SECONDS|audio_ms.*at least 1"):
        read_trace(tmp_path / "bad.csv")


@pytest.mark.parametrize(("column", "first", "other"), [("audio_s", "12.5#3", "4#3"), ("images", "64x48#3", "64x49#3")])
def test_equal_ones_of_two_sizes_are_refused_with_their_line_and_column(
    column: str, first: str, other: str, tmp_path: Path
) -> None:
    rows = f"0,50,5,{first}\n1,50,5,\n2,50,5,{first} {other}\n"
    (tmp_path / "bad.csv").write_text(f"arrival_s,prompt_tokens,output_tokens,{column}\n{rows}")
    with pytest.raises(ValueError, match=rf"bad.csv, line 4, column {column}: expected .*; got '{first} {other}'"):
        read_trace(tmp_path / "bad.csv")


def test_popular_clips_are_asked_for_by_a_power_of_their_rank() -> None:
    drawn = Drawn(medium="audio", per_request=Fixed(tokens=1), size={"ms": Fixed(tokens=900)}, distinct=50, zipf=1.0)
    content = drawn.on(trace(40_000), seed=5).audio_content
    assert content is not None
    shares = np.bincount(content, minlength=50) / 40_000
    expected = 1 / np.arange(1, 51)
    # Five standard deviations of a share of a half, at most: a false alarm in a million.
    assert np.abs(shares - expected / expected.sum()).max() < 5 * 0.5 / 200
