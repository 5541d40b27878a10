# SPDX-License-Identifier: Apache-2.0
"""A router that replays an engine's KV cache events finds conversations that it can continue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, maybe_convert_block_hash
from vllm.v1.request import Request

from tests.e2e.conversations import own_text
from tests.e2e.harness import Probe, engine, tiny_llama
from vllm_h2o.scheduler.events import MEDIUM

PAGE = 16
SMALL = {"block_size": PAGE, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 128}
TIMEOUT_MS = 20_000


class Router:
    """Replays all that a publisher has sent, over its sockets."""

    def __init__(self, llm: LLM, replay: str) -> None:
        self.publisher = Probe(llm).scheduler.kv_event_publisher
        assert isinstance(self.publisher, ZmqEventPublisher)
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(replay)
        self.hash = get_request_block_hasher(PAGE, sha256)

    def known(self) -> Counter[Any]:
        """Hashes of entries, each as often as it is stored."""
        self.publisher._event_queue.join()  # all are sent, or may be asked for
        self.socket.send_multipart((b"", (0).to_bytes(8, "big")))
        known: Counter[Any] = Counter()
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            assert self.socket.poll(TIMEOUT_MS)
            _, _, number, payload = self.socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return known
            for event in decoder.decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    known.clear()
                elif event.medium == MEDIUM:
                    sign = 1 if isinstance(event, BlockStored) else -1
                    for block_hash in event.block_hashes:
                        known[block_hash] += sign

    def num_found(self, prompt: Sequence[int], salt: str | None) -> int:
        """Whole blocks at the beginning of a prompt that entries hold."""
        known = self.known()
        assert min(known.values(), default=0) >= 0
        hashes = self.hash(Request("", [*prompt], SamplingParams(), None, cache_salt=salt))
        found = [known[maybe_convert_block_hash(block_hash)] > 0 for block_hash in hashes]
        return [*found, False].index(False)


def say(llm: LLM, prompt: Sequence[int], salt: str | None, max_tokens: int = 20) -> RequestOutput:
    """The answer of one request."""
    salted = {} if salt is None else {"cache_salt": salt}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [*prompt], **salted}], params, use_tqdm=False)
    return output


def changes_weights(worker: Any) -> None:
    """A function that vLLM runs in each worker may do anything."""


def sleeps(llm: LLM) -> None:
    """Discard the cache, as a GPU does at this level."""
    llm.sleep(level=1)
    llm.wake_up()


def fills(llm: LLM) -> None:
    """Other conversations take all pages."""
    for index in range(10, 26):
        say(llm, own_text(index, 90), None)


ENDS: tuple[Callable[[LLM], Any], ...] = (
    fills,
    lambda llm: llm.collective_rpc(changes_weights),
    lambda llm: llm.reset_prefix_cache(),
    sleeps,
)


def test_router_finds_what_an_engine_continues(tmp_path: Path) -> None:
    """Turn after turn, by salt, until the entry goes: other requests, new weights, a reset."""
    sockets = {name: f"ipc://{tmp_path}/{name}" for name in ("endpoint", "replay_endpoint")}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **sockets}
    own = {"budget": 64, "continuation": True}
    model = tiny_llama(tmp_path / "model", 4, 2)
    with engine(model, "h2o", own, **SMALL, kv_events_config=events) as llm:
        router = Router(llm, sockets["replay_endpoint"])
        for salt, end in zip((None, "mine", None, "mine"), ENDS, strict=True):
            text = own_text(0, 90)
            for _ in range(3):
                answer = say(llm, text, salt)
                text = [*text, *answer.outputs[0].token_ids, *own_text(1, 9)]
                # The last token that an answer samples is never computed.
                num_held = len(text) - 9 - 1
                assert router.num_found(text, salt) == num_held // PAGE
                assert router.num_found(text, "another") == 0
                assert say(llm, text, salt, 1).num_cached_tokens == num_held
            end(llm)
            say(llm, own_text(2, 30), None)  # events leave with a step
            assert router.num_found(text, salt) == 0
            assert say(llm, text, salt, 1).num_cached_tokens == 0
        router.socket.close(0)
