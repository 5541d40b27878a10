# SPDX-License-Identifier: Apache-2.0
"""Options of a policy: their values, their checks, and what they go together with."""
