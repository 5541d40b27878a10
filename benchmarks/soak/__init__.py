# SPDX-License-Identifier: Apache-2.0
"""A server under a mixed load, with its pages counted at every step, and then killed."""
