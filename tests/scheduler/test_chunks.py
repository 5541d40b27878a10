# SPDX-License-Identifier: Apache-2.0
"""Chunks that end for scores and for images: every prompt comes to its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from tests.scheduler.harness import Simulation, vllm_config
from tests.scheduler.schedules import H2O2, READ_AGAIN
from vllm_h2o.policy import Budget
from vllm_h2o.scheduler.block_manager import HeavyHitterManager
from vllm_h2o.scheduler.chunks import CutsChunks
from vllm_h2o.scheduler.ledger import Ledger
from vllm_h2o.scheduler.rules import Rules
from vllm_h2o.scheduler.state import RequestInfo

Chunk = tuple[int, int]


def _image(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


def _request(images: list[Chunk], prompt_len: int) -> SimpleNamespace:
    """A request with images, as far as vLLM's scheduler reads it."""
    features = [_image(f"image {at}", at, length) for at, length in images]
    return SimpleNamespace(
        request_id="r0",
        num_tokens=prompt_len,
        num_prompt_tokens=prompt_len,
        num_computed_tokens=0,
        mm_features=features,
        has_encoder_inputs=True,
        get_num_encoder_embeds=lambda index: images[index][1],
    )


def chunks(
    images: list[Chunk],
    prompt_len: int,
    batched: int,
    window: int,
    chunk: int = 0,
    cache: int = 2048,
    whole: bool = False,
) -> list[Chunk]:
    """[start, end) of each chunk, through vLLM's own code for images, in forty steps at the most.

    Args:
        images: (first token, tokens) of each.
        prompt_len: tokens.
        batched: of a step.
        window: of observation.
        chunk: tokens that score together in one chunk; 0: any number.
        cache: of the encoder.
        whole: whether images are not to be cut.

    """
    scheduler = object.__new__(CutsChunks)
    rules = Rules(observation_window=window, chunk=chunk)
    scheduler.ledger = Ledger(Budget(16, 7, 8, 0), 16, rules)
    scheduler.block_manager = object.__new__(HeavyHitterManager)
    scheduler.block_manager._entries = {}
    scheduler.scheduler_config = SimpleNamespace(disable_chunked_mm_input=whole)
    scheduler.is_encoder_decoder, scheduler.ec_connector = False, None
    scheduler.encoder_cache_manager = EncoderCacheManager(cache)
    scheduler.need_mamba_block_aligned_split, scheduler.num_prefill_lookahead = True, 0
    request = _request(images, prompt_len)
    found: list[Chunk] = []
    for _ in range(40):
        start = request.num_computed_tokens
        most = min(batched, prompt_len - start)
        asked = scheduler._mamba_block_aligned_split(request, most)
        seen, num_new, *_ = scheduler._try_schedule_encoder_inputs(request, start, asked, cache)
        for index in seen if num_new else ():
            scheduler.encoder_cache_manager.allocate(request, index)
        request.num_computed_tokens = end = start + num_new
        for index in list(scheduler.encoder_cache_manager.get_cached_input_ids(request)):
            if sum(images[index]) <= end:
                scheduler.encoder_cache_manager.free_encoder_input(request, index)
        if num_new:
            found.append((start, end))
        if end == prompt_len:
            break
    return found


@pytest.mark.parametrize(
    ("images", "prompt_len", "batched", "chunk", "whole"),
    [
        ([(5, 2040)], 2075, 2048, 0, True),
        ([(5, 1900)], 3000, 2048, 1793, True),
        ([(5, 576)], 621, 620, 600, True),
        ([(5, 576), (585, 576)], 1180, 1000, 0, False),
        ([(5, 1500), (1505, 1500)], 3100, 2048, 0, False),
        ([(5, 1500), (1505, 1500)], 3100, 2048, 1024, False),
    ],
)
def test_every_prompt_comes_to_its_end(
    images: list[Chunk], prompt_len: int, batched: int, chunk: int, whole: bool
) -> None:
    """One chunk follows the other, and the observation window lies within the last."""
    found = chunks(images, prompt_len, batched, 64, chunk, whole=whole)
    assert found[-1][1] == prompt_len and found[-1][0] <= prompt_len - 64
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    assert found[0][0] == 0 and len(found) > 1


def test_a_request_that_waits_for_the_encoder_holds_none_of_it() -> None:
    """Two requests, whose images each fit, do not wait for each other."""
    options = (("prefix_caching", True), ("name", "snapkv"), ("observation_window", 12))
    simulation = Simulation(vllm_config(12, 20, 8, "fcfs", False, options), 200, 1)
    scheduler = simulation.scheduler
    scheduler.encoder_cache_manager = EncoderCacheManager(20)
    scheduler.max_num_encoder_input_tokens = 20
    for number, name in enumerate(("r0", "r1")):
        prompt = [100 * number + token for token in range(1, 24)]
        simulation.pool.prompts[name] = tuple(prompt)
        simulation.count["add"] += 1
        scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
                pooling_params=None,
                mm_features=[_image(f"{name} {at}", at, size) for at, size in ((6, 8), (14, 6))],
                block_hasher=simulation.hasher,
            )
        )
    for _ in range(40):
        simulation.step()
    assert not scheduler.requests


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_step_with_tokens_read_again_stays_within_its_limit(policy: str) -> None:
    """A token counts once for each reading; requests that fit are read once; no decode waits."""
    limit, read = 24, 0
    config = vllm_config(12, limit, 6, policy, False, (*H2O2, READ_AGAIN))
    simulation = Simulation(config, 200, 1)
    scheduler = simulation.scheduler
    assert scheduler.ledger.rules.chunk == (limit - 5) // 2
    requests = [(9, 30), (50, 8), (6, 3), (47, 9), (20, 30)]
    for number in range(200):
        if number % 2 == 0 and number // 2 < len(requests):
            simulation.add(*requests[number // 2], -number)
        decoding = {i for i, state in scheduler.ledger.states.items() if not state.in_prompt}
        plans = simulation.step().residency_plan.requests
        again = sum(plan.num_new for plan in plans.values() if plan.may_reread)
        assert sum(plan.num_new for plan in plans.values()) + again <= limit
        assert decoding & scheduler.ledger.states.keys() <= plans.keys()
        read += again
    assert read >= 50 + 47 + 20 and simulation.num_free == simulation.num_total


@pytest.mark.parametrize(("batched", "chunks"), [(2048, [1024, 576]), (1500, [512] * 3 + [64])])
def test_chunk_read_again_ends_with_a_block(batched: int, chunks: list[int]) -> None:
    """Its size is half of a step's room in whole blocks, so no block is read in two parts."""
    rules = Rules(
        observation_window=30,
        chunk=batched // 2 // 256 * 256,
        reread_block=256,
        max_step_tokens=batched,
    )
    ledger, start, found = Ledger(Budget(16, 7, 8, 0), 16, rules), 0, list[int]()
    while start < 1600:
        found.append(ledger.align_chunk("r", start, min(batched, 1600 - start), 1600))
        start += found[-1]
    assert found == chunks
    assert ledger.align_chunk("r", 0, 100, 1600) == 0


def test_request_preempted_in_its_step_gives_room_for_two_readings_back() -> None:
    """A second prompt waits for the step's end, or until the first one has left the step."""
    rules = Rules(chunk=256, reread_block=256, max_step_tokens=700)
    ledger, info = Ledger(Budget(16, 7, 8, 0), 16, rules), RequestInfo(300)
    ledger.commit("a", ledger.preview("a", 0, 256, info), info)
    assert ledger.align_chunk("b", 0, 444, 300) == 0
    assert ledger.align_chunk("c", 0, 444, 90) == 90
    ledger.close("a")
    assert ledger.align_chunk("b", 0, 700, 300) == 256
    ledger.commit("b", ledger.preview("b", 0, 256, info), info)
    ledger.take_step({"b": 256})
    assert ledger.align_chunk("a", 0, 700, 300) == 256
