# SPDX-License-Identifier: Apache-2.0
"""Contextual sparsity: rows of a ReLU model's MLP that no token of a step uses are not read."""
