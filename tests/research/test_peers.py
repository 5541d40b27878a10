# SPDX-License-Identifier: Apache-2.0
"""Peers are given the same work and bytes; the workers of others are not run here."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.quality.facts import facts
from benchmarks.quality.phrasings import CONFIRMATION
from benchmarks.smollm2 import model_dir
from research.peers.__main__ import answered, questions, row, table
from research.peers.environments import KVPRESS, Environment
from research.peers.job import BLOCK_SIZE, Job, Result, widths
from research.peers.sides import SIDES, Shape
from research.peers.step import Clock
from research.peers.with_vllm import SCORE_BYTES, blocks
from tests.house_rules import ROOT

RESULT = Result("engine 1", [[5, 6], [7, 8]], 2.0, 1.6, 1.5, 2, -1, 1000)


@pytest.mark.engine
@pytest.mark.slow
def test_quick_run_of_our_side_completes(tmp_path: Path) -> None:
    """Our side, through the same job and worker as the others."""
    command = [sys.executable, "-m", "research.peers", "throughput", "--quick"]
    done = subprocess.run(
        [*command, "--csv", str(tmp_path / "peers.csv")],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    log = tmp_path / "peers.log"
    assert done.returncode == 0, done.stderr[-2000:] + (log.read_text() if log.exists() else "")
    (found,) = csv.DictReader((tmp_path / "peers.csv").read_text().splitlines())
    assert (found["side"], found["requests"], found["output_len"]) == ("vLLM, h2o", "3", "16")
    assert found["budget"] == "96" and found["preempted"] == "0"
    assert 1 < float(found["mean_sequences"]) <= int(found["peak_sequences"]) <= 3
    assert 0 < int(found["peak_bytes"]) <= int(found["pool_bytes"])
    assert 0 < float(found["tokens_per_s"]) <= 1.1 * float(found["tokens_per_processor_s"])
    assert int(found["peak_rss_mib"]) > 500


def test_the_same_bytes() -> None:
    """A pool is as many bytes whoever has it: ours holds fewer tokens by its scores."""
    shape = Shape.of(model_dir("float32"))
    assert shape.bytes_per_token == 30 * 3 * 64 * 2 * 4
    pool = 10 * BLOCK_SIZE * shape.bytes_per_token
    job = Job("", [[1]], 1, pool, shape.bytes_per_token, 1, {})
    assert blocks(job, 0) == 10
    ours = blocks(job, shape.kv_heads)
    assert ours == 9
    slot = shape.bytes_per_token + shape.kv_heads * SCORE_BYTES
    assert ours * BLOCK_SIZE * slot <= pool < (ours + 1) * BLOCK_SIZE * slot


def test_the_same_budget() -> None:
    """Each engine is told its budget in its own way; those that keep everything are not."""
    assert SIDES["OpenVINO, SUM"].options_for(96)["eviction"]["max_cache_size"] == 96
    assert SIDES["vLLM, h2o"].options_for(96)["kv_policy_config"] == {"budget": 96}
    for name in ("OpenVINO", "vLLM", "transformers"):
        assert SIDES[name].options_for(96) == dict(SIDES[name].options)


def test_job_and_result_survive_json(tmp_path: Path) -> None:
    """A worker's job and result survive the file."""
    job = Job("folder", [[1, 2]], 3, 4, 5, 6, {"a": None})
    job.write(tmp_path / "job.json")
    assert Job(**json.loads((tmp_path / "job.json").read_text())) == job
    (tmp_path / "result.json").write_text(json.dumps(asdict(RESULT)))
    assert Result.read(tmp_path / "result.json") == RESULT


def test_steps_without_a_token_are_a_prompts() -> None:
    """Steps that gave no token are a prompt's."""
    assert widths([0, 2, 0, 4]) == (3.0, 4)
    assert widths([0]) == (0.0, 0)


def test_row_leaves_unsaid_figures_empty() -> None:
    """Tokens per second are of all requests; what an engine does not say is empty."""
    found = row("answers", SIDES["OpenVINO, SUM"], (RESULT, 700), 2000, 96, 10, [True, False])
    assert (found["tokens_per_s"], found["preempted"]) == (2.0, "")
    assert (found["found"], found["each"], found["peak_rss_mib"]) == (1, "1 0", 700)
    assert "| answers | OpenVINO, SUM | 96 | 2.0 | 2.5 | 1.5 |" in table([found])


@pytest.mark.slow
def test_an_answer_says_the_fact() -> None:
    """From its first token on; another context's fact does not count."""
    tokenizer = Tokenizer.from_file(str(model_dir("float32") / "tokenizer.json"))
    task = facts(tokenizer, CONFIRMATION, "asked_now", count=2, length=256)
    prompts, rests = questions(task)
    for prompt, rest, own in zip(prompts, rests, task.facts, strict=True):
        assert own[0].fill(own[0].phrasing.asked) in tokenizer.decode(prompt)
        whole = f"{own[0].fill(own[0].phrasing.lead)} {own[0].value}"
        assert tokenizer.decode([*prompt, *rest]).endswith(whole)
        assert tokenizer.decode(rest[1:]).strip() == own[0].value
    said = [[*rest, 5] for rest in rests]
    assert answered(rests, replace(RESULT, tokens=said)) == [True, True]
    assert answered(rests, replace(RESULT, tokens=said[::-1])) == [False, False]


def test_a_clock_counts_a_part_once() -> None:
    """A part's time excludes the parts that it calls."""
    clock = Clock()
    inner = clock.timed("inner", lambda: sum(range(200_000)))
    outer = clock.timed("outer", lambda: [inner(), inner()])
    assert outer() == [sum(range(200_000))] * 2
    assert 0 <= clock.spent["outer"] < clock.spent["inner"]


def test_an_environment_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed where the versions are those that it was made from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = Environment("e", ("a==1", "b==2"))
    environment.folder.mkdir(parents=True)
    (environment.folder / "requirements.txt").write_text("a==1\nb==2")
    assert environment.python() == tmp_path / "vllm-h2o" / "peers" / "e" / "bin" / "python"
    assert all("==" in part or part == "tokenizers" for part in KVPRESS.requirements)
