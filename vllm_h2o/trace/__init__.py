# SPDX-License-Identifier: Apache-2.0
"""Record the tokens that the cache keeps, step by step, and write a page that shows them."""
