# SPDX-License-Identifier: Apache-2.0
"""The worker's side: which slots are written, attended to, scored and evicted."""
