# SPDX-License-Identifier: Apache-2.0
"""The checks for a GPU run here, interpreted, at small sizes."""

from __future__ import annotations

import csv
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import course, expected, kernels, running, speed
from benchmarks.gpu.__main__ import KINDS
from benchmarks.gpu.card import Card, processor
from benchmarks.gpu.course import Part, check_kernels, parts
from benchmarks.gpu.engine import MAX_MODEL_LEN, options_of, parser_of
from benchmarks.gpu.engines import COMPARED, Check, apart, size_of
from benchmarks.gpu.report import PROFILES, Report, holds
from benchmarks.gpu.retained import differing, kept_by_reference
from benchmarks.gpu.running import Outcome, run_all, run_part
from benchmarks.soak.server import Server
from tests.benchmarks.standin import standing_in
from tests.e2e.forking import FORKING
from tests.e2e.harness import CHARACTERS, engine, tiny_llama
from tests.house_rules import ROOT
from tests.worker.varlen import Varlen
from vllm_h2o.kernels.triton.kernels import TritonKernels
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.trace.record import record
from vllm_h2o.worker.flash import FlashPrompt

CPU, HERE = torch.device("cpu"), processor()
H100 = Card("NVIDIA H100 80GB HBM3", 90, 85.5)
T4 = Card("Tesla T4", 75, 15.8)
SMALL = parts(small=True, every=True, card=HERE)
RUN = (
    "1/8, nothing compiled while it serves",
    "1/8, shared prefixes, graphs against eager",
    "1/8, read twice, graphs against eager",
)
LIKE_OTHERS = {f"engines: llama, {name}" for name in COMPARED if name not in RUN}
"""Parts that differ from the others by an option: each compiles a model's graph for a minute."""
ELSEWHERE = ("kernels", "throughput")
"""Kinds of parts that other tests run, here and in test_throughput.py."""


@pytest.mark.slow
@pytest.mark.parametrize("size", kernels.SMALL, ids=str)
def test_kernels_at_small_sizes_hold(size: kernels.Size) -> None:
    """Decode, prompts, terms of a ranking, and packing."""
    checks = list(check_kernels(CPU, size))
    assert len(checks) == 34 and all(map(holds, checks))


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

    report = Report(HERE, tmp_path)
    report.run("first", breaks)
    report.run("second", lambda: [("b", math.nan, 1.0)])
    with (tmp_path / "gpu-checks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["what"] for row in rows] == ["a", "first: OutOfResources", "b"]
    assert [row["holds"] for row in rows] == ["1", "0", "0"]


def nothing(*_: object) -> Iterator[Check]:
    """The action of a part that its own process looks up by name."""
    yield from ()


def checks_in(folder: Path) -> list[dict[str, str]]:
    """The rows of all checks."""
    with (folder / "gpu-checks.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_run_all_ends_parts_that_hang_or_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs and one that dies fail alone; the end of the time fails nothing."""
    arguments = ["--small", "--out", str(tmp_path)]
    whole = SMALL[1]
    unknown, dear = Part("kernels: none such", 60, nothing), Part("kernels: dear", 301, nothing)
    large = Part("kernels: large", 1, nothing, gigabytes=80)
    monkeypatch.setattr(Part, "limit", property(lambda part: 1 if part.seconds == 2 else 600))
    hangs = Part(whole.name, 2, nothing)
    card = replace(HERE, gigabytes=24.0)
    found = run_all([hangs, unknown, dear, large, whole], arguments, tmp_path, 5, card)
    hung, died = f"{hangs.name}: ended after 1 seconds", f"{unknown.name}: ended with status 1"
    assert found.failed == [hung, died]
    assert [line.partition(", and")[0] for line in found.not_run] == [
        "not run (takes about 301 s",
        f"not run (needs a card of 80 GB): {large.name}",
    ]
    rows = checks_in(tmp_path)
    assert [row["holds"] for row in rows] == ["0", "0"] + ["1"] * 34
    assert [row["what"] for row in rows[:2]] == found.failed
    (late := tmp_path / "late").mkdir()
    cut = run_all(
        [Part(whole.name, 0, nothing)], ["--small", "--out", str(late)], late, 1 / 60, card
    )
    assert cut == Outcome([], [f"not run (cut after 1 s: the time is over): {whole.name}"])


def test_run_all_fails_a_part_that_is_cut_after_a_check_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it found before it was cut counts."""

    def cut(*_: object) -> None:
        Report(HERE, tmp_path).add(("a", 1.0, 0.0))

    monkeypatch.setattr(running, "ended", cut)
    found = run_all([Part("kernels: a", 1, nothing)], [], tmp_path, 1, HERE)
    assert found.failed == ["kernels: a"] and "cut" in found.not_run[0]


@pytest.mark.parametrize("every", [False, True])
def test_parts_begin_with_the_most_telling(every: bool) -> None:
    """Eight minutes reach kernels, kept sets, a graph and the factor of throughput."""
    found = parts(small=False, every=every, card=H100)
    names = [part.name for part in found]
    assert len(names) == len(set(names))
    first = list(dict.fromkeys(part.kind for part in found))
    assert first == ["kernels", "engines", "graphs", "throughput", "speed", "latency"]
    assert set(first) == set(KINDS)
    begin = next(i for i, part in enumerate(found) if part.kind == "throughput")
    assert sum(part.seconds for part in found[: begin + 1]) < 8 * 60


@pytest.mark.parametrize("every", [False, True])
def test_parts_before_ampere_have_no_bfloat16(every: bool) -> None:
    """Sizes, engines and profiles take float16; a part takes longer than on a Hopper."""
    found = parts(small=False, every=every, card=T4)
    assert not [part.name for part in found if "bfloat16" in part.name]
    assert any("retained sets, float16" in part.name for part in found)
    assert len({part.name for part in found}) == len(found)
    fast = {part.name: part.seconds for part in parts(small=False, every=every, card=H100)}
    assert all(part.seconds > fast[part.name] for part in found if part.name in fast)


def test_run_part_returns_whether_it_holds(tmp_path: Path) -> None:
    """A part that fails says so by its status."""
    part = Part("kernels: a", 1, lambda *_: [("a", 1.0, 0.0)])
    assert not run_part("kernels: a", [part], tmp_path, HERE, "cpu")


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


TINY = kernels.Size(2, 24, 2, 1, 32, 16, torch.float32)


def test_comparisons_leave_the_host_alone() -> None:
    """Of a size of :data:`kernels.REAL`, scaled, the host holds fields and figures.

    What it holds grows with the requests alone, so that 4 GB suffice for the whole size.
    """
    real = kernels.REAL[0]
    scaled = replace(TINY, block_size=real.block_size)
    with standing_in() as device:
        torch.ones(8).numpy()
        assert device.on_host == 32  # what is made on the host counts
        assert all(map(holds, kernels.check_decode(scaled, torch.device("cuda"))))
        fewer, device.on_host = device.on_host, 0
        longer = replace(scaled, tokens=4 * scaled.tokens)
        assert all(map(holds, kernels.check_decode(longer, torch.device("cuda"))))
        assert device.on_host <= fewer
    assert fewer * real.requests < 4 << 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kernels", "graphs", "speed"])
def test_course_runs_on_a_device_that_stands_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every kind of part that needs a GPU and no engine, with FlashAttention's meaning."""
    tiny = [replace(TINY, tokens=tokens) for tokens in (24, 25)]
    monkeypatch.setattr(kernels, "ODD", tiny)
    monkeypatch.setattr(kernels, "REAL", tiny)
    monkeypatch.setattr(kernels, "LONG", replace(TINY, requests=1, tokens=40))
    monkeypatch.setattr(speed, "SIZES", tiny[:1])
    monkeypatch.setattr(speed, "seconds", partial(speed.seconds, repeats=1))
    monkeypatch.setattr(course, "flash", lambda *_: FlashPrompt(Varlen(), 3))
    known = dict.fromkeys(speed.PREDICTED, 0.125)
    monkeypatch.setattr("benchmarks.gpu.report.of_kernels", lambda *_: known)
    with standing_in():
        every = (part for part in parts(False, True, H100) if part.kind == kind)
        found = [part for part in every if "MLP" not in part.name]  # see test_mlp.py
        for part in (found[0], found[-1]):  # of a size, and of a long prompt
            assert run_part(part.name, [part], tmp_path, H100, "cuda"), part.name
    if kind == "speed":
        assert capsys.readouterr().out.count("(predicted 0.125)") == 2 * len(known)
        with (tmp_path / "gpu-kernels.csv").open(newline="") as file:
            row = next(csv.DictReader(file))
        assert all(float(row[f"{name}_predicted"]) == 0.125 for name in known)


@pytest.mark.parametrize("name", COMPARED)
def test_engines_that_are_compared_have_options_that_exist(name: str) -> None:
    """Every pair, also those that no test runs, has an engine's flags and a policy's options."""
    for options in COMPARED[name]:
        args = parser_of().parse_args(["out", "llama", *size_of(True), *options])
        asked = options_of(args)
        if "kv_policy" in asked:
            config = KVPolicyConfig(name=asked["kv_policy"], **asked["kv_policy_config"])
            config.check(MAX_MODEL_LEN, 32)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [part for part in SMALL if part.kind not in ELSEWHERE and part.name not in LIKE_OTHERS],
    ids=lambda part: part.name,
)
def test_course_runs_on_a_cpu(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of each kind with engines or servers, of a tiny model: it ends, and holds."""
    monkeypatch.setattr(Server, "vllm", FORKING)
    assert run_part(part.name, SMALL, tmp_path, HERE, "cpu")
    assert len(checks_in(tmp_path)) >= 1
    if part.kind == "latency":
        with (tmp_path / "gpu-latency.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["side"] for row in rows] == ["stock vLLM", "h2o"]
        for row in rows:
            assert 0 < float(row["itl_p50_ms"]) <= float(row["itl_p99_ms"])
            assert 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_p99_ms"])


def test_throughput_is_printed_beside_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The factor, a step's time and bytes of each side."""
    profile = PROFILES[course.FIRST]
    columns = "profile,side,output_tokens_per_s,step_ms,mean_sequences"
    sides = [f"{profile.id},{side.name},{30 - 10 * i},4,8" for i, side in enumerate(profile.sides)]
    (tmp_path / "throughput-gpu.csv").write_text("\n".join([columns, *sides]))
    done: Any = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert all(map(holds, Report(H100, tmp_path).throughput(profile, small=False)))
    predicted = expected.of_profile(H100, profile)
    said = capsys.readouterr().out
    assert f"ratio 1.5  (predicted {predicted['', 'ratio']:.3g})" in said
    assert f"step_ms 4  (predicted {predicted['h2o', 'step_ms']:.3g})" in said
    assert f"a step moves {predicted['stock vLLM', 'step_GB']:.3g} GB" in said


def test_predictions_of_kernels_are_found_by_size() -> None:
    """A decode by its batch, a prompt by its length; nothing of a card without a data sheet."""
    for size in speed.SIZES:
        found = expected.of_kernels(H100, size)
        assert {"decode_ms", "decode_of_copy", "decode_scoring_adds"} <= set(found)
        assert ("prompt_scoring_adds" in found) is (size.tokens == 2048)
        assert expected.of_kernels(T4, size) == {}


def said_by(*options: str, cwd: Path = ROOT) -> str:
    """What ``python -m benchmarks.gpu`` says where it cannot run, in a real process."""
    command = [sys.executable, *options, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_gpu_check_without_a_gpu_says_so_in_one_line() -> None:
    """No part runs."""
    assert not torch.cuda.is_available()
    (line,) = said_by().splitlines()
    assert "finds no GPU. Run it on a machine with one." in line


def test_gpu_check_without_torch_says_so_in_one_line() -> None:
    """A Python without packages: what is missing, and what to do."""
    (line,) = said_by("-S").splitlines()
    assert "has no torch and no triton and no vllm. Install vLLM" in line
    assert "make gpu-check PYTHON=" in line


def test_gpu_check_without_the_plugin_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Packages without the metadata of this one: engines would not know its options."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")  # an installation has metadata
    for name in ("torch", "triton", "vllm"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (line,) = said_by("-S", cwd=tmp_path).splitlines()
    assert "has vLLM without this plugin" in line and "pip install --no-deps ." in line
