"""Between vLLM's options and the policy: flags in, seams set, and what does not go refused.

Order in a process that starts an engine::

    flags or arguments --fold_policy--> additional_config["kv_policy"]
    create_engine_config: prepare (before) ... vLLM ... check_config (after)
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm_h2o.errors import ConfigError, UnsupportedError
from vllm_h2o.options.config import KVPolicyConfig
from vllm_h2o.options.parsing import ADDITIONAL_CONFIG_KEY
from vllm_h2o.options.refusals import REFUSALS, WHY_OPTION, refuse
from vllm_h2o.policy import POLICIES

SCHEDULER = "vllm_h2o.scheduler.scheduler.HeavyHitterScheduler"
WORKER = "vllm_h2o.worker.worker.HeavyHitterWorker"
BACKEND = "vllm_h2o.worker.backend.HeavyHitterBackend"


def add_flags(parser: Any) -> Any:
    """Add ``--kv-policy`` and ``--kv-policy-config`` to a parser, in a group of their own."""
    group = parser.add_argument_group(
        title="KVPolicyConfig",
        description="KV-cache eviction (vllm-h2o): which tokens of a sequence stay in the cache.",
    )
    policies = "\n".join(f"- {policy.name}: {policy.summary}" for policy in POLICIES.values())
    group.add_argument(
        "--kv-policy",
        default=None,
        metavar="NAME",
        help=f"Eviction policy. Off by default.\n{policies}",
    )
    group.add_argument(
        "--kv-policy-config",
        action=_Merged,
        default=None,
        metavar="JSON",
        help="Options of the policy as JSON, or one by one: --kv-policy-config.budget 0.2\n"
        "- budget: slots a sequence may hold (int), or a share of budget_basis (float up to 1) "
        "rounded up to whole pages, or full; 0.2 by default\n"
        "- budget_basis: max_model_len (default), prompt, or request (prompt and max_tokens)\n"
        "- min_budget: fewest slots, whatever the share comes to\n"
        "- max_budget: most that a request may ask for as kv_budget\n"
        "- recent_ratio: share of the budget that is the recent window; 0.5 by default\n"
        "- num_sink_tokens: first tokens never evicted; 0, for streaming 4\n"
        "- protect_prompt_tokens: first tokens of a prompt that are never evicted; 0\n"
        "- prefill: evict from a prompt at its end (full, default), likewise but scored by its "
        "last observation_window queries (window; 32), or after each chunk (chunked)\n"
        "- score: sum (default), sum_squares, mean or mean_squares of attention; replay: "
        "mean_squares, and a prompt's queries are asked again from behind it\n"
        "- score_skip_recent: a query scores tokens at least so many positions older; 0\n"
        "- granularity: evict a token (default) or a block at a time\n"
        "- seed: of the random policy\n"
        "- kernels: on a CPU native (C++) or torch; auto takes the fastest that are there",
    )
    return parser


class _Merged(argparse.Action):
    """Options given as JSON and one by one, in any number: none is lost, the last of a key wins."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Merge one more JSON object; text that is none is kept, to be refused."""
        try:
            given, new = _as_mapping(getattr(namespace, self.dest)), _as_mapping(values)
        except json.JSONDecodeError:
            given, new = None, values
        both = isinstance(given, dict) and isinstance(new, dict)
        setattr(namespace, self.dest, {**given, **new} if both else new)


def fold_policy(engine_args: Any, name: Any, options: Any) -> Any:
    """Fold the two arguments into ``engine_args.additional_config``.

    Args:
        engine_args: vLLM's EngineArgs; changed when a policy is named.
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
            "no kv_policy",
            "options without a policy would be a silent no-op",
            "name one: --kv-policy h2o",
        )
    given = engine_args.additional_config or {}
    if KVPolicyConfig.from_additional_config(given) not in (None, config):
        raise ConfigError(
            f"kv_policy={name!r}",
            f"additional_config holds {given[ADDITIONAL_CONFIG_KEY]!r}",
            "the policy is given twice, differently",
            "give it once",
        )
    engine_args.additional_config = {**given, ADDITIONAL_CONFIG_KEY: config.to_dict()}
    return engine_args


def prepare(engine_args: Any) -> KVPolicyConfig | None:
    """Set vLLM's options for a policy, before vLLM makes its config of them.

    Returns:
        The policy; None when there is none, and nothing was changed.

    Raises:
        UnsupportedError: when the user asks for something else at one of these options.

    """
    config = KVPolicyConfig.from_additional_config(engine_args.additional_config)
    if config is None:
        return None
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_h2o.plugin import activate_front_end

    activate_front_end()
    # Carried in full, so that every process reads the same, whatever form the user gave.
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: config.to_dict(),
    }
    custom = AttentionBackendEnum.CUSTOM
    backend = AttentionConfig.validate_backend_before(engine_args.attention_backend)
    backend = backend or engine_args.attention_config.backend
    settings = (
        ("scheduler_cls", engine_args.scheduler_cls, (None, SCHEDULER), SCHEDULER),
        ("worker_cls", engine_args.worker_cls, ("auto", WORKER), WORKER),
        ("attention_backend", backend, (None, custom), custom),
    )
    for option, asked, compatible, value in settings:
        if asked not in compatible:
            raise UnsupportedError(
                f"{option}={asked!s} with --kv-policy {config.name}",
                f"the policy needs {option}={value!s}",
                WHY_OPTION[option],
                f"leave {option} out, or run without --kv-policy",
            )
        setattr(engine_args, option, value)
    engine_args.attention_config.backend = None  # given once, as attention_backend
    # On where it is asked for: a prompt's peak is then its own pages and those of its survivors.
    engine_args.enable_prefix_caching = bool(engine_args.enable_prefix_caching)
    return config


def check_config(vllm_config: Any, config: KVPolicyConfig | None) -> Any:
    """Refuse what does not go with the policy.

    Args:
        vllm_config: vLLM's finished config.
        config: the policy; None lets everything pass.

    Returns:
        ``vllm_config``.

    Raises:
        UnsupportedError: for the first of :data:`REFUSALS` that applies.
        ConfigError: when the budget comes to too few slots.

    """
    if config is None:
        return vllm_config
    refuse(REFUSALS, vllm_config, f"--kv-policy {config.name}", "the engine has")
    config.resolve(vllm_config.model_config.max_model_len, vllm_config.cache_config.block_size)
    return vllm_config


def add_stat_logger(manager: Any, vllm_config: Any) -> None:
    """Have the front end show the policy's numbers.

    Args:
        manager: vLLM's StatLoggerManager, finished; gets one logger more when there is a policy.
        vllm_config: the engine's config.

    """
    if KVPolicyConfig.from_additional_config(vllm_config.additional_config) is None:
        return
    from vllm_h2o.metrics import PolicyStatLogger

    # First, because it takes out of the statistics what the others do not know.
    manager.stat_loggers.insert(0, PolicyStatLogger(vllm_config, manager.engine_indexes))


def _as_mapping(options: Any) -> Any:
    return json.loads(options) if isinstance(options, str) else options
