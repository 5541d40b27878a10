# SPDX-License-Identifier: Apache-2.0
"""Write a trace as one HTML page: the template next to this file, with the data inside.

The data is JSON, and in it one blob: frame after frame, deflated, in base64::

    kept, a bit a position [pairs, ceil(len / 8)] | score's high bytes [pairs, kept] | low bytes

for the pairs of layer and KV head, layer by layer. ``kept`` is the largest number of tokens of a
pair; the scores of pairs with fewer end with -inf. A bit mask has the positions in order, and the
scores follow that order, as bfloat16: two to three digits, in planes that deflate well. Where
tokens are merged, two more planes have the number of tokens that each stands for, as a uint16.
Where a prompt's scores have several terms, the index of each token's largest term follows the
frames, a byte for each token of the prompt [pairs, prompt_len].
"""

from __future__ import annotations

import base64
import json
import zlib
from importlib import resources

import numpy as np

from vllm_h2o.trace.record import Frame, Trace

PLACE = "__TRACE__"
"""The place of the data in the template."""


def render(trace: Trace) -> str:
    """Return the page. It needs no network, and no text of a prompt becomes markup."""
    template = resources.files("vllm_h2o.trace").joinpath("page.html").read_text(encoding="utf-8")
    before, after = template.split(PLACE)
    # In JSON, so that no text ends the element that it stands in.
    return before + json.dumps(payload(trace), ensure_ascii=False).replace("<", "\\u003c") + after


def payload(trace: Trace) -> dict[str, object]:
    """Return the data of the page."""
    terms = next((f.terms for f in reversed(trace.frames) if len(f.terms) > 1), {})
    blob = b"".join(encode(frame) for frame in trace.frames)
    if terms:
        blob += np.stack([*terms.values()]).argmax(axis=0).astype(np.uint8).tobytes()
    return {
        "title": trace.title,
        "tokens": trace.tokens,
        "promptLen": trace.prompt_len,
        "layers": trace.layers,
        "heads": trace.num_kv_heads,
        "recent": trace.num_recent,
        "sinks": trace.num_sinks,
        "scored": trace.scored,
        "frames": [[frame.logical_len, frame.position.shape[2]] for frame in trace.frames],
        "masses": any(frame.mass is not None for frame in trace.frames),
        "terms": [*terms],
        "data": base64.b64encode(zlib.compress(blob, 9)).decode("ascii"),
    }


def encode(frame: Frame) -> bytes:
    """Encode a frame: the mask, the scores, and the masses if there are any."""
    pairs = frame.position.reshape(-1, frame.position.shape[2])
    kept = np.zeros((len(pairs), frame.logical_len + 1), dtype=bool)
    at = np.minimum(pairs.astype(np.int64), frame.logical_len)  # the last: where there is nothing
    np.put_along_axis(kept, at, True, axis=1)
    mask = np.packbits(kept[:, :-1], axis=1, bitorder="little")
    bits = np.ascontiguousarray(frame.score, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    encoded = mask.tobytes() + _planes(rounded)
    return encoded if frame.mass is None else encoded + _planes(frame.mass.astype(np.uint16))


def _planes(numbers: np.ndarray) -> bytes:
    """Encode 16-bit numbers: all high bytes, then all low bytes."""
    return (numbers >> 8).astype(np.uint8).tobytes() + (numbers & 0xFF).astype(np.uint8).tobytes()
