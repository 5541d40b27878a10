# SPDX-License-Identifier: Apache-2.0
"""Real engines, from a prompt to its text. A package, so that a fixture can last as long as it."""
