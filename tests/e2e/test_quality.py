"""At 64 slots of 500 generated tokens, h2o's text holds together and local's does not."""

from __future__ import annotations

import math

import pytest
from transformers import AutoTokenizer

from tests.e2e.harness import Probe, engine, generate, smollm2, token_ids

BUDGET, BLOCK_SIZE, LENGTH = 64, 16, 500

PROMPTS = (
    "The lighthouse keeper had lived alone on the island for thirty years, and every evening he",
    "Photosynthesis is the process by which plants turn light into chemical energy. It begins when",
    "When the railway reached the valley in 1871, the people of the town were divided. Some",
    "To bake a good loaf of bread at home you need only flour, water, salt and time. First,",
    "My grandmother kept a diary during the war. In it she wrote that",
    "The three most important ideas in economics are",
    "Dear Sir, I am writing to complain about",
    "The ship left harbour at dawn with twelve men aboard, and none of them knew that",
)


def distinct_4_grams(tokens: list[int]) -> float:
    """Different 4-grams over all 4-grams."""
    grams = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    return len(set(grams)) / len(grams)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """What each policy generates after each prompt, sampled with one seed."""
    model = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    results = {"prompts": prompts}
    for policy in ("h2o", "local"):
        options = {"budget": BUDGET}
        with engine(model, policy, options, block_size=BLOCK_SIZE, max_model_len=1024) as llm:
            probe = Probe(llm)
            outputs = generate(llm, prompts, LENGTH, temperature=0.7, seed=1)
            results[policy] = token_ids(outputs)
            assert max(max(step.values(), default=0) for step in probe.held) == BUDGET // BLOCK_SIZE
            assert max(max(step.values(), default=0) for step in probe.resident) == BUDGET
            assert probe.num_free == probe.num_total
    return results


def test_h2o_stays_coherent_and_local_degenerates(texts: dict[str, list[list[int]]]) -> None:
    """By the model's own full-cache perplexity of both texts, and by how much they repeat."""
    nll: dict[str, list[float]] = {}
    with engine(smollm2(), block_size=32, max_model_len=1024) as llm:
        for policy in ("h2o", "local"):
            whole = [p + t for p, t in zip(texts["prompts"], texts[policy], strict=True)]
            outputs = generate(llm, whole, max_tokens=1, prompt_logprobs=0)
            nll[policy] = []
            for prompt, output in zip(texts["prompts"], outputs, strict=True):
                tail = output.prompt_logprobs[len(prompt) + BUDGET :]
                values = [-next(iter(entry.values())).logprob for entry in tail]
                nll[policy].append(sum(values) / len(values))
    perplexity = {policy: math.exp(sum(v) / len(v)) for policy, v in nll.items()}
    distinct = {
        policy: sum(map(distinct_4_grams, texts[policy])) / len(PROMPTS)
        for policy in ("h2o", "local")
    }
    print(f"\nperplexity {perplexity}; distinct 4-grams {distinct}; nll {nll}")
    # Measured: perplexity 3.6 and 11.2, distinct 4-grams 0.82 and 0.58.
    assert perplexity["local"] > 1.7 * perplexity["h2o"]
    assert distinct["h2o"] > distinct["local"] + 0.1
    assert distinct["h2o"] > 0.7
