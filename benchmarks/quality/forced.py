# SPDX-License-Identifier: Apache-2.0
"""Tokens that the engine is made to say, each judged after what was evicted before it.

A whole text in one forward pass would be judged before anything is evicted from it. So its start
is the prompt, and the rest is generated under force: a logits processor (vLLM's own seam) leaves
one token possible, and ``logprobs_mode="raw_logprobs"`` reports what the model thought of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.triton_utils import dispatcher
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

BLOCK_SIZE = 16
STOCK_BLOCK_SIZE = 32  # the least that vLLM's own attention takes on CPUs


class ForcedTokens(AdapterLogitsProcessor):
    """Lets a request say nothing but the tokens of its ``extra_args["forced"]``."""

    def is_argmax_invariant(self) -> bool:
        """False: the argmax is what it changes."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """The processor of one request, if it is forced."""
        forced = (params.extra_args or {}).get("forced")
        if forced is None:
            return None

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            token = forced[len(output_ids)]
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return process


@dataclass(frozen=True)
class Judged:
    """A model's view of forced tokens.

    Args:
        nll: nats, one for each.
        first: whether it was the model's own choice.
        num_cached_tokens: of the prompt, those that were not computed again.

    """

    nll: list[float]
    first: list[bool]
    num_cached_tokens: int


@contextmanager
def in_process(**arguments: Any) -> Iterator[LLM]:
    """vLLM's LLM of these arguments, shut down in the end.

    vLLM collects garbage nine times while an engine starts and stops, half a second each in a
    process with many modules: here it is done once, at the end. And it looks in all of them for
    its kernels, to replace them on a CPU: here the first engine does.
    """
    found = (
        mock.patch.object(dispatcher, "register_kernels") if dispatcher._registry else nullcontext()
    )
    with found, ExitStack() as undo, mock.patch.object(gc, "collect", return_value=0):
        # Of an engine that does not start, too: or the next one takes over its groups.
        undo.callback(cleanup_dist_env_and_memory)
        llm = LLM(**arguments)
        undo.pop_all()
    try:
        yield llm
    finally:
        with mock.patch.object(gc, "collect", return_value=0):
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
        gc.collect()


def forced_engine(
    model: str,
    policy: str | None,
    options: dict[str, Any] | None,
    max_model_len: int,
    dtype: str = "float32",
    **engine: Any,
) -> AbstractContextManager[LLM]:
    """An engine that says what it is made to.

    Args:
        model: folder.
        policy: name; None: stock vLLM.
        options: of the policy.
        max_model_len: of the engine.
        dtype: of weights, and of the cache where the engine is given no other.
        engine: other arguments of vLLM's.

    """
    settings: dict[str, Any] = {} if policy is None else {"kv_policy": policy}
    if options:
        settings["kv_policy_config"] = options
    settings["block_size"] = BLOCK_SIZE if policy else STOCK_BLOCK_SIZE
    return in_process(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=max_model_len,
        skip_tokenizer_init=True,
        logits_processors=[ForcedTokens],
        logprobs_mode="raw_logprobs",
        **{"enable_prefix_caching": False, **settings, **engine},
    )


def endless(
    length: int, budget: int | None, extra: Mapping[str, Any] | None = None, **own: Any
) -> SamplingParams:
    """Parameters of a request that goes on past any end, without text.

    Args:
        length: tokens of the output.
        budget: slots; None: the engine's.
        extra: other ``extra_args``.
        own: other parameters of vLLM's.

    """
    args = {**(extra or {}), **({} if budget is None else {"kv_budget": budget})}
    return SamplingParams(
        max_tokens=length, ignore_eos=True, detokenize=False, extra_args=args, **own
    )


def force(
    llm: LLM,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    budgets: Sequence[int | None],
    progress: bool = True,
) -> list[Judged]:
    """Make an engine go on with prompts as it is told.

    Args:
        llm: of :func:`forced_engine`.
        texts: (prompt, forced tokens) of each request.
        budgets: slots of each request; None: the engine's.
        progress: show a bar.

    """
    params = [
        endless(len(forced), budget, {"forced": list(forced)}, temperature=0, logprobs=0)
        for (_, forced), budget in zip(texts, budgets, strict=True)
    ]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in texts]
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    return [_judged(out, forced) for out, (_, forced) in zip(outputs, texts, strict=True)]


def judge(
    model: str,
    policy: str | None,
    options: dict[str, Any] | None,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_model_len: int,
    progress: bool = True,
) -> list[Judged]:
    """One engine's view of some texts; see :func:`forced_engine` and :func:`force`."""
    with forced_engine(model, policy, options, max_model_len) as llm:
        return force(llm, texts, [None] * len(texts), progress)


def _judged(output: Any, forced: Sequence[int]) -> Judged:
    said = output.outputs[0]
    if list(said.token_ids) != list(forced):
        raise RuntimeError(f"request {output.request_id} said other tokens than it was made to")
    entries = [at[token] for at, token in zip(said.logprobs, forced, strict=True)]
    nll, first = [-entry.logprob for entry in entries], [entry.rank == 1 for entry in entries]
    return Judged(nll, first, output.num_cached_tokens or 0)
