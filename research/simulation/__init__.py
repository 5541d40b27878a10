# SPDX-License-Identifier: Apache-2.0
"""Scores tried out in plain torch, on given tokens, before any became a policy."""
