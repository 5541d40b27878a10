# SPDX-License-Identifier: Apache-2.0
"""The stages in C++: functions of an open library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vllm_h2o.kernels.batch import DecodeBatch, PromptChunk, Scoring, StepTensors
from vllm_h2o.kernels.cache import LayerCache
from vllm_h2o.kernels.native import layout
from vllm_h2o.kernels.torch import pack, terms
from vllm_h2o.kernels.torch.rare import RareStages
from vllm_h2o.policy import Term


class NativeKernels(RareStages):
    """The C++ kernels; see :class:`vllm_h2o.kernels.interface.Kernels`.

    Head sizes are multiples of 16. What is stored has the cache's dtype; ``out`` has that or
    float32. Threads are those of torch, as many as torch would use.

    Args:
        variant: name of the instruction set that it was built for.
        library: opened by :mod:`~vllm_h2o.kernels.native.loader`.

    """

    copies_kv = False

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.library = library
        self._decode = library.h2o_decode
        self._prefill = library.h2o_prefill
        self._score_term = library.h2o_score_term
        self._pack_survivors = library.h2o_pack_survivors
        for stage in (self._decode, self._prefill, self._score_term, self._pack_survivors):
            stage.restype = None

    def decode(
        self,
        cache: LayerCache,
        batch: DecodeBatch,
        victims: torch.Tensor,
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store one new token of each request, attend and score, select the next victims."""
        if victims.dtype != torch.int32 or not victims.is_contiguous():
            raise ValueError(f"victims of {victims.dtype} with strides {victims.stride()}")
        if scoring.merge and cache.mass is None:
            raise ValueError("victims are merged in pages that hold no masses")
        self._decode(
            layout.cache_bytes(cache),
            layout.batch_bytes(batch),
            layout.tensors_bytes(cache, tensors),
            layout.scoring_bytes(scoring),
            ctypes.c_void_p(victims.data_ptr()),
        )

    def prefill(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        scoring: Scoring,
    ) -> None:
        """Store chunks of prompts after the slots in use, attend causally and score."""
        self._prefill(
            layout.cache_bytes(cache),
            b"".join(map(layout.chunk_bytes, chunks)),
            len(chunks),
            layout.tensors_bytes(cache, tensors),
            ctypes.c_int32(scoring.power if scoring.in_prompt else 0),
        )

    def score_term(
        self,
        cache: LayerCache,
        chunks: Sequence[PromptChunk],
        tensors: StepTensors,
        term: Term,
        by_age: bool,
    ) -> None:
        """Add one term of a ranking to the scores of tokens up to each chunk's end."""
        own, each = terms.rotated(chunks, tensors, term), []
        for chunk in chunks:
            terms.keep_scores(cache, chunk, term)
            window = chunk.window_scores
            apart = None if window is None else window[tensors.layer_index]
            each.append(layout.chunk_bytes(chunk, chunk.first_query(term), apart))
        self._score_term(
            layout.cache_bytes(cache),
            b"".join(each),
            len(chunks),
            layout.query_bytes(cache, own),
            layout.term_bytes(term, by_age),
        )

    def pack_survivors(
        self, caches: Sequence[LayerCache], chunks: Sequence[PromptChunk], scoring: Scoring
    ) -> None:
        """Move each KV head's survivors into slots [0, num_survivors), in order of position.

        Slots are in order of position already: a request is packed before it overwrites any.
        """
        self._pack_survivors(
            b"".join(map(layout.cache_bytes, caches)),
            len(caches),
            b"".join(map(layout.packed_bytes, chunks)),
            len(chunks),
            layout.scoring_bytes(scoring),
        )

    copy_survivors = staticmethod(pack.copy_survivors)
