# SPDX-License-Identifier: Apache-2.0
"""Helpers for refused configurations."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_h2o.errors import ConfigError
from vllm_h2o.options.config import KVPolicyConfig


def refusal(*args: Any, **options: Any) -> str:
    """Return the message with which a configuration is refused."""
    with pytest.raises(ConfigError) as caught:
        KVPolicyConfig.from_options(*args) if args else KVPolicyConfig(**options)
    return str(caught.value)
