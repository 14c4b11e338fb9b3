"""Synthetic pages and messages of these tests."""

from PIL import Image

from visor.types import ImagePart, ImageRef, Message, TextPart, text_message

TEXTS = [
    "the revenue of acme is 4 . search for page 2 hello he llo assistant system user agent",
    *["hello"] * 9,
] * 3
PAGE_SIZES = {"a": (112, 112), "b": (200, 90), "c": (60, 300), "d": (1000, 800)}


def page_image(ref: ImageRef) -> Image.Image:
    """A gradient that differs from page to page."""
    size = PAGE_SIZES[ref.page_id.split("#")[0]]
    shade = sum(map(ord, ref.page_id)) % 200
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    return Image.blend(image, Image.new("RGB", size, (shade, 255 - shade, 90)), 0.5)


def page_ref(name: str = "a", number: int = 1, budget: int = 16) -> ImageRef:
    return ImageRef(page_id=f"{name}#page={number}", min_pixels=4 * 784, max_pixels=budget * 784)


def user(*parts) -> Message:
    content = [TextPart(text=part) if isinstance(part, str) else ImagePart(image=part) for part in parts]
    return Message(role="user", content=content)


def chat(*rest: Message) -> list[Message]:
    return [text_message("system", "agent"), *rest]
