# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of a budget on a real model: see README.md in the folder above."""
