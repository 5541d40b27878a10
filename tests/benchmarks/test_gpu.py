# SPDX-License-Identifier: Apache-2.0
"""The checks for a GPU run here, interpreted, at small sizes."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import kernels, latency
from benchmarks.gpu.__main__ import (
    Part,
    Report,
    check_kernels,
    holds,
    main,
    parts,
    run_all,
    run_part,
)
from benchmarks.gpu.engines import Check, apart
from benchmarks.gpu.retained import differing, kept_by_reference
from tests.e2e.harness import CHARACTERS, engine, tiny_llama
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.trace.record import record

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("size", kernels.SMALL, ids=str)
def test_kernels_at_small_sizes_hold(size: kernels.Size) -> None:
    """Decode, prompts, terms of a ranking, and packing."""
    checks = list(check_kernels(CPU, size))
    assert len(checks) == 32 and all(map(holds, checks))


def test_check_of_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does nothing fails the outputs, the scores and the positions."""
    monkeypatch.setattr(TritonKernels, "decode", lambda *_: None)
    failed = [check[0] for check in kernels.check_decode(kernels.SMALL[0], CPU) if not holds(check)]
    assert failed[:3] == ["output", "score, relative", "positions that differ"]


def test_report_of_a_check_that_raises_goes_on(tmp_path: Path) -> None:
    """Checks before it are kept, and checks after it still run."""

    def breaks() -> Iterator[Check]:
        yield "a", 0.0, 0.0
        raise OutOfResources(409600, 232448, "shared memory")

    report = Report("m", tmp_path)
    report.run("first", breaks)
    report.run("second", lambda: [("b", math.nan, 1.0)])
    with (tmp_path / "gpu-checks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ["a", "first: OutOfResources", "b"]
    assert [row["holds"] for row in rows] == ["1", "0", "0"]


def nothing(*_: object) -> Iterator[Check]:
    """The action of a part that its own process looks up by name."""
    yield from ()


@pytest.mark.slow
def test_run_all_ends_parts_that_hang_or_crash(tmp_path: Path) -> None:
    """One that hangs and one that dies fail alone; when the time is over nothing goes on."""
    out = ["--small", "--out", str(tmp_path)]
    whole = parts(small=True, every=False)[1]
    hangs, unknown = Part(whole.name, 1, nothing), Part("kernels: none such", 60, nothing)
    failed = run_all([hangs, unknown, whole], out, tmp_path, minutes=5)
    died = f"{unknown.name}: ended with status 1"
    assert failed == [f"{hangs.name}: ended after 1 seconds", died]
    assert run_all([whole], out, tmp_path, minutes=0) == []
    (late := tmp_path / "late").mkdir()
    slow = Part(whole.name, 600, nothing)
    ended = run_all([slow, whole], ["--small", "--out", str(late)], late, minutes=1 / 60)
    assert ended == [f"{slow.name}: ended after 1 seconds"]
    with (tmp_path / "gpu-checks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["holds"] for row in rows] == ["0", "0"] + ["1"] * 32
    assert [row["what"] for row in rows[:2]] == failed


def test_parts_begin_with_the_most_telling() -> None:
    """Eight minutes reach engines, graphs and speed; every part has a name of its own."""
    for every in (False, True):
        names = [part.name for part in parts(small=False, every=every)]
        assert len(names) == len(set(names))
        kinds = [part.kind for part in parts(small=False, every=every)]
        first = list(dict.fromkeys(kinds))
        assert first == ["kernels", "engines", "graphs", "speed", "throughput", "latency"]


def test_run_part_returns_whether_it_holds(tmp_path: Path) -> None:
    """A part that fails says so by its status."""
    part = Part("kernels: a", 1, lambda *_: [("a", 1.0, 0.0)])
    assert not run_part("kernels: a", [part], tmp_path, small=True)


def test_apart_counts_tokens_after_the_first_difference() -> None:
    """Tokens after the first difference count, alike or not."""
    assert apart([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 0.375


@pytest.mark.engine
@pytest.mark.slow
def test_retained_sets_agree_with_the_reference(tmp_path: Path) -> None:
    """A model in float64 keeps the same after each step; with another window it does not."""
    folder, prompt = tiny_llama(tmp_path, 6, 2), CHARACTERS[:90]
    with engine(folder, "h2o", {"budget": 32}) as llm:
        _, token_ids, frames = record(llm, prompt, 1, 12)
    for recent, agrees in ((0.5, True), (0.3, False)):
        config = KVPolicyConfig(name="h2o", budget=32, recent_ratio=recent)
        budget = config.resolve(512, 32)
        kept = kept_by_reference(tmp_path, torch.float32, token_ids, len(prompt), budget)
        num_sets, share = differing(frames, kept)
        assert num_sets == 12 * 2 * 2
        assert (share == 0) is agrees


@pytest.mark.slow
def test_latencies_at_small_sizes_are_measured() -> None:
    """Two servers, one after the other; each answers every request."""
    found = dict(latency.measure(latency.SMALL, 8.0, small=True))
    assert list(found) == ["stock vLLM", "h2o"]
    for figures in found.values():
        assert figures["completed"] == latency.SMALL.num_prompts
        assert 0 < figures["itl_p50_ms"] <= figures["itl_p99_ms"]
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_gpu_check_without_a_gpu_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No part runs, and nothing is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"finds no GPU\. [^\n]+$"):
        main()
    assert not (tmp_path / "out").exists()
