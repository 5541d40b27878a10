# SPDX-License-Identifier: Apache-2.0
"""Checks of a budget in slots, once the length of sequences and the page size are known."""

from __future__ import annotations

from tempfile import NamedTemporaryFile

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.options import Options
from vllm_h2o.pages import num_pages
from vllm_h2o.policy import Budget
from vllm_h2o.policy.budget import minimum_slots


def counted(slots: int) -> str:
    """Return a number of slots in words."""
    return f"{slots} slot{'' if slots == 1 else 's'}"


def check_slots(
    options: Options, slots: int, meaning: str, block_size: int = 1, longest: int | None = None
) -> None:
    """Refuse a budget with which a request cannot continue.

    Args:
        options: with the budget.
        slots: slots of the budget.
        meaning: ``slots``, in words.
        block_size: slots of a page.
        longest: longest sequence, in tokens; None: not known yet.

    Raises:
        ConfigError: when there are too few.

    """
    sinks, schedule = options.num_sinks, options.schedule
    least = minimum_slots(options.effective_recent_ratio, sinks, schedule, block_size)
    if schedule.by_page:
        slots = num_pages(slots, block_size) * block_size
    if slots < least:
        one = type(options.budget) is int and options.budget == 1
        hint = "; budget=1 is one token, and full is every token" if one else ""
        whole = f" in pages of {block_size}" if schedule.by_page and block_size > 1 else ""
        remedy = f"give a budget of at least {least} tokens, or fewer sinks{hint}"
        if longest is not None and isinstance(options.budget, float):
            remedy = f"give a larger --max-model-len, {remedy.removeprefix('give ')}"
        if longest is not None and longest < least:
            remedy = f"give --max-model-len {least} or more, or fewer sinks"
        raise ConfigError(
            f"budget={options.budget!r}",
            meaning,
            f"{sinks} sinks, the recent window and the next token need {least} slots{whole}",
            remedy,
        )


def check_cap(options: Options, slots: int, meaning: str, limit: int) -> None:
    """Refuse a budget above ``max_budget``.

    Args:
        options: with the budget.
        slots: slots of the budget.
        meaning: ``slots``, in words.
        limit: slots of ``max_budget``.

    Raises:
        ConfigError: when it is above it.

    """
    if slots > limit:
        raise ConfigError(
            f"budget={options.budget!r}",
            meaning,
            f"max_budget={options.max_budget!r} is {limit} slots",
            f"ask for at most {options.max_budget!r}",
        )


def check_length(options: Options, max_model_len: int) -> None:
    """Refuse a ``min_budget`` above the longest sequence.

    Args:
        options: the policy's.
        max_model_len: longest sequence, in tokens.

    Raises:
        ConfigError: for such a ``min_budget``.

    """
    if options.min_budget > max_model_len:
        raise ConfigError(
            f"min_budget={options.min_budget}",
            f"max_model_len={max_model_len} is the longest sequence",
            "every sequence would be kept whole",
            "give a smaller min_budget, or leave it out",
        )


def check_positions(options: Options, asked: str, budget: Budget, chunk: int, longest: int) -> None:
    """Refuse a budget that leaves no positions for a step's tokens, where positions roll.

    Args:
        options: with ``position_limit``.
        asked: the budget, in the user's words.
        budget: the slots.
        chunk: most tokens of one step.
        longest: most tokens of a request.

    Raises:
        ConfigError: when resident tokens and such a step need more positions than there are.

    """
    limit = options.position_limit
    if limit is None:
        return
    needed = min(max(budget.most_slots(chunk), budget.capacity + 1), longest)
    if needed > limit:
        raise ConfigError(
            f"{asked} with positions={options.positions}",
            f"{budget.capacity} slots and the {chunk} tokens of a step (--max-num-batched-tokens) "
            f"need {needed} positions",
            f"positions roll below {limit}",
            "give a smaller budget in tokens, or a smaller --max-num-batched-tokens",
        )


def check_keeps(options: Options) -> None:
    """Refuse a folder for caches that cannot be made or written to.

    Raises:
        ConfigError: with the system's reason.

    """
    path = options.continuation_folder
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"continuation={options.continuation}",
            str(error),
            "every worker writes files there",
            "name a folder that can be written to",
        ) from error
