"""A real, tiny Qwen2.5-VL policy made on the spot: model, tokenizer and image processor in one folder.

The model is Transformers' own `Qwen2_5_VLForConditionalGeneration` with a small configuration, so that every
code path (loading, rendering, M-RoPE, generation, training) is the one a 7B checkpoint takes. It starts from
random weights and is trained by the project's own commands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAG_TOKENS = tuple(f"<{slash}{tag}>" for tag in ("think", "search", "bbox", "answer") for slash in ("", "/"))
"""Action tags as single ordinary tokens: they are text, not special tokens, and decode as themselves."""

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5-VL's chat format for text and images, a default system turn included."""


def build_tokenizer(texts: Iterable[str], vocab_size: int = 640):
    """Train a byte-level BPE on `texts`; returns a fast tokenizer with Qwen's special tokens.

    A number of one digit with the space before it is one token. `vocab_size` includes the 256 bytes, the
    special tokens and the action tags.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added = len(SPECIAL_TOKENS) + len(TAG_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.add_tokens(list(TAG_TOKENS))
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config(tokenizer, **overrides):
    """The configuration of the tiny policy: vision 2 × 64, language 3 × 128, tied embeddings.

    `overrides` may hold `text` and `vision`, dictionaries that replace single fields.
    """
    from transformers import Qwen2_5_VLConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        # Sections of width 1, so that time, height and width each reach from high to low frequencies: with
        # 16 frequencies a contiguous split would leave one axis nearly constant over a page.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1] * 16},
        "tie_word_embeddings": True,
        **overrides.get("text", {}),
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [0, 1],
        **overrides.get("vision", {}),
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def build_tiny_policy(
    path: Path, texts: Iterable[str], seed: int = 0, vocab_size: int = 640, **overrides
) -> int:
    """Write a randomly initialised policy to `path`, loadable with `from_pretrained`; returns its number of
    parameters. `texts` trains the tokenizer; `seed` fixes the weights."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = build_tokenizer(texts, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(tiny_config(tokenizer, **overrides)).float()
    generation = model.generation_config
    generation.eos_token_id = model.config.text_config.eos_token_id
    generation.pad_token_id = model.config.text_config.pad_token_id
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    # White paper becomes 0, so that an empty patch carries no signal.
    Qwen2VLImageProcessorPil(
        image_mean=[1.0] * 3, image_std=[0.5] * 3, min_pixels=28 * 28, max_pixels=1024 * 784
    ).save_pretrained(path)
    (path / "tiny_policy.json").write_text(json.dumps({"schema_version": 1, "seed": seed}) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m visor.models.tiny", description="Write a tiny policy.")
    parser.add_argument("texts", type=Path, help="text file that trains the tokenizer, one text a line")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=1000, help="upper bound (default 1000)")
    arguments = parser.parse_args()
    texts = arguments.texts.read_text().splitlines(keepends=True)
    count = build_tiny_policy(arguments.output, texts, arguments.seed, arguments.vocab_size)
    print(f"{count:,} parameters → {arguments.output}")


if __name__ == "__main__":
    main()
