# SPDX-License-Identifier: Apache-2.0
"""Every token kept, through the same pages and kernels: measures the machinery, evicts nothing."""

from vllm_h2o.policy.base import Policy

FULL = Policy(
    name="full",
    summary="every token kept, through the same pages (measures the machinery)",
    evicts=False,
)
