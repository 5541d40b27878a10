"""The bench in its quick form: real model, real texts, real engine; orders, not digits."""

from __future__ import annotations

import pytest

from benchmarks.quality.__main__ import QUICK, Bench
from benchmarks.quality.texts import TextsUnavailableError, archive
from demo.smollm2 import model_dir


@pytest.mark.timeout(1200)
def test_orders() -> None:
    """What is kept matters: far from a window, far from chance; at 100 %, nothing changes."""
    try:
        archive()
    except TextsUnavailableError as error:
        pytest.skip(str(error))
    bench = Bench(QUICK, model_dir("float32"), progress=False)
    rows = {row["policy"]: row for row in bench.rows()}
    above = {policy: row["nll_above_full"] for policy, row in rows.items()}
    assert above["full"] == 0
    for policy in ("h2o", "h2o_mean"):
        assert 0 < above[policy] < 0.25 * min(above["local"], above["random"]), above
    whole, _ = bench.judge("h2o", QUICK.length)
    full, _ = bench.judge("full", None)
    for ours, theirs in zip(whole, full, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_what_is_measured_comes_after_an_eviction() -> None:
    """Every scored token follows a prompt that is longer than the budget."""
    for share in QUICK.shares:
        assert share * QUICK.length < QUICK.prompt
