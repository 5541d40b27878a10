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
MODES = {
    "exact": "skip rows of fc2 whose input is zero after ReLU; loses nothing",
    "predicted": "also skip rows of fc1 that a 4-bit copy estimates to be unused",
}
"""Values of ``--contextual-sparsity``."""
MOST_TOKENS = 32
"""Most tokens of a step that skips rows."""
RECALL = 0.99
LEAST_RECALL, MOST_RECALL = 0.5, 0.9999


@dataclass(frozen=True)
class SparsityConfig:
    """Which rows are skipped, and in which steps.

    Args:
        mode: one of :data:`MODES`.
        max_tokens: steps with more tokens than this read every row.
        recall: share of the used neurons that ``predicted`` finds; None: :data:`RECALL` where
            neurons are predicted.

    Raises:
        SparsityError: for values that cannot be used.

    """

    mode: str = "exact"
    max_tokens: int = 8
    recall: float | None = None

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
        self._check_recall()

    def _check_recall(self) -> None:
        if self.mode != "predicted":
            if self.recall is not None:
                raise SparsityError(
                    f"recall={self.recall!r}",
                    f"contextual_sparsity is {self.mode}",
                    "it finds every used neuron",
                    "leave recall out, or give --contextual-sparsity predicted",
                )
            return
        recall = RECALL if self.recall is None else self.recall
        if not isinstance(recall, float) or not LEAST_RECALL <= recall <= MOST_RECALL:
            raise SparsityError(
                f"recall={recall!r}",
                f"it is a number from {LEAST_RECALL} to {MOST_RECALL}",
                "an estimate never finds every used neuron for certain",
                "give one of these, or --contextual-sparsity exact",
            )
        object.__setattr__(self, "recall", recall)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain form that ``additional_config`` carries."""
        return {name: value for name, value in asdict(self).items() if value is not None}

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
