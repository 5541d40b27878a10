# SPDX-License-Identifier: Apache-2.0
"""``--kv-policy`` and ``--kv-policy-config``, and the same as arguments of ``LLM``."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.option import help_line
from vllm_h2o.options.parsing import ADDITIONAL_CONFIG_KEY
from vllm_h2o.policy import policies


def add_flags(parser: Any) -> Any:
    """Add the two flags to a parser, in a group of their own."""
    group = parser.add_argument_group(
        title="KVPolicyConfig",
        description="KV-cache eviction (vllm-h2o): which tokens of a sequence stay in the cache.",
    )
    shelf = "\n".join(f"- {policy.name}: {policy.summary}" for policy in policies().values())
    options = [field for field in fields(KVPolicyConfig) if field.name != "name"]
    lines = "\n".join(f"- {help_line(field)}".replace("%", "%%") for field in options)
    group.add_argument(
        "--kv-policy",
        default=None,
        metavar="NAME",
        help=f"Eviction policy. Off by default.\n{shelf}".replace("%", "%%"),
    )
    group.add_argument(
        "--kv-policy-config",
        action=Merged,
        default=None,
        metavar="JSON",
        help="Options of the policy as JSON, or one by one: --kv-policy-config.budget 0.2\n"
        f"{lines}",
    )
    return parser


class Merged(argparse.Action):
    """Merges options given as JSON and one by one; the last value of a key wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Merge one more JSON object; keep other text, which is refused later."""
        try:
            given, new = _as_mapping(getattr(namespace, self.dest)), _as_mapping(values)
        except json.JSONDecodeError:
            given, new = None, values
        both = isinstance(given, dict) and isinstance(new, dict)
        setattr(namespace, self.dest, {**given, **new} if both else new)


def fold_policy(engine_args: Any, name: Any, options: Any) -> Any:
    """Fold the two arguments into ``engine_args.additional_config``.

    Args:
        engine_args: vLLM's EngineArgs, which change when a policy is named.
        name: ``kv_policy``, or None.
        options: ``kv_policy_config``: a mapping, JSON text, or None.

    Returns:
        ``engine_args``.

    Raises:
        ConfigError: for options that cannot be used, or options without a policy.

    """
    if name is None and options is None:
        return engine_args
    config = KVPolicyConfig.from_options(None if name is None else str(name), options)
    if name is None and "name" not in _as_mapping(options):
        raise ConfigError(
            f"kv_policy_config={options!r}",
            "no kv_policy is given",
            "the options would have no effect",
            "name a policy: --kv-policy h2o",
        )
    given = engine_args.additional_config or {}
    if KVPolicyConfig.from_additional_config(given) not in (None, config):
        raise ConfigError(
            f"kv_policy={name!r}",
            f"additional_config holds {given[ADDITIONAL_CONFIG_KEY]!r}",
            "these are two configurations",
            "give one of them",
        )
    engine_args.additional_config = {**given, ADDITIONAL_CONFIG_KEY: config.to_dict()}
    return engine_args


def _as_mapping(options: Any) -> Any:
    return json.loads(options) if isinstance(options, str) else options
