# SPDX-License-Identifier: Apache-2.0
"""What test_images.py runs: images are tokens like others, and evicted like others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm import LLM, RequestOutput, SamplingParams

from tests.e2e.harness import (
    CHARACTERS,
    NEAR_TIE,
    Probe,
    assert_same_tokens,
    engine,
    token_ids,
)
from tests.e2e.oracle import Oracle
from tests.e2e.seeing import READING, SEEING, write
from tests.e2e.zoo import ROUNDED_TIE
from vllm_h2o.errors import UnsupportedError
from vllm_h2o.options.request import RefusedRequestError

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "max_model_len": 224,
    "max_num_seqs": 4,
    "block_size": 32,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
    "max_num_batched_tokens": 64,
}
OWN = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
Prompt = dict[str, Any]


@pytest.fixture(scope="module", params=SEEING)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, of each kind of model."""
    return write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


@pytest.fixture(scope="module", params=[kind for kind in SEEING if kind != "qwen3_5"])
def model_without_states(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same, of each kind that keeps all its tokens."""
    return write(request.param, tmp_path_factory.mktemp(request.param) / request.param)


def settings(model: Path) -> dict[str, Any]:
    """Those of its kind."""
    return {**SETTINGS, "dtype": SEEING[model.name].dtype}


def picture(seed: int, width: int = 112) -> Image.Image:
    """Noise."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (112, width, 3), dtype=np.uint8))


def prompts(model: Path) -> list[Prompt]:
    """None, one and two images; images across the ends of chunks, and at the prompt's end."""
    words = [token % 200 for token in CHARACTERS]
    image = SEEING[model.name].picture
    return [
        {"prompt_token_ids": words[:90]},
        seen([*words[:56], *image, *words[60:90]], picture(1)),
        seen(
            [*words[:9], *image, *words[100:140], *image, *words[:3]], picture(2), picture(3, 168)
        ),
        seen([*words[40:60], *image], picture(4)),
    ]


def seen(tokens: list[int], *pictures: Image.Image) -> Prompt:
    """A prompt with pictures."""
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": list(pictures)}}


def answers(llm: LLM, asked: Sequence[Prompt], **params: Any) -> list[RequestOutput]:
    """Greedy."""
    sampling = SamplingParams(**{"temperature": 0, **OWN, **params})
    return llm.generate(list(asked), sampling, use_tqdm=False)


def compare(
    model: Path,
    asked: Sequence[Prompt],
    stock: list[RequestOutput],
    own: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stock's tokens where all is kept; else what the reference keeps."""
    policy, is_exact = ("h2o", {"budget": 32}), model_is_exact(model)
    with monkeypatch.context() as patch, engine(str(model), *policy, **own) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        whole = answers(llm, asked, extra_args={"kv_budget": "full"})
        assert not oracle.num_victims
        assert_same_tokens(stock, whole, near_tie=NEAR_TIE if is_exact else ROUNDED_TIE)
        answers(llm, asked)
        check(oracle, probe, is_exact)


def test_whole_and_in_part(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's tokens where all is kept; else what the reference keeps, of images too."""
    asked = prompts(model)
    with engine(str(model), None, **settings(model)) as llm:
        stock = answers(llm, asked, logprobs=2)
        lengths = [len(output.prompt_token_ids or ()) for output in stock]
        assert min(lengths[1:]) > min(len(prompt["prompt_token_ids"]) for prompt in asked[1:])
        # It sees: other pictures, other words.
        other = seen(asked[1]["prompt_token_ids"], picture(9))
        assert token_ids(answers(llm, [other])) != token_ids(stock[1:2])
    compare(model, asked, stock, settings(model), monkeypatch)


@pytest.mark.parametrize("kind", [kind for kind in SEEING if kind.startswith("qwen")])
def test_videos(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens are tokens like others, too."""
    model = write(kind, tmp_path / kind)
    own = {**settings(model), "limit_mm_per_prompt": {"image": 0, "video": 1}}
    own |= {"max_model_len": 512, "max_num_batched_tokens": 512}
    frames = np.random.default_rng(1).integers(0, 256, (6, 112, 112, 3), dtype=np.uint8)
    seconds = {"fps": 2.0, "total_num_frames": 6, "duration": 3.0, "frames_indices": [*range(6)]}
    tokens = [*range(40), 202, 201, 203, *range(20)]
    video = {"video": [(frames, {**seconds, "video_backend": "none"})]}
    asked = [{"prompt_token_ids": tokens, "multi_modal_data": video}, *prompts(model)[:1]]
    with engine(str(model), None, **own) as llm:
        stock = answers(llm, asked, logprobs=2)
        assert len(stock[0].prompt_token_ids or ()) > len(tokens) + 10
    compare(model, asked, stock, own, monkeypatch)


@pytest.mark.parametrize("kind", READING)
def test_text_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any model, with --language-model-only: as of a model that knows only text."""
    model = write(kind, tmp_path / kind)
    own = {"dtype": READING[kind].dtype, "max_model_len": 160, "language_model_only": True}
    asked: list[Prompt] = [{"prompt_token_ids": CHARACTERS[n : n + n]} for n in (5, 33, 90)]
    with engine(str(model), None, **own) as llm:
        stock = answers(llm, asked, logprobs=2)
    compare(model, asked, stock, own, monkeypatch)


def test_images_that_attend_to_later_tokens_are_refused(tmp_path: Path) -> None:
    """The remedy is to serve text alone."""
    model = str(write("gemma3", tmp_path / "gemma3"))
    embeds = {"language_model_only": True, "enable_mm_embeds": True}  # of images all the same
    for given in ({}, embeds):
        with pytest.raises(UnsupportedError, match=r"within an image.*with --language-model-only"):
            engine(model, "h2o", **given).__enter__()


def model_is_exact(model: Path) -> bool:
    """Whether it runs in 32 bits."""
    return READING[model.name].dtype == "float32"


def check(oracle: Oracle, probe: Probe, is_exact: bool) -> None:
    """Something was evicted, as by the reference, and no page is held."""
    assert oracle.num_victims > 0
    assert oracle.num_ties <= max(oracle.num_victims / 1000, 1)
    assert oracle.max_error < (1e-4 if is_exact else 0.1)
    assert probe.num_free == probe.num_total


@pytest.mark.parametrize("policy", ["h2o2", "streaming"])
def test_policies_beside_images_equal_the_reference(
    policy: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second pass turns the queries of M-RoPE; the others ask for no scores."""
    options: dict[str, Any] = {"budget": 32}
    own = settings(model)
    if policy == "h2o2":
        # Chunks end before images: a second pass has others then, and windows are whole.
        options, own["disable_chunked_mm_input"] = {**options, "observation_window": 8}, True
    with monkeypatch.context() as patch, engine(str(model), policy, options, **own) as llm:
        probe = Probe(llm)
        oracle = Oracle(probe.scheduler).install(patch)
        answers(llm, prompts(model))
        check(oracle, probe, model_is_exact(model))


@pytest.mark.parametrize(
    ("policy", "options", "prefix_caching"),
    [
        ("snapkv", {"observation_window": 8}, True),
        ("h2o", {"continuation": True}, False),
    ],
    ids=["prefix caching", "continuation"],
)
def test_images_are_part_of_what_is_found(
    policy: str, options: dict[str, Any], prefix_caching: bool, model_without_states: Path
) -> None:
    """The same image is found; another one, in the same place of the same text, never is."""
    model = model_without_states
    own = {**settings(model), "enable_prefix_caching": prefix_caching, "block_size": 16}
    asked = prompts(model)[1]
    text = asked["prompt_token_ids"]
    with engine(str(model), policy, {"budget": 64, **options}, **own) as llm:
        probe = Probe(llm)
        first = answers(llm, [asked])[0]
        said = [*text, *first.outputs[0].token_ids, 5, 6, 7]
        same, other = (seen(said, picture(n)) for n in (1, 9))
        start = len(text[:56]) // 16 * 16
        assert (answers(llm, [other])[0].num_cached_tokens or 0) <= start
        assert (answers(llm, [same])[0].num_cached_tokens or 0) > start
        cold = answers(llm, [seen(text, picture(17))])[0]
        assert (cold.num_cached_tokens or 0) <= start
        assert probe.num_free == probe.num_total


def test_images_that_would_wait_for_ever_are_refused(model_without_states: Path) -> None:
    """Those in the window, which do not fit the encoder's cache together.

    The same images are served in another prompt: the engine is sent them, as if for the first time.
    """
    model, options = model_without_states, {"budget": 64, "observation_window": 23}
    own = {**settings(model), "max_num_batched_tokens": 24, "enable_prefix_caching": True}
    own |= {"max_model_len": 256, "max_num_seqs": 1}
    image = SEEING[model.name].picture
    apart = seen([*range(40), *image, *range(60), *image], picture(1), picture(2))
    with engine(str(model), "snapkv", options, **own) as llm:
        probe = Probe(llm)
        with pytest.raises(RefusedRequestError, match="the encoder's cache holds"):
            answers(llm, [seen([*range(40), *image, 7, *image], picture(1), picture(2))])
        assert len(answers(llm, [apart])[0].outputs[0].token_ids) == OWN["max_tokens"]
        assert probe.num_free == probe.num_total
