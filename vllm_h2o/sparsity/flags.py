# SPDX-License-Identifier: Apache-2.0
"""``--contextual-sparsity`` and its options, and the same as arguments of ``LLM``."""

from __future__ import annotations

from typing import Any

from vllm_h2o.errors import SparsityError
from vllm_h2o.options.flags import Merged
from vllm_h2o.sparsity.config import KEY, MODES, SparsityConfig


def add_sparsity_flags(parser: Any) -> Any:
    """Add the two flags to a parser, in a group of their own."""
    group = parser.add_argument_group(
        title="SparsityConfig",
        description="Contextual sparsity (vllm-h2o): unused weights of the MLP stay unread.",
    )
    modes = "\n".join(f"- {mode}: {meaning}" for mode, meaning in MODES.items())
    group.add_argument(
        "--contextual-sparsity",
        default=None,
        metavar="MODE",
        help=f"Skip unused rows of a ReLU model's MLP. Off by default.\n{modes}",
    )
    group.add_argument(
        "--contextual-sparsity-config",
        action=Merged,
        default=None,
        metavar="JSON",
        help="Options as JSON, or one by one: --contextual-sparsity-config.max_tokens 4\n"
        "- max_tokens: Steps with more tokens read every row (default: 8)\n"
        "- recall: With predicted: share of the used neurons to find (default: 0.99)",
    )
    return parser


def fold_sparsity(engine_args: Any, mode: Any, options: Any) -> Any:
    """Fold the two arguments into ``engine_args.additional_config``.

    Args:
        engine_args: vLLM's EngineArgs, which change when a mode is given.
        mode: ``contextual_sparsity``, or None.
        options: ``contextual_sparsity_config``: a mapping, JSON text, or None.

    Returns:
        ``engine_args``.

    Raises:
        SparsityError: for options that cannot be used, or options without a mode.

    """
    if mode is None and options is None:
        return engine_args
    if mode is None:
        raise SparsityError(
            f"contextual_sparsity_config={options!r}",
            "no contextual_sparsity is given",
            "the options would have no effect",
            "give a mode, --contextual-sparsity exact, or leave --contextual-sparsity-config out",
        )
    config = SparsityConfig.from_options(str(mode), options)
    given = engine_args.additional_config or {}
    if SparsityConfig.from_additional_config(given) not in (None, config):
        raise SparsityError(
            f"contextual_sparsity={mode!r}",
            f"additional_config holds {given[KEY]!r}",
            "these are two configurations",
            "give one of them",
        )
    engine_args.additional_config = {**given, KEY: config.to_dict()}
    return engine_args
