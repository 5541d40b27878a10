# SPDX-License-Identifier: Apache-2.0
"""Lines that the scheduler logs at its start: the schedule, and whether KV heads share slots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.config.cache import CacheDType

from tests.scheduler.harness import make_scheduler, vllm_config
from tests.scheduler.schedules import H2O2, PAGE, Option
from vllm_h2o.hooks import check_config
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.scheduler import scheduler

Start = Callable[..., str]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a scheduler with some options; returns its lines."""

    def started(*options: Option, cache_dtype: CacheDType = "auto") -> str:
        lines: list[str] = []
        config = vllm_config(20, 64, 8, "fcfs", False, options)
        config.cache_config.cache_dtype = cache_dtype
        check_config(config, KVPolicyConfig.required(config))
        monkeypatch.setattr(scheduler.logger, "info", lambda text, *args: lines.append(text % args))
        make_scheduler(config, 41, 4)
        return "\n".join(lines)

    return started


@pytest.mark.parametrize(
    ("options", "evicts"),
    [
        ((), "tokens (9 heavy, 10 recent, 0 sinks, 1 for the incoming token) = 5 pages of 4; the"),
        ((("evict_every", 6),), "6 for incoming tokens) = 7 pages of 4, and evicts 6 tokens at a"),
        (PAGE, "4 for incoming tokens) = 5 pages of 4, and evicts whole pages of 4 tokens; the"),
    ],
)
def test_start_names_a_schedule_that_is_not_the_default(
    start: Start, options: tuple[Option, ...], evicts: str
) -> None:
    """A user sees what a page or a number of tokens comes to."""
    assert evicts in start(*options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "h2o2: the KV heads of all layers share slots; numbers of slots are means.\n"),
        ((("split", "none"),), ""),
        ((("evict_every", 6),), "do not share slots, as they would without evict_every=6.\n"),
        ((("score", "combined"),), ""),
    ],
)
def test_start_tells_why_a_default_split_is_off(
    start: Start, options: tuple[Option, ...], says: str
) -> None:
    """Not where the user has switched it off."""
    text = start(*H2O2, ("score", "reconstruction"), *options)
    assert says in text and ("share slots" in text) is bool(says)


@pytest.mark.parametrize(
    ("options", "cache_dtype", "says"),
    [
        ((), "auto", ""),
        ((("merge", 0),), "auto", ""),
        ((("evict_every", 6),), "auto", "they cannot be merged with evict_every=6.\n"),
        ((), "fp8", "they cannot be merged with an fp8 KV cache.\n"),
    ],
)
def test_start_tells_why_a_default_merge_is_off(
    start: Start, options: tuple[Option, ...], cache_dtype: CacheDType, says: str
) -> None:
    """Named by the part of the configuration, or of the engine, that rules it out."""
    text = start(*H2O2, *options, cache_dtype=cache_dtype)
    assert says in text and ("are dropped" in text) is bool(says)


@pytest.mark.parametrize("score", ["window", "combined"])
def test_start_names_the_queries_that_rank(start: Start, score: str) -> None:
    """Where a prefix may be shared, those of a prompt's end, and the option that says so."""
    said = start(*H2O2, ("score", score))
    says = "ranked by the last 3 queries of a prompt, and by those after it: score=window,"
    assert (says in said) == (score == "window")


def test_start_says_where_caches_go(start: Start, tmp_path: Path) -> None:
    """To host memory, and from there to files."""
    said = start(("continuation", f"1,{tmp_path}:2"))
    assert ": 1 GiB of host memory keep " in said
    assert (
        f": 2 GiB of files in {tmp_path} take what memory drops; the least recently used go first."
        in said
    )
    assert "continuation=" not in start(("continuation", str(tmp_path)))
