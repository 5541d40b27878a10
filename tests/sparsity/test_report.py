# SPDX-License-Identifier: Apache-2.0
"""``vllm-h2o sparsity``: its figures are those of the model, and follow from one another."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.throughput.models import write_sparse, write_tokenizer
from tests.tiny_models import two_layer_opt
from vllm_h2o.cli import main
from vllm_h2o.sparsity.report import BATCHES, measure

TEXT = " ".join(f"w{3 + i * i % 200}" for i in range(2100))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, of which a tenth of the neurons is used."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, 256)
    assert len(AutoTokenizer.from_pretrained(folder)(TEXT).input_ids) == 2100
    return write_sparse(two_layer_opt(128, 512), folder, 0.9)


def test_report_finds_zeros_and_recall(model: str) -> None:
    """Within .005 of the recall that is asked for; exact changes nothing."""
    report = measure(model, TEXT, 0.99)
    assert len(report.layers) == 2
    for layer in report.layers:
        assert layer.zeros == pytest.approx(0.9, abs=0.03)
        assert layer.recall == pytest.approx(0.99, abs=0.005)
        assert layer.used[1] == pytest.approx(1 - layer.zeros)
        assert list(layer.used.values()) == sorted(layer.used.values())
        for b in BATCHES:
            assert layer.predicted[b] <= layer.used[b] and layer.predicted[b] <= layer.kept[b]
    assert report.nll["exact"] == pytest.approx(report.nll["dense"], abs=1e-5)
    assert report.nll["predicted"] == pytest.approx(report.nll["dense"], abs=0.01)
    assert report.nll["predicted"] != report.nll["dense"]


def test_report_counts_bytes(model: str) -> None:
    """Two matrices of 512 x 128 in float32 a layer, and half a byte for each number of a copy."""
    report = measure(model, TEXT, 0.99)
    matrix = 512 * 128 * 4
    for b in BATCHES:
        saved = {mode: report.bytes["dense"][b] - read[b] for mode, read in report.bytes.items()}
        fewer = sum(1 - layer.used[b] for layer in report.layers)
        assert saved["exact"] == pytest.approx(matrix * fewer)
        fewer = sum(2 - layer.predicted[b] - layer.kept[b] for layer in report.layers)
        copy = 512 * 128 // 2 + 512 * 2 * 2 + 512 * 4
        assert saved["predicted"] == pytest.approx(matrix * fewer - 2 * copy)
    rest = 4 * (128 * 128 + 128) + 512 + 128 + 2 * 2 * 128
    assert report.bytes["dense"][1] == 2 * (2 * matrix + 4 * rest) + 4 * (256 * 128 + 256)


def test_command_prints_tables(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By layer, by mode and by number of tokens."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    assert main(["sparsity", model, "--text", str(path), "--recall", "0.95"]) == 0
    printed = capsys.readouterr().out
    for start in ("0 ", "1 ", "mean ", "negative log-likelihood", "MB of weights a step"):
        assert f"\n{start}" in printed
    assert printed.splitlines()[0].split()[:3] == ["layer", "zeros", "recall"]


@pytest.mark.parametrize(
    ("text", "recall", "words"),
    [("w3 w4", "0.99", "it has 2 tokens"), (TEXT, "1.5", "a number from 0.5 to 0.9999")],
)
def test_command_refuses(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    recall: str,
    words: str,
) -> None:
    """A text that is too short, and a share that no estimate reaches."""
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert main(["sparsity", model, "--text", str(path), "--recall", recall]) == 2
    assert words in capsys.readouterr().err
