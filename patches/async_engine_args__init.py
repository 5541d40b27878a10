# SPDX-License-Identifier: Apache-2.0
"""The same as ``engine_args__init`` for the server's engine arguments.

Symbol: vllm.engine.arg_utils:AsyncEngineArgs.__init__
Why no seam: the subclass is a dataclass with an ``__init__`` of its own.
What changes: four keyword arguments more, folded into ``additional_config``.
Upstream: none yet.
Drop when: vLLM passes unknown engine arguments on to plugins.
"""

from __future__ import annotations

from vllm_h2o.patches._patch import Patch, Symbol
from vllm_h2o.patches.engine_args__init import wrap

PATCH = Patch(
    Symbol(
        "vllm.engine.arg_utils:AsyncEngineArgs.__init__",
        {"0.32": "345f776b09d8", "0.33": "4dfce9f22e4e"},
    ),
    wrap,
)
