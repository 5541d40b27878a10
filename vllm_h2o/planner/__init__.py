# SPDX-License-Identifier: Apache-2.0
"""Count the sequences that fit, from a model's config: no engine, no vLLM, no weights."""
