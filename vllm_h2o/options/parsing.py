# SPDX-License-Identifier: Apache-2.0
"""Read what users write, on a command line, in JSON or in a mapping, as fields and values."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from vllm_h2o.errors import ConfigError

ADDITIONAL_CONFIG_KEY = "kv_policy"
ANY = object()
"""Any value of a retired option."""


@dataclass(frozen=True)
class Retired:
    """An option or a value that is no longer known by its name.

    Args:
        now: the options with the same meaning; an empty mapping is the default.
        over: other values of these options, next to which the retired one decides.
        gone: the replacement, where nothing has the same meaning: it is refused.

    """

    now: Mapping[str, object] = field(default_factory=dict)
    over: tuple[object, ...] = ()
    gone: str = ""


RETIRED: dict[tuple[str, object], Retired] = {
    ("eviction", "always"): Retired({"eviction": "prompt_end"}),
    ("prefill", "full"): Retired(),
    ("prefill", "chunked"): Retired({"eviction": "chunk"}, over=("always",)),
    ("prefill", "window"): Retired(gone="use --kv-policy snapkv"),
    ("granularity", "token"): Retired(),
    ("granularity", "block"): Retired({"evict_every": "page"}),
    ("split", False): Retired({"split": "none"}),
    ("split", True): Retired({"split": "heads"}),
    ("split_layers", False): Retired(),
    ("split_layers", None): Retired(),
    ("split_layers", True): Retired({"split": "layers"}, over=(True, None)),
    ("position_limit", None): Retired(),
    ("position_limit", ANY): Retired({"positions": ANY}, over=("rolling",)),
    ("window_score", ANY): Retired(gone="leave it out, or use --kv-policy snapkv"),
    ("window_lifetime", ANY): Retired(gone="leave it out; h2o2 uses 16 tokens"),
    ("score_skip_recent", ANY): Retired(gone="leave it out"),
    ("protect_prompt_tokens", ANY): Retired(gone="use num_sink_tokens"),
    ("pressure_watermark", ANY): Retired(gone="leave it out"),
    ("seed", ANY): Retired(gone="leave it out; no policy is random"),
    ("name", "random"): Retired(gone="use --kv-policy h2o, streaming or local"),
    ("name", "h2o_mean"): Retired(gone="use --kv-policy h2o with score=mean_squares"),
    ("name", "h2o_replay"): Retired(gone="use --kv-policy h2o2"),
    ("score", "second_pass"): Retired(gone="use --kv-policy h2o2"),
    ("score", "replay"): Retired(gone="use --kv-policy h2o2"),
}
"""(option, retired value or ANY) -> the options with its meaning. Drop when: the next minor."""

logger = logging.getLogger("vllm.kv_policy")


def named_options(name: str | None, options: object, known: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ``--kv-policy NAME`` and ``--kv-policy-config '{...}'``.

    Args:
        name: name of the policy, or None.
        options: a mapping, JSON text, or None.
        known: names of the fields.

    Raises:
        ConfigError: for options that are no mapping, two names, or an unknown option.

    """
    if options is None:
        options = {}
    if isinstance(options, str):
        options = _parse_json(options)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"kv_policy_config={options!r}",
            f"its type is {type(options).__name__}",
            "options are a mapping of names to values",
            "give a JSON object such as '{\"budget\": 0.2}'",
        )
    merged = dict(options)
    if name is not None and merged.setdefault("name", name) != name:
        raise ConfigError(
            f"kv_policy={name!r} with name={merged['name']!r}",
            "these are two policies",
            "an engine runs one policy",
            "name the policy once",
        )
    merged = _current({str(key): number(value) for key, value in merged.items()}, known)
    for key in merged:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise ConfigError(
                f"option {key!r}",
                f"the options are {', '.join(known)}",
                "no policy reads it",
                f"did you mean {close[0]!r}?" if close else "remove it",
            )
    return merged


def carried_options(additional_config: object) -> object:
    """Return the policy in vLLM's ``additional_config``; None when there is none.

    Raises:
        ConfigError: for a key that is almost the right one, or an empty policy.

    """
    if not isinstance(additional_config, Mapping):
        return None
    for key in additional_config:
        if misspells(key, ADDITIONAL_CONFIG_KEY):
            raise ConfigError(
                f"key {key!r} in additional_config",
                f"the key of a policy is {ADDITIONAL_CONFIG_KEY!r}",
                "the policy would be ignored",
                f'give {{"{ADDITIONAL_CONFIG_KEY}": {{"name": "h2o", "budget": 0.2}}}}',
            )
    options = additional_config.get(ADDITIONAL_CONFIG_KEY)
    if options == {}:
        raise ConfigError(
            f"{ADDITIONAL_CONFIG_KEY}={{}} in additional_config",
            "it names no policy and no option",
            "it is unclear whether a policy is wanted",
            'give {"name": "h2o"}, or leave the key out',
        )
    return options


def misspells(key: object, wanted: str) -> bool:
    """Whether a key is almost the wanted one."""
    plain = str(key).lower().replace("-", "_")
    return key != wanted and (
        plain.startswith(wanted) or bool(get_close_matches(plain, [wanted], cutoff=0.85))
    )


def number(value: object) -> object:
    """Return a number for an ASCII numeral, as a command line leaves it; other values as given."""
    if isinstance(value, str) and value.isascii():
        for parse in (int, float):
            try:
                return parse(value)
            except ValueError:
                continue
    return value


def _current(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Replace retired options and values by those with their meaning.

    Args:
        options: options by name.
        known: names of options.

    Raises:
        ConfigError: for a retired option without a replacement, or one that contradicts another.

    """
    found = dict(options)
    # Retired values come before retired options, which may say more: always, and then chunked.
    for key, value in sorted(options.items(), key=lambda item: item[0] not in known):
        retired = _retired(key, value)
        if retired is None:
            continue
        if retired.gone:
            raise ConfigError(
                f"{key}={value!r}",
                "it was removed",
                "CHANGELOG.md says what replaces it",
                retired.gone,
            )
        if found.get(key) == value:
            del found[key]
        now = {name: value if new is ANY else new for name, new in retired.now.items()}
        for name, new in now.items():
            given = options.get(name, new) if name != key else new
            if given != new and given not in retired.over:
                raise ConfigError(
                    f"{key}={value!r} with {name}={given!r}",
                    f"{key}={value!r} is now {name}={new!r}",
                    "an option has one value",
                    f"leave {key} out",
                )
            found[name] = new
        _warn_retired(f"{key}={value}", ", ".join(f"{name}={new}" for name, new in now.items()))
    return found


def _retired(key: str, value: object) -> Retired | None:
    """Return the row of an option: of this value, or of any."""
    hashable = value if isinstance(value, str | bool | None) else ANY
    # Typed: 1 is not true.
    return RETIRED.get((key, hashable)) or RETIRED.get((key, ANY))


@lru_cache
def _warn_retired(old: str, now: str) -> None:
    replaced = f"use {now}" if now else "leave it out"
    logger.warning("%s is retired and goes in the next minor version: %s.", old, replaced)


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"kv_policy_config={text!r}",
            f"it is not JSON ({error})",
            "options are a JSON object",
            "give e.g. '{\"budget\": 0.2}'",
        ) from error
