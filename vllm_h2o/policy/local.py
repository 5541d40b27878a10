# SPDX-License-Identifier: Apache-2.0
"""Recent tokens only: a sliding window. The H2O paper's failing baseline, kept for comparison."""

from vllm_h2o.policy.base import Policy

LOCAL = Policy(name="local", summary="recent tokens only (a baseline that degenerates)")
