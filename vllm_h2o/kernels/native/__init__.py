# SPDX-License-Identifier: Apache-2.0
"""Torch implementation for CPUs, batched over requests and heads."""
