# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` of a small model of random weights, and the processes that it consists of."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The command `vllm`, wherever it is installed to."""
PAGE = 32
VOCABULARY = 512
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
START_SECONDS = 600
WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127)), "\n"]
"""The first words of the vocabulary, by token; the others have several letters."""
CHAT_TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}{{ call.function | tojson }}
{% endfor %}{% endfor %}assistant: """


def write_model(folder: Path, max_len: int) -> None:
    """A Llama whose weights are wide, so that first choices are clear, and its tokenizer.

    Args:
        folder: where it goes.
        max_len: tokens of its longest sequence.

    """
    from transformers import LlamaConfig

    from benchmarks.throughput.models import write_random

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
    )
    write_random(config, folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """A character for each of the first tokens, of which tool calls are made, then words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = [*WORDS, *(f"w{i} " for i in range(len(WORDS), VOCABULARY))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        bos_token="<s>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


class Server:
    """The processes of one ``vllm serve``; as a context it is there until the end.

    Attributes:
        vllm: the command `vllm`; tests have one that starts sooner.

    Args:
        model: the model's folder.
        log: takes what the server prints.
        flags: options of ``vllm serve``.
        plugins: a folder with an entry point that its processes load, or None.
        environment: of its processes, on top of this one's.

    """

    vllm: tuple[str, ...] = VLLM

    def __init__(
        self,
        model: Path,
        log: Path,
        flags: list[str],
        plugins: Path | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.model, self.log, self.url = str(model), log, f"http://127.0.0.1:{port}"
        self.children: list[psutil.Process] = []
        path = [str(plugins)] if plugins else []
        path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [*self.vllm, "serve", self.model]
        command += ["--host=127.0.0.1", f"--port={port}", *flags]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)},
            )

    def __enter__(self) -> Server:
        with ExitStack() as stack:
            stack.callback(self.stop)
            self._wait()
            self.children = psutil.Process(self.process.pid).children(recursive=True)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
        raise RuntimeError(f"the server does not answer:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End it and whatever it has started."""
        if self.process.poll() is None:  # it may not have come to the end of its start
            self.children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(self.children, timeout=30)[1]:
            process.kill()

    def get(self, path: str) -> str:
        """The body at ``path``."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric of ``/metrics`` over its labels."""
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", self.get("/metrics"), re.M)
        if not found:
            raise KeyError(name)
        return sum(map(float, found))

    def processes(self) -> dict[str, psutil.Process]:
        """By what they are: ``server``, ``engine`` and ``worker``."""
        found = {"server": psutil.Process(self.process.pid)}
        for process in self.children:
            for role, title in (("engine", "VLLM::EngineCore"), ("worker", "VLLM::Worker")):
                if " ".join(process.cmdline()).startswith(title):
                    found[role] = process
        return found
