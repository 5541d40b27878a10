# SPDX-License-Identifier: Apache-2.0
"""One server computes a prompt, and another goes on: ``kv_transfer_params``, as routers pass them.

The first server is asked with ``{"do_remote_decode": true}``. Its answer has the parameters for the
second one: the tokens that it sampled, and what computed them. The cache itself goes by files.

The front end reads the parameters, checks them, and leaves a :class:`Handoff` in ``extra_args``.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm.logger import init_logger

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig

logger = init_logger("vllm.kv_policy")

PARAMS = "kv_transfer_params"
"""VLLM's name of the parameters in ``extra_args``."""
SEND, TAKE = "kv_send", "kv_take"
"""Keys of ``extra_args`` that the front end alone sets: what PARAMS come to."""
POLICY = "kv_policy"
"""Key of PARAMS that only this package's servers set."""


@dataclass(frozen=True)
class Handoff:
    """The first server's answer so far, as the second one is told of it.

    Args:
        token_ids: of the answer so far, at least one.
        made_by: what computed the cache: model, options and versions, by a hash.
        prompt: its tokens, by a hash: of several prompts in a request, routers pass one answer's.

    """

    token_ids: Sequence[int]
    made_by: str
    prompt: str

    def params(self, config: KVPolicyConfig) -> dict[str, Any]:
        """``kv_transfer_params`` for the second server.

        Args:
            config: of the first one.

        """
        flags = {"do_remote_prefill": True, "do_remote_decode": False}
        return {**flags, POLICY: config.of_caches, **asdict(self)}

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Handoff:
        """Read them.

        Raises:
            ConfigError: for parameters that no server has made.

        """
        match params:
            case {
                "token_ids": [_, *_] as tokens,
                "made_by": str(made_by),
                "prompt": str(prompt),
            } if all(type(token) is int and token >= 0 for token in tokens):
                return cls(tokens, made_by, prompt)
        raise ConfigError(
            f"{PARAMS}={dict(params)!r}",
            "token_ids, made_by and prompt are not those of an answer",
            "the second server goes on from the first one's token",
            "pass the first server's kv_transfer_params as they are",
        )


def digest(prompt: Sequence[int]) -> str:
    """Name the tokens of a prompt."""
    return hashlib.sha256(array("q", prompt).tobytes()).hexdigest()


def read_params(
    request: Any, config: KVPolicyConfig | None, vocab_size: int, beyond_text: Iterable[str]
) -> dict[str, Any]:
    """Return a request's ``extra_args`` with what its ``kv_transfer_params`` come to.

    Without a policy they are those of a KV connector, and stay.

    Args:
        request: vLLM's EngineCoreRequest, complete.
        config: of the engine; None: it has no policy.
        vocab_size: tokens that the model knows.
        beyond_text: what the request has besides a text, in words.

    Raises:
        ConfigError: for parameters that this engine cannot follow.

    """
    given: dict[str, Any] = request.sampling_params.extra_args
    params = given[PARAMS] or {}
    if config is None:
        if POLICY in params:
            raise _differs("the first server has a kv-policy, and this one has none")
        return given
    others = {key: value for key, value in given.items() if key != PARAMS}
    unshared = " and ".join([*_unshared(request.sampling_params), *beyond_text])
    if params.get("do_remote_prefill"):
        _check_options(params.get(POLICY), config.of_caches)
        handoff = _taken(request, Handoff.of(params), vocab_size, unshared)
        return {**others, TAKE: asdict(handoff)}
    if not params.get("do_remote_decode"):
        return others
    if config.continuation_folder is None:
        raise ConfigError(
            f"{PARAMS} with do_remote_decode",
            "the engine has no folder",
            "another server finds the cache there",
            "start both with --kv-policy-config.continuation /PATH",
        )
    if unshared:
        logger.warning_once(
            "a request with %s is not handed over: the other server computes its prompt", unshared
        )
        return others
    return {**others, SEND: True}


def _taken(request: Any, handoff: Handoff, vocab_size: int, unshared: str) -> Handoff:
    """The handoff, if the request can go on from it.

    Raises:
        ConfigError: for another prompt, unknown tokens, or what two servers cannot share.

    """
    found = ""
    if handoff.prompt != digest(request.prompt_token_ids or ()):
        found = "they are of another prompt"
    elif max(handoff.token_ids) >= vocab_size:
        found = f"token {max(handoff.token_ids)} is none of the model's {vocab_size}"
    elif unshared:
        found = f"the request has {unshared}"
    if found:
        raise ConfigError(
            f"{PARAMS} of another server",
            found,
            "the answer goes on from the first server's token",
            f"send both servers the same request, with one prompt, or leave {PARAMS} out",
        )
    return handoff


def _check_options(theirs: object, own: dict[str, Any]) -> None:
    """Refuse another policy.

    Raises:
        ConfigError: with the first option that differs.

    """
    if not isinstance(theirs, dict):
        raise _differs("the first server has no kv-policy, and this one has")
    for name in sorted(own.keys() | theirs.keys()):
        there, here = theirs.get(name), own.get(name)
        if there != here:
            raise _differs(f"{name} is {_said(there)} there and {_said(here)} here")


def _said(value: object) -> str:
    return "not given" if value is None else repr(value)


def _differs(found: str) -> ConfigError:
    return ConfigError(
        f"{PARAMS} of another server",
        found,
        "a cache goes on with the policy that it was evicted by",
        "start both servers with the same --kv-policy and options",
    )


def _unshared(params: Any) -> list[str]:
    """Name what two servers cannot share of what sampling parameters ask for."""
    asked = {
        "several answers": (params.n or 1) > 1,
        "log-probabilities": params.logprobs is not None or params.prompt_logprobs is not None,
        "a grammar": params.structured_outputs is not None,
    }
    return [what for what, has in asked.items() if has]
