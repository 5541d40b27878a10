# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: logits of tokens that are not there, in every set of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from tests.kernels.caches import SHAPE, copied, filled, number, prompt_chunks, same
from tests.kernels.decodes import KERNELS, compare_a_batch, slow_on_triton
from tests.kernels.harness import Layer, Shape
from tests.kernels.lives import SCALES, make_lives, merging, pool_size
from tests.kernels.native.cases import threads
from tests.kernels.one_head import HEAD_SIZE, SCALE, Inputs, causal, close, head, run
from tests.kernels.truth import Count, live
from vllm_h2o.kernels.batch import Scoring, StepTensors
from vllm_h2o.kernels.interface import Kernels
from vllm_h2o.kernels.reference import score_term
from vllm_h2o.kernels.sinks import softmax
from vllm_h2o.kernels.torch.kernels import TorchKernels
from vllm_h2o.kernels.torch.softmax import softmax as torch_softmax
from vllm_h2o.policy import Term
from vllm_h2o.policy.h2o2 import COMBINED

SINKS = torch.tensor([-200.0, -1.0, 0.0, 1.5, 3.0, 200.0])
"""Sinks of six query heads: none, some that matter, and one that takes all."""
ONE_OF_EACH: dict[str, Callable[[Shape], Kernels]] = {
    "torch": lambda shape: TorchKernels(),
    **dict(list(KERNELS.items())[:2]),  # Triton's, and the best build of the C++ ones
}


def with_a_token(inputs: Inputs, sinks: torch.Tensor) -> Inputs:
    """The same, and a first token without V whose logit is each head's sink: by more dimensions."""
    num_tokens, group, _ = inputs.query.shape
    one_hot = torch.eye(group, dtype=torch.float64).expand(num_tokens, group, group)
    first = pad(sinks[None] / SCALE, (HEAD_SIZE, 0))
    return Inputs(
        pad(torch.cat([inputs.query, one_hot], dim=-1), (0, 0, 0, 0, 1, 0)),
        torch.cat([first, pad(inputs.key, (0, group))]),
        pad(inputs.value, (0, 0, 1, 0)),
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("chunks", [[12], [1, 4, 7]])
def test_reference_sink_is_one_more_token(group: int, chunks: list[int]) -> None:
    """Outputs and scores are those of attention with one more token, which is not stored."""
    inputs, one = Inputs.draw(20, group), head(capacity=21, num_recent=10)
    sinks = one.sink_logits = torch.linspace(-1.0, 4.0, group, dtype=torch.float64)
    outputs, _ = run(one, inputs, chunks)
    wide = with_a_token(inputs, sinks)
    close(outputs, wide.attend(causal(21))[1:])
    given = wide.probabilities(causal(21))[1:, :, 1:].sum(dim=(0, 1))
    close(one.strip.score, given)
    assert given.sum() < 19 * group
    bare = run(head(capacity=21, num_recent=10), inputs, chunks)[0]
    assert (outputs - bare).abs().max() > 0.1


def test_a_term_of_the_reference() -> None:
    """The same of a term that is added when a prompt is stored."""
    inputs, one = Inputs.draw(20, 3), head(capacity=21, num_recent=10)
    sinks = torch.linspace(-1.0, 4.0, 3, dtype=torch.float64)
    run(one, inputs, [20])
    before = one.strip.score
    term = Term("window", "max", weight=0.3)
    score_term(inputs.query[-5:], one.strip, SCALE, term, by_age=True, sink_logits=sinks)
    given = with_a_token(inputs, sinks).probabilities(causal(21))[-5:, :, 1:].amax(dim=(0, 1))
    close(one.strip.score - before, 0.3 * (20 - torch.arange(20)) * given)


def test_softmax_with_a_sink_of_any_logit() -> None:
    """A sink takes all, nothing, or as much as a token of its logit."""
    logits = torch.tensor([[0.0, 1.0]] * 3, dtype=torch.float64)
    probs = softmax(logits, torch.tensor([1.0, 900.0, -900.0]))
    close(probs[0], torch.softmax(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64), 0)[:2])
    assert probs[1].tolist() == [0.0, 0.0]
    assert torch.equal(probs[2], torch.softmax(logits[2], 0))
    draw = torch.randn(6, 50)
    close(torch_softmax(draw.double(), SINKS.double()), softmax(draw.double(), SINKS))
    assert torch.equal(torch_softmax(draw, None), softmax(draw, None))


SCORINGS = [Scoring(), Scoring(power=2, by_age=True), Scoring(merge=0.15)]


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_decode_with_sinks_equals_torch(make: Callable[[Shape], Kernels], scoring: Scoring) -> None:
    """Outputs, scores and victims are the torch kernels', where strips are cut, too."""
    with threads(3):
        compare_a_batch(make, SHAPE, scoring, SINKS)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(power=0), Scoring(power=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_prefill_with_sinks_equals_torch(
    make: Callable[[Shape], Kernels], scoring: Scoring, dtype: torch.dtype
) -> None:
    """Outputs and scores of chunks; the head whose sink takes all returns zeros."""
    shape = replace(SHAPE, dtype=dtype)
    chunks, owned = prompt_chunks(shape, packs=False)
    theirs = filled(shape, owned + 1, seed=4)
    number(theirs, chunks)
    ours = copied(theirs, shape)
    torch.manual_seed(5)
    query, (key, value) = torch.randn(140, 6, 64).to(dtype), torch.randn(2, 140, 2, 64).to(dtype)
    outs = []
    for kernels, cache in ((TorchKernels(), theirs), (make(shape), ours)):
        out = torch.full(query.shape, 7.0)
        kernels.prefill(cache, chunks, StepTensors(query, key, value, out, 0.2, SINKS), scoring)
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 2e-3)
    assert (outs[1][chunks[0].tokens, 5] == 0).all()
    same(ours, theirs, owned)


@pytest.mark.parametrize("make", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("term", [Term("rotated", "sum"), *COMBINED.passes], ids=str)
@pytest.mark.parametrize("of_each", [False, True])
def test_term_scores_with_sinks_equal_torch(
    make: Callable[[Shape], Kernels], term: Term, of_each: bool
) -> None:
    """Scores of a term, with sinks of heads or of each query; they differ from those without."""
    chunks, owned = prompt_chunks(SHAPE, packs=False)
    chunks = [replace(c, first_window_query=max(c.num_tokens - 20, 0)) for c in chunks]
    chunks = [b for c in chunks for b in c.in_blocks(term, SHAPE.block_size)]
    theirs = filled(SHAPE, owned + 1, seed=8)
    number(theirs, chunks)
    ours, bare = copied(theirs, SHAPE), copied(theirs, SHAPE)
    torch.manual_seed(9)
    query = torch.randn(140, 6, 64)
    sinks = torch.where(SINKS < -100.0, 2.0, SINKS)  # by maximum the head without one wins
    sinks = sinks + torch.randn(140, 6) if of_each else sinks
    tensors = StepTensors(query, query, query, query, 0.2, sinks)
    TorchKernels().score_term(theirs, chunks, tensors, term, by_age=True)
    make(SHAPE).score_term(ours, chunks, tensors, term, by_age=True)
    same(ours, theirs, owned)
    tensors = replace(tensors, sink_logits=None)
    TorchKernels().score_term(bare, chunks, tensors, term, by_age=True)
    assert (bare.score - theirs.score).max() > 0.01


LIVES = {
    # name: (policy, shape, options, splits)
    "h2o": ("h2o", Shape(2, 3, 64, 16), (), False),
    "one query head": ("h2o", Shape(2, 1, 64, 16), (), False),
    "merge": ("h2o", Shape(2, 3, 64, 16), merging(0.15), False),
    "float8": ("h2o", Shape(2, 3, 64, 16, float8=torch.float8_e4m3fn, scales=SCALES), (), False),
    "unequal heads": ("h2o", Shape(3, 3, 32, 8), (("score", "mean"), ("split", "heads")), True),
    "streaming": ("streaming", Shape(1, 2, 64, 16), (), False),
}


@slow_on_triton(ONE_OF_EACH)
@pytest.mark.parametrize("name", LIVES)
def test_requests_with_sinks_equal_the_reference(
    name: str, make: Callable[[Shape], Kernels]
) -> None:
    """Retained tokens, scores and outputs are the reference's after every step."""
    policy, shape, options, splits = LIVES[name]
    shape, count = replace(shape, has_sinks=True), Count()
    rows = [(48, 8, 0, [20, 60], 12), (32, 12, 3, [70], 6), (16, 4, 0, [9], 9)]
    lives = [replace(life, splits=splits) for life in make_lives(rows)]
    num_blocks = pool_size(lives, shape.block_size, share=1.0)
    layer = Layer(shape, policy, num_blocks, kernels=make(shape), options=options)
    live(layer, lives, count)
    count.check()
    assert count.num_selections > 0


def test_lives_without_sinks_are_others() -> None:
    """The comparison fails if a layer leaves them out."""
    shape = Shape(2, 3, 64, 16, has_sinks=True)
    lives = make_lives([(48, 8, 0, [20, 60], 12)])
    layer = Layer(shape, "h2o", 20, kernels=TorchKernels())
    prefill = layer.builder.kernels.prefill

    def without(cache: object, chunks: object, tensors: StepTensors, scoring: Scoring) -> None:
        prefill(cache, chunks, replace(tensors, sink_logits=None), scoring)  # type: ignore[arg-type]

    layer.builder.kernels.prefill = without  # type: ignore[method-assign,assignment]
    with pytest.raises(AssertionError, match="outputs"):
        live(layer, lives, Count())


@pytest.mark.parametrize("make", [KERNELS["triton"], *list(KERNELS.values())[1:2]])
@pytest.mark.parametrize("sinks", [SINKS[:3], SINKS.half()], ids=["few", "halves"])
def test_sinks_of_other_shapes(make: Callable[[Shape], Kernels], sinks: torch.Tensor) -> None:
    """They are refused, not read past their end."""
    chunks, owned = prompt_chunks(SHAPE, packs=False)
    query, key = torch.randn(140, 6, 64), torch.randn(140, 2, 64)
    tensors = StepTensors(query, key, key, torch.empty_like(query), 0.2, sinks)
    with pytest.raises(ValueError, match="sinks are"):
        make(SHAPE).prefill(filled(SHAPE, owned + 1, seed=4), chunks, tensors, Scoring())
