# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM and the policy in alternation, through ``vllm bench throughput``."""
