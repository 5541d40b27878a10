# SPDX-License-Identifier: Apache-2.0
"""Run one prompt through the real engine, and record which tokens its pages hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.pages import num_pages
from vllm_h2o.planner.model import Model, load
from vllm_h2o.policy import Budget

if TYPE_CHECKING:
    from vllm import LLM

NOTHING = 2**31 - 1
"""The worker's mark, in place of a position, where a KV head holds no token."""

FRAMES = 60
"""Number of steps that are recorded by default."""


@dataclass(frozen=True)
class Frame:
    """The tokens of all layers and KV heads after one step.

    Args:
        logical_len: tokens computed by then.
        position: [layers, heads, kept], int32, ascending; :data:`NOTHING` after the tokens of a
            head that holds fewer than another.
        score: [layers, heads, kept], float32, as the pages hold it; -inf where there is no token.
        terms: [layers, heads, logical_len], float32, by name: the terms of the scores of a prompt's
            tokens when it was packed; empty in other frames.
        mass: [layers, heads, kept], float32: number of tokens that each stands for, 0 where there
            is no token; None where none are merged.

    """

    logical_len: int
    position: np.ndarray
    score: np.ndarray
    terms: Mapping[str, np.ndarray] = field(default_factory=dict)
    mass: np.ndarray | None = None

    def ranked_by_age(self) -> Frame:
        """Return the frame with scores divided by the tokens' ages, as means are ranked."""
        age = np.maximum(self.logical_len - self.position, 1)
        return replace(self, score=self.score / age)


@dataclass(frozen=True)
class Trace:
    """A run.

    Args:
        title: the model and the policy, in words.
        tokens: the text of each token, prompt first; joined they are the whole text.
        prompt_len: tokens of the prompt.
        layers: indices of the layers.
        num_recent: most recent positions that are never evicted.
        num_sinks: first positions that are never evicted.
        scored: whether tokens have scores: a sequence that fits into its budget is not scored.
        frames: the steps.

    """

    title: str
    tokens: list[str]
    prompt_len: int
    layers: list[int]
    num_recent: int
    num_sinks: int
    scored: bool
    frames: list[Frame]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.frames[0].position.shape[1])


def run(
    model: str,
    text: str,
    config: KVPolicyConfig,
    *,
    max_tokens: int,
    every: int | None,
    temperature: float,
    max_model_len: int | None,
    block_size: int,
    dtype: str,
) -> Trace:
    """Start an engine, run one prompt, and stop it.

    Args:
        model: a folder or a name, as for vLLM.
        text: the prompt.
        config: the policy.
        max_tokens: most tokens to generate.
        every: record every ``every``-th token; None: about :data:`FRAMES` in all.
        temperature: of the sampling; 0 is greedy.
        max_model_len: longest sequence; None: as long as needed.
        block_size: slots of a page.
        dtype: in which the model runs; "auto" is vLLM's choice.

    Raises:
        KVPolicyError: for a prompt that does not fit, or a model or option that is refused.

    """
    loaded = load(model, dtype, text_only=True)
    loaded.refuse()
    tokenizer = _tokenizer(model)
    prompt = tokenizer(text)["input_ids"]
    longest = max_model_len or len(prompt) + max_tokens
    _check_fit(len(prompt), max_tokens, min(longest, loaded.max_len or longest))
    llm = _engine(loaded, model, config, longest, block_size)
    try:
        every = every or max(1, math.ceil(max_tokens / FRAMES))
        layers, token_ids, frames = record(llm, prompt, every, max_tokens, temperature)
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=60)
    if not frames:
        raise ConfigError(
            f"a trace with --max-tokens {max_tokens}",
            "nothing was evicted from the prompt, and one token followed",
            "a trace has at least one step after the prompt or one eviction",
            "choose a larger --max-tokens or a smaller budget",
        )
    budget = config.resolve_request(longest, block_size, len(prompt), max_tokens)
    budget = budget or config.resolve(longest, block_size)
    return Trace(
        title=f"{Path(model).name}, {config.name}: {_meaning(budget, config.splits)}",
        tokens=texts(tokenizer, token_ids),
        prompt_len=len(prompt),
        layers=layers,
        num_recent=budget.num_recent,
        num_sinks=budget.num_sinks,
        scored=config.ranking.power > 0 and not budget.holds(len(prompt), len(prompt) + max_tokens),
        frames=[frame.ranked_by_age() for frame in frames] if config.ranking.by_age else frames,
    )


def _meaning(budget: Budget, splits: bool) -> str:
    head = "a head on average" if splits else "a head"
    return f"{budget.capacity} tokens {head} ({budget.parts})"


def _check_fit(prompt_len: int, max_tokens: int, max_len: int) -> None:
    if not prompt_len or prompt_len + max_tokens > max_len:
        raise ConfigError(
            f"a trace of {prompt_len} prompt tokens and {max_tokens} more",
            f"a sequence may have {max_len}",
            "the prompt and its output must fit" if prompt_len else "the prompt is empty",
            "use another prompt, fewer --max-tokens or a larger --max-model-len",
        )


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UnsupportedError(
            f"a trace of {model!r}",
            str(error).strip().splitlines()[0],
            "the prompt is text, which needs the model's tokenizer",
            "use a folder that also has the tokenizer, or a model's name",
        ) from error


def _engine(
    loaded: Model, model: str, config: KVPolicyConfig, longest: int, block_size: int
) -> LLM:
    """Start an engine for one sequence, with just enough memory."""
    from vllm import LLM

    shape = loaded.cache("auto")
    slot_bytes = shape.slot_bytes(config.extra_words)
    slots = shape.pool(0, block_size, slot_bytes).block_size
    # vLLM wants a page more for a window, which may begin anywhere in one.
    pages = num_pages(longest, slots)
    num_blocks = pages + len(shape.windows) * (pages + 1) + shape.num_states + 1
    return LLM(
        model=model,
        dtype=loaded.dtype,
        num_gpu_blocks_override=num_blocks,
        # Not read, but where memory is given in bytes none is profiled.
        kv_cache_memory_bytes=num_blocks * slots * slot_bytes,
        max_model_len=longest,
        block_size=block_size,
        enforce_eager=True,
        max_num_seqs=1,
        language_model_only=True,  # the prompt is text
        enable_prefix_caching=False,  # survivors would need room for a copy
        kv_policy=config.name,
        kv_policy_config=config.to_dict(),
    )


def record(
    llm: LLM, prompt: Sequence[int], every: int, max_tokens: int, temperature: float = 0.0
) -> tuple[list[int], list[int], list[Frame]]:
    """Run one prompt in an engine with a policy, recording.

    Args:
        llm: the engine; it runs nothing else meanwhile.
        prompt: token ids.
        every: record every ``every``-th token past the prompt.
        max_tokens: most tokens to generate.
        temperature: of the sampling; 0 is greedy.

    Returns:
        Indices of the layers, the ids of all tokens, and the frames.

    """
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=0, detokenize=False
    )
    llm.collective_rpc("start_recording", args=(every,))
    prompts = [{"prompt_token_ids": list(prompt)}]
    (output,) = llm.generate(prompts, sampling, use_tqdm=False)
    layers, frames = merge(llm.collective_rpc("take_recording"))
    return layers, [*prompt, *output.outputs[0].token_ids], frames


def merge(ranks: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[int], list[Frame]]:
    """Join the workers' records: pipeline ranks have layers, tensor ranks have heads.

    Args:
        ranks: the result of each worker's ``take_recording``.

    Returns:
        Indices of the layers, and the frames.

    """
    layers = sorted({layer for rank in ranks for part in rank[:1] for layer in part["layers"]})
    heads = max((p["first_head"] + p["num_kv_heads"] for r in ranks for p in r[:1]), default=0)
    frames = []
    for parts in zip(*ranks, strict=True):
        kept = [
            len(part["positions"]) // (4 * len(part["layers"]) * part["num_kv_heads"])
            for part in parts
        ]
        length = parts[0]["logical_len"]
        position = np.full((len(layers), heads, max(kept)), NOTHING, dtype=np.int32)
        score = np.full(position.shape, -np.inf, dtype=np.float32)
        terms = {
            name: np.zeros((len(layers), heads, length), np.float32) for name in parts[0]["terms"]
        }
        mass = np.zeros(position.shape, dtype=np.float32)
        for part, num in zip(parts, kept, strict=True):
            rows = [layers.index(layer) for layer in part["layers"]]
            own = slice(part["first_head"], part["first_head"] + part["num_kv_heads"])
            shape = (len(rows), part["num_kv_heads"], num)
            position[rows, own, :num] = np.frombuffer(part["positions"], np.int32).reshape(shape)
            score[rows, own, :num] = np.frombuffer(part["scores"], np.float32).reshape(shape)
            for name, numbers in part["terms"].items():
                term = np.frombuffer(numbers, np.float32).reshape(*shape[:2], length)
                terms[name][rows, own] = term
            if part["masses"]:
                mass[rows, own, :num] = np.frombuffer(part["masses"], np.float32).reshape(shape)
        order = position.argsort(axis=-1)
        frames.append(
            Frame(
                length,
                np.take_along_axis(position, order, axis=-1),
                np.take_along_axis(score, order, axis=-1),
                terms,
                np.take_along_axis(mass, order, axis=-1) if parts[0]["masses"] else None,
            )
        )
    return layers, frames


def texts(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; empty for a part of a character."""
    from vllm.tokenizers.detokenizer_utils import detokenize_incrementally

    pieces: list[str] = []
    tokens: list[str] = []
    prefix = read = 0
    for index in range(len(token_ids)):
        ids = list(token_ids[index : index + 1])
        added, text, prefix, read = detokenize_incrementally(tokenizer, ids, tokens, prefix, read)
        tokens = [*tokens, *added]
        pieces.append(text)
    return pieces
