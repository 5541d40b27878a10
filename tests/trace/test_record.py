# SPDX-License-Identifier: Apache-2.0
"""Records equal the engine's pages, and the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.e2e.harness import CHARACTERS, Probe, engine, smollm2, tiny_llama, unlike_heads
from tests.e2e.oracle import Oracle, Where
from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.trace.record import NOTHING, Frame, merge, record, run, texts
from vllm_h2o.worker import recorder as worker_recorder
from vllm_h2o.worker.recorder import Recorder

pytestmark = pytest.mark.engine

PROMPT = CHARACTERS[:100]
GENERATED = 24
NUM_LAYERS, NUM_KV_HEADS = 2, 2
Held = dict[tuple[int, int], dict[int, float]]
"""(Layer, KV head) -> position -> score, or mass."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of two KV heads."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, 6, NUM_KV_HEADS)
    return unlike_heads(folder, NUM_KV_HEADS)


class Truth:
    """The reference's strips after each step that the worker reads."""

    def __init__(self, patch: pytest.MonkeyPatch, oracle: Oracle) -> None:
        self.steps: dict[int, Held] = {}
        self.masses: dict[int, Held] = {}
        self.oracle = oracle
        original = Recorder.add

        def add(recorder: Recorder, frame: dict[str, Any], due: bool) -> None:
            for view, steps in (("score", self.steps), ("mass", self.masses)):
                steps[frame["logical_len"]] = {
                    self._pair(where): self._held(head.strip, view)
                    for where, head in oracle.heads.items()
                }
            # Any executor can send it, to another process as well.
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(frame))
            assert sent == frame
            original(recorder, sent, due)

        patch.setattr(Recorder, "add", add)

    def _pair(self, where: Where) -> tuple[int, int]:
        return int(where[0].split(".")[2]), where[1]

    def _held(self, strip: Any, view: str) -> dict[int, float]:
        return dict(zip(strip.position.tolist(), getattr(strip, view).tolist(), strict=True))


def held(frame: Frame, view: str = "score") -> Held:
    """A frame in the form of the truth."""
    rows, there = (frame.position, getattr(frame, view)), frame.position != NOTHING
    return {
        (layer, head): dict(
            zip(*(own[layer, head, there[layer, head]].tolist() for own in rows), strict=True)
        )
        for layer in range(NUM_LAYERS)
        for head in range(NUM_KV_HEADS)
    }


OPTIONS: list[dict[str, Any]] = [
    {"budget": 32},
    {"evict_every": "page", "recent_ratio": 0.1, "budget": 80, "num_sink_tokens": 2},
    {"budget": 64, "score": "mean_squares", "split": "heads"},
    {"budget": 32, "merge": 0.2},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=["token", "page", "split", "merge"])
def recorded(
    request: pytest.FixtureRequest, model: str
) -> Iterator[tuple[list[Frame], list[Frame], Truth]]:
    """The frames of each step, those of each seventh in the same engine, and the truth."""
    settings = {"block_size": 16, "max_num_batched_tokens": 64}
    with engine(model, "h2o", request.param, **settings) as llm:
        with pytest.MonkeyPatch.context() as patch:
            truth = Truth(patch, Oracle(Probe(llm).scheduler).install(patch))
            layers, token_ids, frames = record(llm, PROMPT, every=1, max_tokens=GENERATED)
        assert layers == [0, 1]
        assert token_ids[: len(PROMPT)] == PROMPT
        assert llm.collective_rpc("take_recording") == [[]]
        _, again, fewer = record(llm, PROMPT, every=7, max_tokens=GENERATED)
        assert again == token_ids
        yield frames, fewer, truth


def test_record_agrees_with_the_reference_in_each_step(
    recorded: tuple[list[Frame], list[Frame], Truth],
) -> None:
    """The prompt's end and every token after it: the same positions, and the same scores."""
    frames, _, truth = recorded
    assert [frame.logical_len for frame in frames] == list(
        range(len(PROMPT), len(PROMPT) + GENERATED)
    )
    for frame in frames:
        expected, found = truth.steps[frame.logical_len], held(frame)
        assert found.keys() == expected.keys()
        for pair, scores in found.items():
            assert scores.keys() == expected[pair].keys()
            assert [*scores.values()] == pytest.approx(
                [expected[pair][position] for position in scores], rel=1e-3, abs=1e-5
            )
        assert ((np.diff(frame.position) > 0) | (frame.position[..., 1:] == NOTHING)).all()
        if frame.mass is not None:
            assert held(frame, "mass") == truth.masses[frame.logical_len]
        lengths = {len(scores) for scores in found.values()}
        assert (len(lengths) > 1) is truth.oracle.scheduler.policy_config.splits
    assert len({frozenset(scores) for scores in held(frames[-1]).values()}) > 1
    last = frames[-1].mass
    assert (last is not None and bool(last.max() > 1)) is (truth.oracle.num_merged > 0)


def at_the_prompts_end(model: str, policy: str, options: dict[str, Any]) -> Frame:
    """The record of a prompt in two chunks, when survivors were packed."""
    with engine(model, policy, options, block_size=16, max_num_batched_tokens=64) as llm:
        return record(llm, PROMPT, every=1, max_tokens=2)[2][0]


def test_record_scores_are_sums_of_attention(model: str) -> None:
    """The terms of a token come to its score, and what attention gave is its score without them."""
    options = {"budget": 32, "observation_window": 16, "split": "none"}
    frame = at_the_prompts_end(model, "h2o2", options)
    assert [*frame.terms] == ["attention", "second pass", "observation window"]
    terms = np.stack([*frame.terms.values()])
    assert terms.shape == (3, NUM_LAYERS, NUM_KV_HEADS, len(PROMPT))
    summed = np.take_along_axis(terms.sum(axis=0), frame.position, axis=-1)
    assert summed == pytest.approx(frame.score, rel=1e-4)
    assert (terms > -1e-5).all() and (terms.max(axis=(1, 2, 3)) > 0.01).all()
    plain = at_the_prompts_end(model, "h2o", {"budget": 32, "score": "mean_squares"})
    assert [*plain.terms] == ["attention"]
    attention = np.take_along_axis(frame.terms["attention"], plain.position, axis=-1)
    assert attention == pytest.approx(plain.score, rel=1e-4)


def test_record_and_worker_use_one_word_for_no_token() -> None:
    """The worker's and the trace's."""
    assert worker_recorder.NOTHING == NOTHING


def test_record_of_every_kth_step_has_fewer_frames(
    recorded: tuple[list[Frame], list[Frame], Truth],
) -> None:
    """Each seventh, each step that compacts, and the last, though it is not due."""
    frames, fewer, _ = recorded
    lengths = [frame.logical_len - len(PROMPT) for frame in fewer]
    compacting = [
        at for at in range(1, GENERATED)
        if frames[at].position.shape[2] < frames[at - 1].position.shape[2]
    ]  # fmt: skip
    assert lengths == sorted({0, 1, 8, 15, 22, 23, *compacting})
    for frame in fewer:
        whole = frames[frame.logical_len - len(PROMPT)]
        assert (frame.position == whole.position).all()
        assert (frame.score == whole.score).all()


def part(layers: list[int], first_head: int, numbers: np.ndarray) -> dict[str, Any]:
    """Make one rank's record: [layers, heads, kept] numbers, as positions and as scores."""
    return {
        "request_id": "0",
        "logical_len": 9,
        "layers": layers,
        "first_head": first_head,
        "num_kv_heads": numbers.shape[1],
        "positions": numbers.astype(np.int32).tobytes(),
        "scores": numbers.astype(np.float32).tobytes(),
        "terms": {"attention": np.full((*numbers.shape[:2], 9), layers[0], "f4").tobytes()},
        "masses": b"",
    }


def test_record_of_ranks_is_joined() -> None:
    """Two pipeline ranks of four tensor ranks each, which have two KV heads between them."""
    rng = np.random.default_rng(0)
    whole = np.stack([rng.permutation(9)[:5] for _ in range(6)]).reshape(3, 2, 5)
    ranks = [
        [part(layers, head, whole[layers, head : head + 1])]
        for layers in ([0, 1], [2])
        for head in (0, 0, 1, 1)
    ]
    layers, (frame,) = merge(ranks)
    assert layers == [0, 1, 2]
    assert frame.logical_len == 9
    assert (frame.position == np.sort(whole)).all()
    assert (frame.score == np.sort(whole)).all()
    assert frame.terms["attention"].shape == (3, 2, 9)
    assert frame.terms["attention"][:, 1, 8].tolist() == [0, 0, 2]


def test_record_by_age_shows_means() -> None:
    """A mean is over the queries that came since the token, its own among them."""
    frame = Frame(10, np.array([[[0, 4, 9]]]), np.array([[[5.0, 3.0, 1.0]]], dtype=np.float32))
    assert frame.ranked_by_age().score.tolist() == [[[0.5, 0.5, 1.0]]]


def test_record_texts_join_to_the_whole() -> None:
    """Joined, the pieces are the text, characters of several tokens included."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    text = "  A café — <b>日本</b> 🙂\n\n\tend"
    token_ids = tokenizer(text)["input_ids"]
    pieces = texts(tokenizer, token_ids)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == text
    assert "" in pieces


ARGUMENTS: dict[str, Any] = {
    "every": None,
    "temperature": 0.0,
    "max_model_len": None,
    "block_size": 16,
    "dtype": "auto",
}


def test_record_of_a_prompt_that_does_not_fit_is_refused() -> None:
    """More tokens than the sequence may have: said before an engine starts."""
    arguments = {**ARGUMENTS, "max_model_len": 64}
    expected = "a trace of 2 prompt tokens and 100 more is not supported: a sequence may have 64"
    with pytest.raises(ConfigError, match=expected):
        run(smollm2(), "Hello there", KVPolicyConfig(), max_tokens=100, **arguments)


def test_record_without_a_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    """A model whose folder has none."""
    with pytest.raises(UnsupportedError, match="needs the model's tokenizer"):
        run(model, "Hello", KVPolicyConfig(), max_tokens=4, **ARGUMENTS)
