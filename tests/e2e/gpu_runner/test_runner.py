# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2, ahead of the tokens: says what V1 says, and keeps what the reference keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.beside import tiny_granite4, tiny_lfm2
from tests.e2e.gpu_runner.job import SETTINGS, Job, Outcome, on_v1
from tests.e2e.gpu_runner.process import OtherProcess
from tests.e2e.harness import (
    CHARACTERS,
    engine,
    generate,
    tiny_gemma3,
    tiny_llama,
    tiny_opt,
    token_ids,
)

PROMPTS = [CHARACTERS[n : n + n] for n in (40, 5, 17, 33)]
"""Longer than a chunk, shorter than a page, of two pages, of one token more."""
DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
MODELS = {"llama": lambda folder: tiny_llama(folder, 6, 2), "opt": tiny_opt}


def job_of(model: str, options: dict[str, Any], policy: str = "h2o", **changes: Any) -> Job:
    """Followed by the reference, two steps in flight."""
    settings = {**SETTINGS, **changes.pop("settings", {})}
    options = {"kernels": "torch", **options}
    job = Job(model, policy, options, PROMPTS, settings=settings, follow=True)
    return replace(job, **changes)


def assert_followed(outcome: Outcome, in_flight: int = 2) -> None:
    """Every retained set and victim was the reference's, while vLLM ran ahead of the tokens."""
    assert outcome.in_flight == in_flight
    assert outcome.compared > 0
    assert outcome.victims > 0
    assert outcome.ties <= max(outcome.victims / 1000, 1)
    assert outcome.max_error < 1e-4


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_100_percent_is_stock_vllm(
    make: Callable[[Path], str], v2: OtherProcess, tmp_path: Path
) -> None:
    """Prompts in chunks, among other requests' tokens."""
    model = make(tmp_path)
    ours = v2.run(job_of(model, {"budget": 1.0}, follow=False))
    assert ours.in_flight == 2
    with engine(model, **{**SETTINGS, "block_size": 32, "async_scheduling": False}) as llm:
        assert ours.tokens == token_ids(generate(llm, PROMPTS, max_tokens=12))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_small_budget(make: Callable[[Path], str], v2: OtherProcess, tmp_path: Path) -> None:
    """Requests come and end in turn, so that rows of the batch are not those of the table."""
    job = job_of(make(tmp_path), {"budget": 16}, record=True, arrivals=[0, 3, 4, 9])
    ours = v2.run(job)
    assert_followed(ours)
    theirs = on_v1(job)
    assert ours.tokens == theirs.tokens
    common = ours.held.keys() & theirs.held.keys()  # the chunks may be others
    assert len(common) >= 4 * 11
    assert all(ours.held[which] == theirs.held[which] for which in common)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_second_reading(make: Callable[[Path], str], v2: OtherProcess, tmp_path: Path) -> None:
    """The model reads prompts again after a step: their tokens are in vLLM's own table."""
    options = {"budget": 16, "score": "reconstruction", "observation_window": 4, "split": "layers"}
    assert_followed(v2.run(job_of(make(tmp_path), options, "h2o2", arrivals=[0, 3, 4, 9])))


@pytest.mark.parametrize("depth", [2, 3])
def test_first_token_is_on_the_host_before_its_prompt_is_packed(
    depth: int, v2: OtherProcess, tmp_path: Path
) -> None:
    """With other steps in flight; three are as many as two stages have."""
    options = {"budget": 16, "score": "reconstruction", "observation_window": 4}
    job = job_of(tiny_llama(tmp_path, 4, 4), options, "h2o2", arrivals=[0, 3, 4, 9], depth=depth)
    prompts = [CHARACTERS[n : n + 50] for n in range(0, 200, 50)]
    ours = v2.run(replace(job, prompts=prompts))
    assert_followed(ours, in_flight=depth)
    assert ours.known == {str(index): tokens[0] for index, tokens in enumerate(ours.tokens)}
    theirs = on_v1(replace(job, prompts=prompts, depth=0))
    assert ours.tokens == theirs.tokens and theirs.known == ours.known


def test_one_step_at_a_time(v2: OtherProcess, tmp_path: Path) -> None:
    """Without asynchronous scheduling."""
    job = job_of(tiny_llama(tmp_path, 4, 4), {"budget": 16}, settings={"async_scheduling": False})
    ours = v2.run(job)
    assert_followed(ours, in_flight=1)
    assert ours.tokens == on_v1(job).tokens


def test_aborted_request_leaves_others_as_they_were(v2: OtherProcess, tmp_path: Path) -> None:
    """One in the middle of its prompt, one of its text: the others are none the wiser."""
    job = job_of(tiny_llama(tmp_path, 4, 4), {"budget": 16}, aborts={"0": 1, "2": 7})
    prompts = [CHARACTERS[:100], *PROMPTS[1:]]
    ours = v2.run(replace(job, prompts=prompts))
    assert_followed(ours)
    theirs = on_v1(replace(job, prompts=prompts, aborts={}))
    assert ours.tokens[0] == []
    assert 0 < len(ours.tokens[2]) < 12
    for mine, all_of_it in zip(ours.tokens, theirs.tokens, strict=True):
        assert mine == all_of_it[: len(mine)]
    assert [len(ours.tokens[i]) for i in (1, 3)] == [12, 12]


def test_preempted_request_restarts_with_tokens_in_flight(v2: OtherProcess, tmp_path: Path) -> None:
    """A pool too small for all: some are thrown out while their tokens are not known yet."""
    job = job_of(tiny_llama(tmp_path, 4, 4), {"budget": 64}, max_tokens=20)
    job.settings["num_gpu_blocks_override"] = 12
    job = replace(job, prompts=[CHARACTERS[n : n + 40] for n in range(4)])
    ours = v2.run(job)
    assert ours.preemptions > 0 and ours.in_flight == 2
    assert ours.compared > 0 and ours.max_error < 1e-4
    del job.settings["num_gpu_blocks_override"]
    assert ours.tokens == on_v1(job).tokens


def test_packed_under_pressure(v2: OtherProcess, tmp_path: Path) -> None:
    """Requests that grew are packed in the middle of their text, while a step is in flight."""
    job = job_of(tiny_llama(tmp_path, 4, 4), {"budget": 32, "eviction": "pressure"}, max_tokens=24)
    job.settings["num_gpu_blocks_override"] = 12
    ours = v2.run(replace(job, prompts=[CHARACTERS[n : n + 30] for n in range(4)]))
    assert_followed(ours)


def test_found_in_the_prefix_cache(v2: OtherProcess, tmp_path: Path) -> None:
    """Prompts whose first pages others read: a hit is a cold run."""
    window = {"budget": 32, "observation_window": 12}
    prompts = [CHARACTERS[:50], CHARACTERS[:50], [*CHARACTERS[:32], *CHARACTERS[60:85]]]
    caching = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
    job = job_of(tiny_llama(tmp_path, 6, 2), window, "snapkv", settings=caching)
    ours = v2.run(replace(job, prompts=prompts, arrivals=[0, 100, 101]))
    assert_followed(ours)
    assert ours.cached == [0, 32, 32]
    job.settings["enable_prefix_caching"] = False
    assert ours.tokens == on_v1(replace(job, prompts=prompts)).tokens


@pytest.mark.parametrize(
    ("split", "num_new", "is_hybrid"), [("none", 9, False), ("heads", 2, False), ("none", 9, True)]
)
def test_second_turn_continues_from_the_first(
    split: str, num_new: int, is_hybrid: bool, v2: OtherProcess, tmp_path: Path
) -> None:
    """A second turn that begins with the first one's pages, though its last token came late."""
    own = {"budget": 16, "continuation": True, "split": split}
    job = job_of(tiny_granite4(tmp_path) if is_hybrid else tiny_llama(tmp_path, 4, 4), own)
    if is_hybrid:
        del job.settings["block_size"]
    first = on_v1(replace(job, prompts=PROMPTS[:1])).tokens[0]
    second = [*PROMPTS[0], *first, *CHARACTERS[:num_new]]
    ours = v2.run(replace(job, prompts=[PROMPTS[0], second, second], arrivals=[0, 100, 100]))
    assert_followed(ours)
    assert ours.tokens[0] == first and ours.tokens[1] == ours.tokens[2]
    assert ours.cached == [0, 51, 51]


def test_next_to_sliding_windows(v2: OtherProcess, tmp_path: Path) -> None:
    """Two block tables, of which the policy takes its own; vLLM's kernel clears their pages."""
    job = job_of(tiny_gemma3(tmp_path), {"budget": 32})
    del job.settings["block_size"]
    ours = v2.run(job)
    assert_followed(ours)
    assert ours.tokens == on_v1(job).tokens


@pytest.mark.parametrize("tiny", [tiny_granite4, tiny_lfm2])
def test_next_to_states(tiny: Callable[[Path], str], v2: OtherProcess, tmp_path: Path) -> None:
    """Metadata of a hybrid model does not name its rows, which are not in order of arrival."""
    job = job_of(tiny(tmp_path), {"budget": 32}, arrivals=[0, 3, 4, 9], max_tokens=40)
    del job.settings["block_size"]
    ours = v2.run(job)
    assert_followed(ours)
    if tiny is tiny_granite4:  # LFM2 is rotated otherwise in other batches: see test_hybrid.py
        assert ours.tokens == on_v1(job).tokens


def test_drafts_by_ngrams_equal_the_reference(v2: OtherProcess, tmp_path: Path) -> None:
    """By V2's own kernels for n-grams; vLLM schedules them one step at a time."""
    job = job_of(tiny_llama(tmp_path, 4, 4), {"budget": 16, "evict_every": 6}, max_tokens=20)
    job = replace(job, prompts=[[7, 8, 9, 10] * 5, [5, 6] * 4])
    job.settings["async_scheduling"] = False
    theirs = on_v1(job)
    job.settings["speculative_config"] = DRAFTS
    ours = v2.run(job)
    assert min(ours.accepted, ours.rejected) > 0
    assert ours.compared > 0 and ours.max_error < 1e-4
    assert ours.tokens == theirs.tokens
