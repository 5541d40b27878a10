# SPDX-License-Identifier: Apache-2.0
"""The demonstration's bars, and an engine of it that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

import demo.__main__ as program
from demo.bars import bars, picture, sampled
from demo.generate import Step

STEPS = [Step(seconds, 4, 2, 8, largest) for seconds, largest in ((1.0, 2), (2.0, 4), (4.0, 8))]


def test_bars_fill_eighths_of_lines() -> None:
    """Nothing, an eighth of a line, a line and a half, all."""
    assert bars([0, 1, 12, 16], 16, height=2) == ["  ▄█", " ▁██"]


def test_bars_of_nothing_are_empty() -> None:
    """No value fills a line where none is above 0."""
    assert bars([0, 0], 0, height=1) == ["  "]


def test_sampled_takes_the_step_that_was_running() -> None:
    """After the last step there is nothing."""
    assert sampled(STEPS, "largest", 8.0, 8) == [2, 4, 8, 8, 0, 0, 0, 0]


def test_picture_has_one_scale_and_fits_the_width() -> None:
    """Each engine's largest value stands after its bars, which end when it ends."""
    longer = [*STEPS, Step(8.0, 4, 2, 8, 1)]
    lines = picture([("stock", STEPS), ("h2o", longer)], 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1] == "pages of the largest sequence, over 8 seconds"
    stock, h2o = lines[4], lines[7]
    assert stock.startswith("stock  ") and stock.endswith(" 8")
    assert h2o.startswith("h2o    ") and len(h2o.rsplit(" ", 1)[0]) > len(
        stock.split(" 8")[0].rstrip()
    )


@pytest.mark.engine
@pytest.mark.slow
def test_engine_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it said is in the log."""
    monkeypatch.setattr(program, "LOG", tmp_path / "log")
    with pytest.raises(program.EngineError, match="status 1"):
        list(program.lines_of(str(tmp_path / "nowhere"), None))
    assert "nowhere" in (tmp_path / "log").read_text()
