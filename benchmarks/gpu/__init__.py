# SPDX-License-Identifier: Apache-2.0
"""Checks for a machine with a GPU: ``make gpu-check``."""
