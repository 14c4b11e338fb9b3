"""Chat data on disk, {messages, images}: the field's SFT format, read, written and turned into rows.

`messages` hold role and content; each `<image>` in a content stands for the next entry of `images`, which is
a file path (relative to the data file) or, for a page of the corpus, an image reference
{page_id, box, min_pixels, max_pixels}. Two keys of an assistant message are ours: `train: false` keeps it out
of the loss, `complete: false` says that it was cut, so that no end of turn is added to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollout.rows import TrainingRow, messages_row
from visor.models.base import ImageSource
from visor.models.rendering import ChatRenderer
from visor.text_files import read_text
from visor.types import ImagePart, ImageRef, Message, TextPart

PLACEHOLDER = "<image>"
FILE_PREFIX = "file://"
PixelBudget = tuple[int, int]
"""(min_pixels, max_pixels) of a picture given as a file."""


@dataclass
class Chat:
    """One conversation; `untrained` and `incomplete` are indices into `messages`."""

    messages: list[Message]
    untrained: set[int] = field(default_factory=set)
    incomplete: set[int] = field(default_factory=set)
    name: str = ""
    """File and position, for error messages."""


def read_chats(path: str | Path, budget: PixelBudget) -> list[Chat]:
    """Read a JSON array or JSON lines of {messages, images}.

    Files are shown within `budget`. ValueError naming the file and the row when it is no such record or its
    placeholders are not as many as its images.
    """
    path = Path(path)
    text = read_text(path)
    try:
        records = json.loads(text) if text.lstrip().startswith("[") else _json_lines(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return [_chat(record, f"{path.name} row {i}", path.parent, budget) for i, record in enumerate(records, 1)]


def chat_record(messages: Sequence[Message], train_last_only: bool = False) -> dict[str, Any]:
    """The {messages, images} record of messages; sampled ids are not part of the format and are left out.

    With `train_last_only` every assistant message but the last is marked `train: false`.
    """
    images: list[Any] = []
    out: list[dict[str, Any]] = []
    for index, message in enumerate(messages, 1):
        content = ""
        for part in message.content:
            if isinstance(part, ImagePart):
                content += PLACEHOLDER
                images.append(_image_entry(part.image))
            elif isinstance(part, TextPart):
                content += part.text
            else:
                raise ValueError(f"message {index} holds a native tool call, which chat data has no form for")
        out.append({"role": message.role, "content": content})
        if train_last_only and message.role == "assistant" and index < len(messages):
            out[-1]["train"] = False
    return {"messages": out, "images": images}


def write_chats(path: str | Path, chats: Iterable[Sequence[Message]], train_last_only: bool = False) -> int:
    """Write JSON lines of {messages, images}, in place of the file once all are written; returns the number
    of rows.

    ValueError for a text that itself holds `<image>`, which would read back as an image.
    """
    count, beside = 0, Path(f"{path}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        for messages in chats:
            if any(PLACEHOLDER in p.text for m in messages for p in m.content if isinstance(p, TextPart)):
                raise ValueError(
                    f"row {count + 1}: a text contains {PLACEHOLDER!r}, which stands for an image"
                )
            file.write(json.dumps(chat_record(messages, train_last_only), ensure_ascii=False) + "\n")
            count += 1
    beside.replace(path)
    return count


def chat_row(
    chat: Chat, renderer: ChatRenderer, images: ImageSource, max_length: int | None = None
) -> TrainingRow:
    """The training row of a chat: loss on its assistant messages but the untrained ones.

    RowTooLong, ValueError as `messages_row`.
    """
    messages = list(chat.messages)
    for index in chat.incomplete:
        ids = renderer.reply_ids(messages[index].text, complete=False)
        messages[index] = messages[index].model_copy(update={"token_ids": ids})
    row = messages_row(messages, renderer, images, max_length=max_length, name=chat.name)
    if chat.untrained:
        spans = renderer.encode(messages, images, add_generation_prompt=False).assistant_spans
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        for index, (start, end) in zip(replies, spans):
            if index in chat.untrained and start < len(row.loss_mask):
                row.loss_mask[start:end] = [0] * (end - start)
    return row


class ChatImages:
    """Gives the pictures of chat data: files by their path, pages from the corpus."""

    def __init__(self, pages: ImageSource | None = None) -> None:
        self._pages = pages

    def __call__(self, ref: ImageRef):
        """ValueError naming the file or page when there is no such picture or it is damaged."""
        if ref.page_id.startswith(FILE_PREFIX):
            from data.images import load_page_image

            path = Path(ref.page_id.removeprefix(FILE_PREFIX))
            if not path.is_file():
                raise ValueError(f"there is no image file {path}")
            return load_page_image(path)
        if self._pages is None:
            raise ValueError(f"page {ref.page_id!r} is shown, but no corpus is set; name it with corpus:")
        return self._pages(ref)


def _json_lines(text: str) -> list[Any]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return records


def _chat(record: Any, name: str, folder: Path, budget: PixelBudget) -> Chat:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise ValueError(f"{name}: expected an object with a list of messages")
    images = [_image_ref(entry, name, folder, budget) for entry in record.get("images") or []]
    chat = Chat([], name=name)
    used = 0
    for index, message in enumerate(record["messages"]):
        try:
            role, content = message["role"], message["content"]
            parts, used = _parts(content, images, used)
            chat.messages.append(Message(role=role, content=parts))
        except (KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(
                f"{name}: message {index + 1} has no usable role and content ({error})"
            ) from None
        if not message.get("train", True):
            chat.untrained.add(index)
        if not message.get("complete", True):
            chat.incomplete.add(index)
    if used != len(images):
        raise ValueError(f"{name}: {used} {PLACEHOLDER} placeholders for {len(images)} images")
    return chat


def _parts(content: str, images: list[ImageRef], used: int) -> tuple[list, int]:
    """Text and image parts of one content; placeholders beyond the images are only counted."""
    parts: list[TextPart | ImagePart] = []
    for position, text in enumerate(content.split(PLACEHOLDER)):
        if position:
            if used < len(images):
                parts.append(ImagePart(image=images[used]))
            used += 1
        if text:
            parts.append(TextPart(text=text))
    return parts, used


def _image_ref(entry: Any, name: str, folder: Path, budget: PixelBudget) -> ImageRef:
    if isinstance(entry, str):
        path = (folder / entry).resolve()
        return ImageRef(page_id=f"{FILE_PREFIX}{path}", min_pixels=budget[0], max_pixels=budget[1])
    try:
        return ImageRef.model_validate({"min_pixels": budget[0], "max_pixels": budget[1], **entry})
    except (ValidationError, TypeError) as error:
        raise ValueError(f"{name}: {entry!r} is neither a path nor an image reference ({error})") from None


def _image_entry(ref: ImageRef) -> Any:
    if ref.page_id.startswith(FILE_PREFIX):
        return ref.page_id.removeprefix(FILE_PREFIX)
    return ref.model_dump(mode="json")
