# SPDX-License-Identifier: Apache-2.0
"""SnapKV: what the prompt's last queries look at, and the recent window (arXiv 2404.14469).

No other query of the prompt counts, so requests may share the pages of a common prefix.

Differs from the paper: a token's value is the largest contribution of those queries, not their sum,
and it reaches the twelve tokens after it, where the paper pools over a neighbourhood. Generated
tokens are evicted, too: after the prompt every query adds to the scores.
"""

from vllm_h2o.policy.base import Policy
from vllm_h2o.policy.ranking import Ranking, Term

SNAPKV = Policy(
    name="snapkv",
    summary="what the prompt's last queries look at + recent tokens (shares prefixes)",
    ranking=Ranking(Term("window", "max", reach=12)),
)
