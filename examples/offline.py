# SPDX-License-Identifier: Apache-2.0
"""Generate with a policy, offline: ``python examples/offline.py MODEL --prompt TEXT``.

The budget is a fifth of the longest sequence. The second output comes from the same prompt with a
budget of its own: every token is kept.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams


def main() -> None:
    """Print the model's text from an evicted cache and from a full one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or a name such as facebook/opt-6.7b")
    parser.add_argument("--prompt", default="The old sailor told us about the storm. " * 20)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, run slower")
    arguments = parser.parse_args()
    llm = LLM(
        arguments.model,
        max_model_len=arguments.max_model_len,
        enforce_eager=arguments.enforce_eager,
        kv_policy="h2o",
        kv_policy_config={"budget": 0.2},
    )
    for budget in (0.2, "full"):
        params = SamplingParams(temperature=0, max_tokens=64, extra_args={"kv_budget": budget})
        output = llm.generate(arguments.prompt, params, use_tqdm=False)[0]
        print(f"kv_budget={budget}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
