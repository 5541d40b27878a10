# SPDX-License-Identifier: Apache-2.0
"""Kernels in plain torch, for any device."""
