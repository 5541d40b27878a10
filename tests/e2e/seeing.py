# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random weights that see images: LLaVA, and Qwen2.5-VL with M-RoPE."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vllm.model_executor.models import ModelRegistry

from tests.e2e.zoo import SMALL

SEEING = ("llava", "qwen2_5_vl")
"""Types in their configs."""
LLAVA_WORDS = {200: "<image>"}
QWEN_WORDS = {
    200: "<|image_pad|>",
    201: "<|video_pad|>",
    202: "<|vision_start|>",
    203: "<|vision_end|>",
}
_VISION = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2}


def picture_token(kind: str) -> list[int]:
    """What stands for an image in a prompt: one token, which vLLM makes as many as it needs."""
    return [200] if kind == "llava" else [202, 200, 203]


def write(kind: str, folder: Path) -> Path:
    """A model with its tokenizer and processor.

    Args:
        kind: one of :data:`SEEING`.
        folder: where it goes.

    Returns:
        The folder.

    """
    model, processor = _llava() if kind == "llava" else _qwen()
    architecture = type(model).__name__
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    # As in LLaVA's published files, and as vLLM looks for them.
    named = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): weight
        for name, weight in load_file(path).items()
    }
    save_file(named, path, {"format": "pt"})
    processor.save_pretrained(folder)
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    return folder


def _llava() -> tuple[Any, Any]:
    """16 tokens an image, whatever its size."""
    vision = hf.CLIPVisionConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=64, patch_size=16, projection_dim=64,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**SMALL),
        vision_config=vision,
        image_token_id=200,
        image_token_index=200,
        image_seq_length=16,
    )
    processor = hf.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}),
        _tokenizer(LLAVA_WORDS),
        patch_size=16,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return hf.LlavaForConditionalGeneration(config).float(), processor


def _qwen() -> tuple[Any, Any]:
    """A token for 28 by 28 pixels; heads of 32, whose 16 frequencies belong to three axes."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {**_VISION, "depth": 2, "patch_size": 14, "out_hidden_size": 128}
    vision |= {"fullatt_block_indexes": [1], "window_size": 56}
    config = hf.Qwen2_5_VLConfig(
        text_config={**SMALL, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=200,
        video_token_id=201,
        vision_start_token_id=202,
        vision_end_token_id=203,
    )
    size = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 30}}
    processor = hf.Qwen2_5_VLProcessor(
        Qwen2VLImageProcessorPil(**size),
        _tokenizer(QWEN_WORDS),
        hf.Qwen2VLVideoProcessor(**size),
        chat_template="",
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config).float(), processor


def _tokenizer(special: dict[int, str]) -> hf.PreTrainedTokenizerFast:
    """A word for each of 256 tokens."""
    words = {special.get(token, f"w{token}"): token for token in range(256)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special.values()))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w3", pad_token="w0", bos_token="w1", eos_token="w2"
    )
