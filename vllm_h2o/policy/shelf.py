# SPDX-License-Identifier: Apache-2.0
"""The policies by name: those of this package, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from types import MappingProxyType

from vllm_h2o.policy.base import Policy
from vllm_h2o.policy.full import FULL
from vllm_h2o.policy.h2o import H2O
from vllm_h2o.policy.h2o2 import H2O2
from vllm_h2o.policy.local import LOCAL
from vllm_h2o.policy.snapkv import SNAPKV
from vllm_h2o.policy.streaming import STREAMING

GROUP = "vllm_h2o.policies"
"""The group of entry points. Each names one :class:`Policy`."""

_SHELF: dict[str, Policy] = {p.name: p for p in (H2O, H2O2, SNAPKV, STREAMING, LOCAL, FULL)}


def register_policy(policy: Policy) -> Policy:
    """Put a policy on the shelf of this process. Returns it.

    A server has several processes: there a package names its policy as an entry point of the group
    ``vllm_h2o.policies``, which every process reads.

    Raises:
        ValueError: when another policy has the name already.

    """
    if _SHELF.setdefault(policy.name, policy) != policy:
        raise ValueError(f"there is another policy {policy.name!r}: choose another name")
    return policy


def policies() -> Mapping[str, Policy]:
    """Every policy, by name."""
    _load_entry_points()
    return MappingProxyType(_SHELF)


@lru_cache
def _load_entry_points() -> None:
    for entry in entry_points(group=GROUP):
        found = entry.load()
        if not isinstance(found, Policy):
            raise ValueError(f"entry point {entry.name} of {GROUP} is no Policy: {found!r}")
        register_policy(found)
