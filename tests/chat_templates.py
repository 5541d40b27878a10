# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the formats of real models, for ChatML's special tokens."""

from __future__ import annotations

_HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}"

TRIMS = _HEAD + "{{ m.content.split('</think>')[-1] | trim }}" + _TAIL
"""Trims answers, and drops the thoughts within them."""
CALLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + _HEAD
    + "{{ m.content }}"
    + _CALLS
    + "{% if not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}" + _TAIL
)
"""Writes tool calls as JSON with spaces, as Qwen 2.5's does."""
COMPACT = CALLS.replace("arguments | tojson", "arguments | tojson(separators=(',', ':'))")
"""Writes arguments without spaces."""
TAGS = (
    _HEAD
    + "{{ m.content }}"
    + _CALLS
    + "<tool_call>\n<function={{ c.function.name }}>\n"
    + "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    + "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    + "</function>\n</tool_call>{% endfor %}"
    + _TAIL
)
"""Writes arguments within tags, as Qwen 3 Coder's does."""
IDS = (
    _HEAD
    + "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    + '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}'
    + _TAIL
)
"""Writes ids of calls, as Mistral's does."""
MOVES = (
    "{% for m in messages %}{% if tools and loop.last %}[TOOLS]{{ tools | tojson }}{% endif %}"
    + _HEAD.removeprefix("{% for m in messages %}")
    + "{{ m.content }}"
    + _TAIL
)
"""Writes tools before the last message, as Mistral's does."""
SINGLE = CALLS.replace(
    _CALLS,
    "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call!') }}"
    "{% endif %}" + _CALLS,
)
"""Refuses several calls, as Llama 3.1's does."""
THINKS = CALLS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% elif m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)
"""Gives thoughts back, and adds an empty one to a last answer, as Qwen 3's does in a tool loop."""
OPENS = TRIMS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""Begins thoughts, and drops them from answers, as DeepSeek R1's does."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CALLS
)
"""Refuses system messages, as Gemma's does."""
