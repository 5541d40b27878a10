"""From what users write, on a command line, in JSON or in a mapping, to fields and their values."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from vllm_h2o.errors import ConfigError

ADDITIONAL_CONFIG_KEY = "kv_policy"

RETIRED: dict[tuple[str, str], dict[str, str]] = {
    ("score", "replay"): {"score": "second_pass"},
    ("name", "h2o_mean"): {"name": "h2o", "score": "mean_squares"},
    ("name", "h2o_replay"): {"name": "h2o", "score": "second_pass"},
}
"""(option, retired value) -> the options that say it now. Drop when: 0.2."""

logger = logging.getLogger("vllm.kv_policy")


def named_options(name: str | None, options: object, known: Sequence[str]) -> dict[str, Any]:
    """Fields of ``--kv-policy NAME`` and ``--kv-policy-config '{...}'``, either of them optional.

    Args:
        name: of the policy.
        options: a mapping, JSON text, or None.
        known: names of the fields.

    Raises:
        ConfigError: for what is no mapping, two names, or a field that is not known.

    """
    if options is None:
        options = {}
    if isinstance(options, str):
        options = _parse_json(options)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"kv_policy_config={options!r}",
            f"a {type(options).__name__}",
            "options are a mapping of field names to values",
            "give a JSON object such as '{\"budget\": 0.2}'",
        )
    merged = dict(options)
    if name is not None and merged.setdefault("name", name) != name:
        raise ConfigError(
            f"kv_policy={name!r} and name={merged['name']!r}",
            "two different policies",
            "an engine runs one policy",
            "name the policy once",
        )
    for key in merged:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"key {key!r} in the policy's configuration",
                f"the keys are {', '.join(known)}",
                "a key that nothing reads would be a silent no-op",
                f"did you mean {close[0]!r}?" if close else "remove it",
            )
    return _current({str(key): number(value) for key, value in merged.items()})


def carried_options(additional_config: object) -> object:
    """What vLLM's ``additional_config`` holds of a policy; None when no policy is asked for.

    Raises:
        ConfigError: for a key that is almost the right one, or an empty policy.

    """
    if not isinstance(additional_config, Mapping):
        return None
    for key in additional_config:
        if misspells(key, ADDITIONAL_CONFIG_KEY):
            raise ConfigError(
                f"key {key!r} in additional_config",
                f"the policy and its options are read from {ADDITIONAL_CONFIG_KEY!r} alone",
                "a key that nothing reads would be a silent no-op",
                f'give {{"{ADDITIONAL_CONFIG_KEY}": {{"name": "h2o", "budget": 0.2}}}}',
            )
    options = additional_config.get(ADDITIONAL_CONFIG_KEY)
    if options == {}:
        raise ConfigError(
            f"{ADDITIONAL_CONFIG_KEY}={{}} in additional_config",
            "neither a policy nor an option",
            "whether it asks for a policy is anybody's guess",
            'name one, {"name": "h2o"}, or leave the key out',
        )
    return options


def misspells(key: object, wanted: str) -> bool:
    """Whether a key is almost the wanted one, and not it."""
    plain = str(key).lower().replace("-", "_")
    return key != wanted and (
        plain.startswith(wanted) or bool(get_close_matches(plain, [wanted], cutoff=0.85))
    )


def number(value: object) -> object:
    """A numeral that a command line left as text, as the number it spells in ASCII."""
    if isinstance(value, str) and value.isascii():
        for parse in (int, float):
            try:
                return parse(value)
            except ValueError:
                continue
    return value


def _current(options: dict[str, Any]) -> dict[str, Any]:
    """Options, with what has replaced retired spellings."""
    found = dict(options)
    for key, value in options.items():
        for current, means in RETIRED.get((key, str(value)), {}).items():
            _warn_retired(key, str(value))
            if current != key and found.get(current, means) != means:
                raise ConfigError(
                    f"{key}={value!r} and {current}={found[current]!r}",
                    f"{key}={value!r} means {current}={means!r}",
                    "one of them would be a silent no-op",
                    f"leave {key}={value!r} out",
                )
            found[current] = means
    return found


@lru_cache
def _warn_retired(key: str, value: str) -> None:
    now = ", ".join(f"{option}={means}" for option, means in RETIRED[key, value].items())
    logger.warning(
        "%s=%s is now called %s; the old name goes in the next minor version.", key, value, now
    )


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"kv_policy_config={text!r}",
            f"not JSON ({error})",
            "options are a JSON object",
            "give e.g. '{\"budget\": 0.2}'",
        ) from error
