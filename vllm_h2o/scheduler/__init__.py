# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side, in the engine-core process: integers only."""
