"""A request's own budget: ``extra_args={"kv_budget": 0.1}``; over HTTP, ``vllm_xargs``.

Checked where a request enters (a refusal there is HTTP 400 and harms no other), and read again
where it is scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from vllm.exceptions import VLLMClientError

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.checks import check_positions
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.parsing import misspells, number
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget

KEY = "kv_budget"


class RefusedRequestError(ConfigError, VLLMClientError):
    """A request cannot be served as it asks: HTTP 400. Of a mere ValueError vLLM makes 500."""


def asked_budget(extra_args: Mapping[str, Any] | None) -> int | float | str | None:
    """What a request asks for; None where it asks for nothing.

    Raises:
        ConfigError: for what is neither a number nor a word, or a key that is almost the right one.

    """
    for key in extra_args or ():
        if misspells(key, KEY):
            raise ConfigError(
                f"{key!r} in a request",
                f"its budget is read from {KEY!r} alone",
                "a key that nothing reads would be a silent no-op",
                f"name it {KEY!r}",
            )
    asked = number((extra_args or {}).get(KEY))
    if asked is None or (isinstance(asked, int | float | str) and not isinstance(asked, bool)):
        return asked
    raise ConfigError(
        f"{KEY}={asked!r}",
        f"a {type(asked).__name__}",
        "a budget is an int > 0 (slots), a float in (0, 1] (a fraction), or 'full'",
        "give e.g. 512, 0.2 or 'full'",
    )


# Typed, for 1 is one slot and 1.0 is every token.
@lru_cache(maxsize=4096, typed=True)
def budget_of(
    config: KVPolicyConfig,
    max_model_len: int,
    block_size: int,
    prompt_len: int,
    max_tokens: int,
    asked: int | float | str | None,
) -> Budget | None:
    """``KVPolicyConfig.resolve_request``, worked out once for the many times it is asked.

    Raises:
        ConfigError: which names what the request asked for.

    """
    try:
        return config.resolve_request(max_model_len, block_size, prompt_len, max_tokens, asked)
    except ConfigError as error:
        raise ConfigError(f"{KEY}={asked!r}", error.found, error.why, error.remedy) from error


def check_request(
    request: Any,
    vllm_config: Any,
    window_pages: Callable[[int], int] = lambda _: 0,
    encoder_room: int = 0,
    images: Any = None,
) -> Any:
    """Refuse a request whose own budget cannot be used, or that would wait for ever.

    Args:
        request: vLLM's EngineCoreRequest, complete.
        vllm_config: of the engine that will get it.
        window_pages: pages, in layers with a sliding window, of a sequence of so many tokens.
        encoder_room: embeddings of images that the encoder's cache holds.
        images: vLLM's cache of those that the engine has been sent, if it has one.

    Returns:
        ``request``.

    Raises:
        RefusedRequestError: in four parts.

    """
    try:
        _check_images(request, vllm_config, encoder_room)
        return _checked(request, vllm_config, window_pages)
    except ConfigError as error:
        for image in request.mm_features or ():
            # The engine is never sent it: it must not pass for sent when it is asked about again.
            if images is not None and image.data is not None:
                images.invalidate(image.mm_hash)
        raise RefusedRequestError(*error.args) from error


def _check_images(request: Any, vllm_config: Any, room: int) -> None:
    """Those that the observation window reaches are embedded in one step."""
    config = KVPolicyConfig.of(vllm_config) if request.mm_features else None
    if config is None or not config.num_window_queries:
        return
    if config.ranking.second_pass is None and not vllm_config.cache_config.enable_prefix_caching:
        return  # the window may be computed in several steps
    start = len(request.prompt_token_ids) - config.num_window_queries
    reached = {
        image.identifier: image.mm_position.get_num_embeds()
        for image in request.mm_features
        if image.mm_position.offset + image.mm_position.length > start
    }
    if sum(reached.values()) > room:
        raise ConfigError(
            f"{len(reached)} images within the last {config.num_window_queries} tokens of a prompt",
            f"they are {sum(reached.values())} embeddings, and the encoder's cache has {room}",
            "these tokens score together, in one step: the request would wait for ever",
            "move images forward, or start the server with a smaller observation_window or a "
            "larger --max-num-batched-tokens",
        )


def _pages_of_an_engine(vllm_config: Any) -> int:
    """0 before they are known; vLLM adds up those of all engines that a front end speaks to."""
    parallel, pages = vllm_config.parallel_config, vllm_config.cache_config.num_gpu_blocks or 0
    if parallel.data_parallel_rank_local is not None:  # offline, with an engine of its own
        return pages
    local = parallel.data_parallel_size_local
    return pages // (local if parallel.local_engines_only else parallel.data_parallel_size)


def _checked(request: Any, vllm_config: Any, window_pages: Callable[[int], int]) -> Any:
    params = request.sampling_params
    asked = asked_budget(params.extra_args) if params is not None else None
    if asked is None:
        return request
    config = KVPolicyConfig.of(vllm_config)
    if config is None:
        raise ConfigError(
            f"{KEY}={asked!r}",
            "this engine runs without a kv-policy",
            "every token stays: the budget would be a silent no-op",
            f"start it with --kv-policy h2o, or leave {KEY} out",
        )
    max_model_len = vllm_config.model_config.max_model_len
    block_size, pages = vllm_config.cache_config.block_size, _pages_of_an_engine(vllm_config)
    prompt_len = len(request.prompt_token_ids or ()) or request.prompt_embeds.shape[0]
    lengths = (max_model_len, block_size, prompt_len, params.max_tokens)
    budget = budget_of(config, *lengths, asked)
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    longest = max_model_len if request.resumable else prompt_len + params.max_tokens
    if budget is not None:
        check_positions(config, f"{KEY}={asked!r}", budget, chunk, longest)
    if config.prefill == "chunked" and budget is not None and pages:
        # Elsewhere the pool is known to hold a longest sequence whole.
        needed = num_pages(min(budget.most_slots(chunk), longest), block_size)
        needed += window_pages(longest)
        if needed > pages - 1:
            raise ConfigError(
                f"{KEY}={asked!r}",
                f"the request may come to {needed} pages, and the pool has {pages - 1}",
                "it would wait for ever",
                "ask for a smaller budget or fewer tokens, or give the server a larger pool",
            )
    return request
