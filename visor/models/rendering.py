"""Messages → token ids in Qwen's chat format, and image references → pixels.

One turn is `<|im_start|>role\\n…<|im_end|>\\n`, one image `<|vision_start|>` + n × `<|image_pad|>` +
`<|vision_end|>` with n = width · height / 784 of the resized image. No system turn is added: what is given is
what is rendered. Text is data: a special token spelled out in a question, a page or a reply stays plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from visor.models.base import ContextTooLong, ImageSource, TooManyImages
from visor.models.cache import LRUCache
from visor.models.smart_resize import smart_resize
from visor.types import ImagePart, ImageRef, Message, TextPart

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VISION_START, VISION_END, IMAGE_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"

Span = tuple[int, int]
"""Start and end (exclusive) in a sequence of ids."""


@dataclass
class Encoded:
    """Rendered messages; L = number of ids, image pads expanded."""

    input_ids: list[int] = field(default_factory=list)
    """(L,)"""
    images: list[ImageRef] = field(default_factory=list)
    """In order of appearance."""
    image_sizes: list[tuple[int, int]] = field(default_factory=list)
    """(width, height) of each image as the model sees it, pixels."""
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    """(t, h, w) of each image in patches of 14 pixels (`image_grid_thw`)."""
    image_spans: list[Span] = field(default_factory=list)
    """Where the pads of each image stand."""
    assistant_spans: list[Span] = field(default_factory=list)
    """The ids of each assistant message that the policy produced (the trainable ones): the end-of-turn id is
    inside when it was sampled, outside when it was added here to close a reply that was cut."""
    message_ends: list[int] = field(default_factory=list)
    """Where each message ends, its closing newline included."""


class ChatRenderer:
    """Encodes messages for one tokenizer and image processor.

    Sizes and pixels are cached by image reference, so one renderer serves one corpus. `cache_bytes` bounds
    the pixel cache. ValueError when the tokenizer lacks a token of the chat format.
    """

    def __init__(self, tokenizer, image_processor, *, cache_bytes: int = 1 << 29):
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.merge_size: int = image_processor.merge_size
        self.patch_size: int = image_processor.patch_size
        names = (IM_START, IM_END, END_OF_TEXT, VISION_START, VISION_END, IMAGE_PAD)
        ids = {name: _token_id(tokenizer, name) for name in names}
        self.im_start_id, self.im_end_id = ids[IM_START], ids[IM_END]
        self.pad_id = ids[END_OF_TEXT]
        self.image_token_id = ids[IMAGE_PAD]
        self._vision_start_id, self._vision_end_id = ids[VISION_START], ids[VISION_END]
        self.stop_ids = frozenset({ids[IM_END], ids[END_OF_TEXT]})
        """Sampling one of them ends a reply."""
        self.special_ids = _special_ids(tokenizer) | frozenset(ids.values())
        """Every special id, the stop ids included. None but the stop ids is ever sampled or trained."""
        self._encode_text = lru_cache(maxsize=1 << 14)(_text_encoder(tokenizer))
        self._sizes: LRUCache[tuple[int, int]] = LRUCache(1 << 16)
        self._pixels: LRUCache[np.ndarray] = LRUCache(cache_bytes, lambda array: array.nbytes)

    # ------------------------------------------------------------ text

    def text_ids(self, text: str) -> list[int]:
        """Ids of `text` as ordinary text: special tokens spelled in it do not become special ids."""
        return list(self._encode_text(text))

    def reply_ids(self, text: str, *, complete: bool = True) -> list[int]:
        """Ids of a reply known as text only, closed by the end-of-turn id unless it was cut."""
        return self.text_ids(text) + ([self.im_end_id] if complete else [])

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids without the id that ended them."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(
        self, messages: Sequence[Message], images: ImageSource, add_generation_prompt: bool = True
    ) -> Encoded:
        """Render messages, and the opening of the next assistant turn when asked.

        An assistant message with `token_ids` stands as those ids exactly; one without is tokenised here. The
        opening `assistant\\n` is always tokenised on its own, as it is when a reply is sampled after it.
        Raises ValueError for an image that cannot be shown and for an image in an assistant message.
        """
        encoded = Encoded()
        for message in messages:
            if message.role == "assistant":
                self._add_reply(encoded, message)
            else:
                self._add_content(encoded, message, images)
            encoded.input_ids += self._encode_text("\n")
            encoded.message_ends.append(len(encoded.input_ids))
        if add_generation_prompt:
            encoded.input_ids += [self.im_start_id, *self._encode_text("assistant\n")]
        return encoded

    def _add_reply(self, encoded: Encoded, message: Message) -> None:
        if message.images:
            raise ValueError("an assistant message holds an image; only text can be a reply of the policy")
        ids = encoded.input_ids
        ids += [self.im_start_id, *self._encode_text("assistant\n")]
        reply = self.reply_ids(message.text) if message.token_ids is None else message.token_ids
        encoded.assistant_spans.append((len(ids), len(ids) + len(reply)))
        ids += reply
        if not reply or reply[-1] != self.im_end_id:
            ids.append(self.im_end_id)

    def _add_content(self, encoded: Encoded, message: Message, images: ImageSource) -> None:
        encoded.input_ids.append(self.im_start_id)
        # Neighbouring texts are encoded together with the role line, as a chat template would see them.
        text = message.role + "\n"
        for part in message.content:
            if isinstance(part, ImagePart):
                encoded.input_ids += self._encode_text(text)
                text = ""
                self._add_image(encoded, part.image, images)
            elif isinstance(part, TextPart):
                text += part.text
            else:
                raise ValueError(
                    "a native tool call cannot be rendered for a local model; a system asks it in text"
                )
        encoded.input_ids += self._encode_text(text)
        encoded.input_ids.append(self.im_end_id)

    def _add_image(self, encoded: Encoded, ref: ImageRef, images: ImageSource) -> None:
        grid = self.grid(ref, images)
        pads = grid[1] * grid[2] // self.merge_size**2
        start = len(encoded.input_ids) + 1
        encoded.input_ids += [self._vision_start_id, *[self.image_token_id] * pads, self._vision_end_id]
        encoded.images.append(ref)
        encoded.image_sizes.append(self.size(ref, images))
        encoded.grids.append(grid)
        encoded.image_spans.append((start, start + pads))

    # ------------------------------------------------------------ images

    def size(self, ref: ImageRef, images: ImageSource) -> tuple[int, int]:
        """(width, height) at which the model sees an image, pixels: the smart resize to its budget."""

        def measure() -> tuple[int, int]:
            return shown_size(ref, images(ref).size, factor=self.patch_size * self.merge_size)

        return self._sizes.get(ref.key, measure)

    def grid(self, ref: ImageRef, images: ImageSource) -> tuple[int, int, int]:
        """(1, height, width) of an image in patches."""
        width, height = self.size(ref, images)
        return 1, height // self.patch_size, width // self.patch_size

    def pixels(self, ref: ImageRef, images: ImageSource) -> np.ndarray:
        """(h·w, 1176) float32 patches of an image, as the model's `pixel_values`; made once, then cached."""
        return self._pixels.get(ref.key, lambda: self._make_pixels(ref, images))

    def _make_pixels(self, ref: ImageRef, images: ImageSource) -> np.ndarray:
        image = resize_image(images(ref), self.size(ref, images))
        output = self.image_processor(images=[image], do_resize=False, return_tensors="np")
        grid = tuple(output["image_grid_thw"][0].tolist())
        assert grid == self.grid(ref, images), f"image {ref.key}: grid {grid} is not {self.grid(ref, images)}"
        return output["pixel_values"].astype("float32", copy=False)


def shown_size(ref: ImageRef, size: tuple[int, int], factor: int = 28) -> tuple[int, int]:
    """(width, height) after the smart resize of a `size` picture to the budget of `ref`.

    ValueError naming the image when it has no area or is longer than 200:1.
    """
    try:
        return smart_resize(*size, min_pixels=ref.min_pixels, max_pixels=ref.max_pixels, factor=factor)
    except ValueError as error:
        raise ValueError(f"{ref.page_id} (box {ref.box}) cannot be shown: {error}") from error


def resize_image(image: Image, size: tuple[int, int]) -> Image:
    """Resize to (width, height) with the bicubic filter of Qwen's image processor."""
    from PIL.Image import Resampling

    return image if image.size == size else image.resize(size, Resampling.BICUBIC)


def check_fits(encoded: Encoded, max_tokens: int, max_context: int | None, max_images: int | None) -> None:
    """Refuse a prompt before an engine sees it: TooManyImages, or ContextTooLong when the prompt and a reply
    of `max_tokens` exceed `max_context`. None = no limit."""
    if max_images is not None and len(encoded.images) > max_images:
        raise TooManyImages(
            f"the prompt has {len(encoded.images)} images; the model is set to take {max_images}"
        )
    length = len(encoded.input_ids)
    if max_context is not None and length + max_tokens > max_context:
        raise ContextTooLong(
            f"the prompt of {length} tokens and a reply of {max_tokens} exceed the context of {max_context}"
        )


def _token_id(tokenizer, token: str) -> int:
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        raise ValueError(
            f"the tokenizer at {tokenizer.name_or_path!r} has no {token}; use that of a Qwen2.5-VL model"
        )
    return token_id


def _special_ids(tokenizer) -> frozenset[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _text_encoder(tokenizer):
    """A function text → tuple of ids on a private copy of the backend, in which special tokens are not
    matched (the flag is a state of the backend, so sharing it with other callers would not be safe)."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.encode_special_tokens = True
    backend.no_padding()
    backend.no_truncation()
    return lambda text: tuple(backend.encode(text, add_special_tokens=False).ids)
