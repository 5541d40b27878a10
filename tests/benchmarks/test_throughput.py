# SPDX-License-Identifier: Apache-2.0
"""The throughput bench runs through vLLM's own, stock and policy in turn. Nothing is timed here."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from benchmarks.gpu.card import processor
from benchmarks.gpu.course import parts
from benchmarks.gpu.running import run_part
from benchmarks.throughput import chart
from benchmarks.throughput.models import MODELS, write_tokenizer
from benchmarks.throughput.profiles import CPU, GPU, POLICIES, PRESSURE, QUICK, Profile, Side
from benchmarks.throughput.runs import ratio_of
from benchmarks.throughput.watch import Watch
from vllm_h2o.wire import PolicyStats

FREE = {
    "P3-4k",
    "P3-8k",
    "P4",
    "P4-tracked",
    "P6-100",
    "P6-20",
    "batch-32",
    "free-100",
    "free-tracked",
}
PROFILE = Profile("P", "", "smollm2", 64, 32, 4, (Side("h2o", 0.2), Side("stock vLLM")))


@pytest.mark.engine
@pytest.mark.slow
def test_throughput_quick_writes_both_sides(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One pair of real runs, as the course for GPUs runs them: the same work on both sides, the
    smaller pool of pages for h2o's.
    """
    (part,) = (part for part in parts(True, True, processor()) if part.kind == "throughput")
    assert run_part(part.name, [part], tmp_path, processor(), "cpu")
    with (tmp_path / "throughput-quick.csv").open() as file:
        ours, theirs = csv.DictReader(file)
    assert (ours["side"], theirs["side"]) == ("h2o", "stock vLLM")
    assert int(ours["pool_pages"]) <= int(theirs["pool_pages"]) == 320 // 32 + 1
    assert int(ours["preemptions"]) == 0 < int(theirs["preemptions"])
    assert float(ours["mean_sequences"]) > float(theirs["mean_sequences"])
    assert f"| {QUICK[0].id}: {QUICK[0].what} |" in capfd.readouterr().out


def test_tokenizer_of_a_shape_has_a_word_for_each_token(tmp_path: Path) -> None:
    """Prompts keep their length through text and back."""
    write_tokenizer(tmp_path, 300)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    token_ids = list(range(3, 300))
    assert tokenizer.encode(tokenizer.decode(token_ids), add_special_tokens=False) == token_ids


def test_profile_pools_have_the_same_memory() -> None:
    """h2o's pages are larger by scores and positions, so it is given fewer of them."""
    side = Side("h2o", 0.2, pool_tokens=3200)
    assert PROFILE.num_blocks(side, 256) == int(100 * 256 / 264) + 1
    assert PROFILE.num_blocks(replace(side, budget=None), 256) == 101
    assert PROFILE.num_blocks(replace(side, pool_tokens=None), 256) is None


@pytest.mark.parametrize(
    "profile", [*CPU, *GPU, *PRESSURE, *POLICIES], ids=lambda profile: profile.id
)
def test_profile_pool_holds_a_whole_sequence(profile: Profile) -> None:
    """Each side's pool holds the longest sequence, or vLLM would not start."""
    for side in profile.sides:
        blocks = profile.num_blocks(side, MODELS[profile.model].bytes_per_slot)
        assert blocks is not None
        longest = profile.max_model_len * (side.max_num_seqs or 1 if profile.id in FREE else 1)
        assert (blocks - 1) * profile.block_size >= longest


def test_watch_summarises_steps() -> None:
    """Steps at full width are timed; means are over steps that gave tokens."""
    watch = Watch()
    stats = SimpleNamespace(
        num_running_reqs=3,
        kv_cache_usage=0.5,
        running_lora_adapters={},
        spec_decoding_stats=SimpleNamespace(num_draft_tokens=4, num_accepted_tokens=3),
    )
    for generated, preempted in ((0, 0), (1, 0), (2, 1), (2, 0), (2, 0), (1, 0)):
        watch.record(
            stats,
            SimpleNamespace(num_generation_tokens=generated, num_preempted_reqs=preempted),
        )
    watch.record(None, None)
    watch.times = [0.0, 1.0, 3.0, 3.5, 4.25, 9.0]
    summary = watch.summary()
    assert summary["step_seconds"] == (0.5 + 0.75) / 2
    assert summary["mean_sequences"] == 8 / 5 and summary["preemptions"] == 1
    assert summary["peak_usage"] == 0.5 and summary["peak_sequences"] == 3
    assert (summary["drafted"], summary["accepted"]) == (24, 18)


def test_watch_counts_what_is_evicted() -> None:
    """And leaves it to those who show it."""
    watch = Watch()
    stats = SchedulerStats()
    for count in (3, 4):
        PolicyStats(count, 1, 2, 1, count - 1, 0, 5, 6, 7).put_into(stats.running_lora_adapters)
        watch.record(stats, IterationStats())
        assert PolicyStats.take_from(stats.running_lora_adapters) is not None
    watch.record(stats, IterationStats())
    summary = watch.summary()
    assert (summary["evicted_tokens"], summary["pressure_packs"]) == (7, 2)


def test_pressure_profiles_share_a_memory() -> None:
    """Three engines in one memory, which holds whole sequences with their scores."""
    for profile, num_seqs in zip(PRESSURE, (4, 8, 16, 32), strict=True):
        blocks = [profile.num_blocks(side, 256) for side in profile.sides]
        assert blocks[0] == blocks[2] == num_seqs * 1568 // 32 + 1
        options = [profile.options(side, 256) for side in profile.sides]
        assert ["pressure" in flags for flags in options] == [True, False, False]
        assert ["--kv-policy" in flags for flags in options] == [True, False, True]


def test_ratio_above_one_means_faster() -> None:
    """Above 1 where h2o is faster, whichever the figure."""
    fast, slow = ({"step_ms": s, "output_tokens_per_s": t} for s, t in ((2, 30), (4, 20)))
    assert ratio_of(PROFILE, fast, slow) == 1.5
    assert ratio_of(replace(PROFILE, figure="step"), fast, slow) == 2.0


def test_throughput_chart_has_a_bar_for_each_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profiles that have been run are named in words, and the title says what is better."""
    drawn: list[Any] = []
    save = chart.save

    def keep(figure: Any, target: Path) -> None:
        drawn.extend(figure.axes)
        save(figure, target)

    monkeypatch.setattr(chart, "save", keep)
    rows = tmp_path / "rows.csv"
    with rows.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["profile", "side", "machine", "step_ms", "output_tokens_per_s"])
        for side, speed in (("h2o", 30), ("stock vLLM", 20), ("h2o", 28), ("stock vLLM", 20)):
            writer.writerow(["P1", side, "here", 1, speed])
    chart.main(rows)
    (axes,) = drawn
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["32 requests of 512 + 1,024 tokens, memory for 4"]
    assert "higher is better" in axes.get_title(loc="left")
    assert (tmp_path / "rows.png").stat().st_size > 5000
    assert "<svg" in (tmp_path / "rows.svg").read_text()
