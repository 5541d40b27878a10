# SPDX-License-Identifier: Apache-2.0
"""Triton implementation for GPUs."""
