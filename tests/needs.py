# SPDX-License-Identifier: Apache-2.0
"""What a test needs that a machine without registries lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.quality.texts import TextsUnavailableError, archive


def needs_texts(fetch: Callable[[], object] = archive) -> None:
    """Skip a test whose texts are not in the cache, and cannot be fetched."""
    try:
        fetch()
    except TextsUnavailableError as error:
        pytest.skip(str(error))
