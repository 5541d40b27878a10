# SPDX-License-Identifier: Apache-2.0
"""Wishes of a request: ``extra_args``; over HTTP, ``vllm_xargs``.

``{"kv_budget": 0.1}`` is its own budget; with ``{"kv_save": 1}`` its cache goes to a folder.

The front end checks it when a request enters, and answers HTTP 400; the scheduler reads it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from vllm.exceptions import VLLMClientError

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.checks import check_positions
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.handoff import PARAMS, SEND, TAKE, read_params
from vllm_h2o.options.parsing import misspells, number
from vllm_h2o.options.traits import page_size
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget

KEY = "kv_budget"
SAVE = "kv_save"
_MEANINGS = {KEY: "budget", SAVE: "wish to be kept"}
_OWN = {"kv_policy", "kv_policy_config", SEND, TAKE} | {
    option.name
    for option in fields(KVPolicyConfig)
    if option.name not in ("name", "score", "split", "merge", "positions", "eviction", "kernels")
}
"""Keys that mean this package; those left out may be another plugin's."""


class RefusedRequestError(ConfigError, VLLMClientError):
    """A request cannot be served as it asks: HTTP 400. vLLM answers a ValueError with 500."""


def asked_budget(extra_args: Mapping[str, Any] | None) -> int | float | str | None:
    """Return the budget that a request asks for; None where it asks for none.

    Raises:
        ConfigError: for a value that is no budget, or a key that is almost the right one.

    """
    for key in extra_args or ():
        for known, meaning in _MEANINGS.items():
            if misspells(key, known) and key not in _MEANINGS:
                raise ConfigError(
                    f"{key!r} in a request",
                    f"the key of a request's {meaning} is {known!r}",
                    f"the {meaning} would be ignored",
                    f"name it {known!r}",
                )
    asked = number((extra_args or {}).get(KEY))
    if asked is None or (isinstance(asked, int | float | str) and not isinstance(asked, bool)):
        return asked
    raise ConfigError(
        f"{KEY}={asked!r}",
        f"its type is {type(asked).__name__}",
        "a budget is a whole number from 1 (tokens), a fraction in (0, 1], or full",
        "give e.g. 512, 0.2 or full",
    )


def extra_args_of(request: Any) -> Mapping[str, Any]:
    """A request's own ``extra_args``; none of a pooling request.

    Args:
        request: vLLM's Request or EngineCoreRequest.

    """
    params = request.sampling_params
    return (params and params.extra_args) or {}


def asks_to_save(request: Any) -> bool:
    """Whether a request's cache is to be kept in a folder; :func:`check_request` has passed it.

    Args:
        request: vLLM's Request or EngineCoreRequest.

    """
    extra_args = extra_args_of(request)
    return bool(number(extra_args.get(SAVE)) or extra_args.get(SEND))


def _check_save(request: Any, config: KVPolicyConfig | None) -> None:
    """Refuse to keep what no later engine could use.

    Raises:
        ConfigError: for a value that says neither yes nor no, without a folder, and for a request
            with an adapter, with images, or whose tokens are not known.

    """
    asked = number(request.sampling_params.extra_args[SAVE])
    if asked not in (0, 1):
        raise ConfigError(f"{SAVE}={asked!r}", "it takes 1 or 0", "it is a switch", "give 1 or 0")
    if not asked:
        return
    if config is None or config.continuation_folder is None:
        raise ConfigError(
            f"{SAVE}={asked!r}",
            "the engine has no folder",
            "there is no place to keep a cache",
            f"start it with --kv-policy-config.continuation /PATH, or leave {SAVE} out",
        )
    for what in beyond_text(request):
        raise ConfigError(
            f"{SAVE}={asked!r}",
            f"the request has {what}",
            "files keep the text of the model without adapters",
            f"leave {SAVE} out",
        )


def beyond_text(request: Any) -> list[str]:
    """Name what a request has besides a text that ends: files keep nothing else.

    Args:
        request: vLLM's Request or EngineCoreRequest.

    """
    others = {
        "a LoRA adapter": request.lora_request,
        "images": request.mm_features,
        "prompt embeddings": request.prompt_embeds is not None,
        "more parts to come": request.resumable,
    }
    return [what for what, has in others.items() if has]


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
    """Return and remember ``KVPolicyConfig.resolve_request``.

    Raises:
        ConfigError: with the request's own budget.

    """
    try:
        return config.resolve_request(max_model_len, block_size, prompt_len, max_tokens, asked)
    except ConfigError as error:
        raise ConfigError(f"{KEY}={asked!r}", error.found, error.why, error.remedy) from error


def check_request(
    request: Any,
    vllm_config: Any,
    other_pages: Callable[[int], int] = lambda _: 0,
    encoder_room: int = 0,
    images: Any = None,
) -> Any:
    """Refuse a request whose budget cannot be used, or that could never be scheduled.

    Args:
        request: vLLM's EngineCoreRequest, complete.
        vllm_config: the engine's VllmConfig.
        other_pages: pages of a sequence in layers of other kinds, by its tokens.
        encoder_room: embeddings of images that the encoder's cache holds.
        images: vLLM's cache of images that the engine has received, if it has one.

    Returns:
        ``request``.

    Raises:
        RefusedRequestError: for such a request.

    """
    try:
        _check_images(request, vllm_config, encoder_room)
        return _checked(request, vllm_config, other_pages)
    except ConfigError as error:
        for image in request.mm_features or ():
            # The engine never receives it: a later request must send it again.
            if images is not None and image.data is not None:
                images.invalidate(image.mm_hash)
        raise RefusedRequestError(*error.args) from error


def _check_images(request: Any, vllm_config: Any, room: int) -> None:
    """Refuse images in the observation window that the encoder's cache cannot hold at once."""
    config = KVPolicyConfig.of(vllm_config) if request.mm_features else None
    if config is None or not config.num_window_queries:
        return
    start = len(request.prompt_token_ids) - config.num_window_queries
    reached = {
        image.identifier: image.mm_position.get_num_embeds()
        for image in request.mm_features
        if image.mm_position.offset + image.mm_position.length > start
    }
    if sum(reached.values()) > room:
        raise ConfigError(
            f"a prompt with {len(reached)} images in its last {config.num_window_queries} tokens",
            f"they are {sum(reached.values())} embeddings, and the encoder's cache holds {room}",
            "the observation window is computed in one step",
            "move images forward, or start the server with a smaller observation_window or a "
            "larger --max-num-batched-tokens",
        )


def _pages_of_an_engine(vllm_config: Any) -> int:
    """Return the pages of one engine; vLLM's count is for all engines of a front end."""
    parallel, pages = vllm_config.parallel_config, vllm_config.cache_config.num_gpu_blocks or 0
    if parallel.data_parallel_rank_local is not None:  # offline, with an engine of its own
        return pages
    local = parallel.data_parallel_size_local
    return pages // (local if parallel.local_engines_only else parallel.data_parallel_size)


def _check_keys(extra_args: Mapping[str, Any]) -> None:
    """Refuse options of the engine's policy in a request.

    Raises:
        ConfigError: for the first of them; with a policy alone, for another plugin may read it.

    """
    for key in extra_args:
        plain = str(key).lower().replace("-", "_").lstrip("_").removeprefix("kv_policy_config.")
        if plain in _OWN or plain.startswith("kv_policy"):
            raise ConfigError(
                f"{key!r} in a request",
                f"a request sets {KEY!r} and {SAVE!r} alone",
                "policy and options belong to the engine",
                f"give {KEY!r}, or set the option when the engine starts",
            )


def _checked(request: Any, vllm_config: Any, other_pages: Callable[[int], int]) -> Any:
    params, extra_args = request.sampling_params, extra_args_of(request)
    config = KVPolicyConfig.of(vllm_config) if extra_args else None
    if config is not None:
        _check_keys(extra_args)
    asked = asked_budget(extra_args)
    if SAVE in extra_args:
        _check_save(request, config)
    if PARAMS in extra_args:
        vocab_size = vllm_config.model_config.get_vocab_size()
        params.extra_args = read_params(request, config, vocab_size, beyond_text(request))
    if asked is None:
        return request
    if config is None:
        raise ConfigError(
            f"{KEY}={asked!r}",
            "the engine has no kv-policy",
            "the budget would have no effect",
            f"start the engine with --kv-policy h2o, or leave {KEY} out",
        )
    max_model_len = vllm_config.model_config.max_model_len
    block_size, pages = page_size(vllm_config), _pages_of_an_engine(vllm_config)
    prompt_len = len(request.prompt_token_ids or ()) or request.prompt_embeds.shape[0]
    lengths = (max_model_len, block_size, prompt_len, params.max_tokens)
    budget = budget_of(config, *lengths, asked)
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    longest = max_model_len if request.resumable else prompt_len + params.max_tokens
    if budget is not None:
        check_positions(config, f"{KEY}={asked!r}", budget, chunk, longest)
    if config.eviction == "chunk" and budget is not None and pages:
        # With other schedules the pool holds a longest sequence whole.
        needed = num_pages(min(budget.most_slots(chunk), longest), block_size)
        needed += other_pages(longest)
        if needed > pages - 1:
            raise ConfigError(
                f"{KEY}={asked!r}",
                f"the request may need {needed} pages",
                f"the pool has {pages - 1}",
                "ask for a smaller budget or fewer tokens, or give the server a larger pool",
            )
    return request
