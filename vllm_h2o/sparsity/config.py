# SPDX-License-Identifier: Apache-2.0
"""The configuration of contextual sparsity, carried in ``additional_config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm_h2o.errors import SparsityError
from vllm_h2o.options.parsing import number

KEY = "contextual_sparsity"
"""Key in ``additional_config``, and the name of the quantization that vLLM is given."""
MODES = {"exact": "skip rows of fc2 whose input is zero after ReLU; loses nothing"}
"""Values of ``--contextual-sparsity``."""
MOST_TOKENS = 32
"""Most tokens of a step that skips rows."""


@dataclass(frozen=True)
class SparsityConfig:
    """Which rows are skipped, and in which steps.

    Args:
        mode: one of :data:`MODES`.
        max_tokens: steps with more tokens than this read every row.

    Raises:
        SparsityError: for values that cannot be used.

    """

    mode: str = "exact"
    max_tokens: int = 8

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SparsityError(
                f"contextual_sparsity={self.mode!r}",
                f"the modes are {', '.join(MODES)}",
                "no other is known",
                "give --contextual-sparsity exact",
            )
        whole = isinstance(self.max_tokens, int) and not isinstance(self.max_tokens, bool)
        if not whole or not 1 <= self.max_tokens <= MOST_TOKENS:
            raise SparsityError(
                f"max_tokens={self.max_tokens!r}",
                f"it is a whole number from 1 to {MOST_TOKENS}",
                "more tokens use nearly every row",
                "give one of these, or leave max_tokens out",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plain form that ``additional_config`` carries."""
        return asdict(self)

    @classmethod
    def from_options(cls, mode: str, options: object) -> SparsityConfig:
        """Read ``--contextual-sparsity MODE`` and ``--contextual-sparsity-config '{...}'``.

        Args:
            mode: one of :data:`MODES`.
            options: a mapping, JSON text, or None.

        Raises:
            SparsityError: for options that cannot be used.

        """
        try:
            given = json.loads(options) if isinstance(options, str) else options or {}
        except json.JSONDecodeError:
            given = None
        known = [field.name for field in fields(cls) if field.name != "mode"]
        if not isinstance(given, Mapping) or not set(given) <= set(known):
            raise SparsityError(
                f"contextual_sparsity_config={options!r}",
                f"the options are {', '.join(known)}",
                "they are read as a JSON object",
                "give e.g. '{\"max_tokens\": 8}'",
            )
        values: dict[str, Any] = {key: number(value) for key, value in given.items()}
        return cls(mode, **values)

    @classmethod
    def from_additional_config(cls, carried: object) -> SparsityConfig | None:
        """Read vLLM's ``additional_config``; None when it asks for no sparsity."""
        options = carried.get(KEY) if isinstance(carried, Mapping) else None
        if options is None:
            return None
        if isinstance(options, str):
            return cls.from_options(options, None)
        own = {"mode": "exact", **options}
        return cls.from_options(own.pop("mode"), own)
