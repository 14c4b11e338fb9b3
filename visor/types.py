"""The records that flow through the project. This module imports no heavy library.

Everything written to disk is one of these pydantic models (or made of them) and carries a
`schema_version`. Names are the field's terms. Boxes are `(x1, y1, x2, y2)`, exclusive on the right and
at the bottom; page numbers are 1-based PDF page indices; image sizes are `(width, height)` in pixels.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from PIL.Image import Image

SCHEMA_VERSION = 1
PAGE_SEPARATOR = "#page="

Box = tuple[int, int, int, int]


class Record(BaseModel):
    """Base of every record: unknown fields are refused, so that a misspelt one is not lost in silence."""

    model_config = ConfigDict(extra="forbid")


def make_page_id(doc_id: str, page_number: int) -> str:
    """Return the page id `"{doc_id}#page={page_number}"` (the form of a PDF open parameter)."""
    if page_number < 1:
        raise ValueError(f"page numbers start at 1, got {page_number} for document {doc_id!r}")
    return f"{doc_id}{PAGE_SEPARATOR}{page_number}"


def split_page_id(page_id: str) -> tuple[str, int]:
    """Turn a page id back into `(doc_id, page_number)`; ValueError when it is not one."""
    doc_id, separator, number = page_id.rpartition(PAGE_SEPARATOR)
    if not (separator and doc_id and number.isascii() and number.isdigit()) or int(number) < 1:
        raise ValueError(f"{page_id!r} is not a page id; expected 'document{PAGE_SEPARATOR}number'")
    return doc_id, int(number)


def page_sort_key(page_id: str) -> tuple[str, int]:
    """Order pages by document, then by number (2 before 10)."""
    return split_page_id(page_id)


class Page(Record):
    """One page of a corpus."""

    page_id: str
    doc_id: str
    page_number: int = Field(ge=1)
    """1-based index in its document."""
    image: str
    """Path of the page image, relative to the corpus folder."""
    width: int
    height: int
    """Size of the page image, pixels."""
    text: str = ""
    """Text layer, or what OCR read. Serves retrieval only, never the policy."""
    text_source: Literal["layer", "ocr", "none"] = "none"
    """Where `text` comes from. "ocr" with an empty text: read, and there was none to see. "none": no text
    layer, and not read by OCR. A record that does not say has its text from the text layer."""
    caption: str = ""
    sha256: str = ""
    """Hash of the image file."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_the_layer_s(cls, fields: Any) -> Any:
        """Fill in the source of the text for records from before it was kept."""
        if isinstance(fields, dict) and "text_source" not in fields and fields.get("text"):
            return {**fields, "text_source": "layer"}
        return fields


class PageStore(Protocol):
    """Read access to a corpus; `data.corpus.Corpus` implements it."""

    def page(self, page_id: str) -> Page: ...

    def pages(self) -> list[Page]: ...

    def image(self, page_id: str) -> Image:
        """Return the page image, RGB, at its stored size."""
        ...

    def document_path(self, doc_id: str) -> Path | None: ...


class Question(Record):
    """A question with what is known about its right answer."""

    question_id: str
    text: str
    gold_answers: list[str] = []
    gold_page_ids: list[str] = []
    answer_format: str = ""
    tags: dict[str, Any] = {}
    """For example `hop` ("single" | "multi"), `evidence_sources`, `doc_type`, `split`."""
    corpus: str = ""


# ---------------------------------------------------------------- messages


class ImageRef(Record):
    """A picture shown to the policy: a page, or a box cut from it, and the pixel budget it is shown at."""

    page_id: str
    box: Box | None = None
    """Region of the stored page image in its pixels, margin included; None = the whole page."""
    min_pixels: int
    max_pixels: int
    """Bounds on width × height after the smart resize."""

    @property
    def key(self) -> tuple:
        return (self.page_id, self.box, self.min_pixels, self.max_pixels)


class TextPart(Record):
    type: Literal["text"] = "text"
    text: str


class ImagePart(Record):
    type: Literal["image"] = "image"
    image: ImageRef


class ToolCall(Record):
    """A call that a model made natively; part of an assistant message."""

    type: Literal["tool_call"] = "tool_call"
    call_id: str
    """The endpoint's name for this call; its result carries the same."""
    name: str
    arguments: str
    """JSON text as the model wrote it; it need not be well-formed."""


class ToolResult(Record):
    """Opens the result of a native call in a `tool` message: the parts up to the next one belong to it."""

    type: Literal["tool_result"] = "tool_result"
    call_id: str


Part = Annotated[TextPart | ImagePart | ToolCall | ToolResult, Field(discriminator="type")]


class Message(Record):
    """One chat message. An assistant message of a sampled turn keeps the sampled ids."""

    role: Literal["system", "user", "assistant", "tool"]
    content: list[Part]
    token_ids: list[int] | None = None
    """Assistant only: the ids as sampled, the end-of-turn id included when it was sampled. When set, they
    are what the model reads back and what is trained; the text is never encoded again."""

    @model_validator(mode="after")
    def _tool_messages_answer_calls(self) -> Message:
        if self.role == "tool" and not (self.content and isinstance(self.content[0], ToolResult)):
            raise ValueError("a tool message begins with the call that it answers")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def images(self) -> list[ImageRef]:
        return [part.image for part in self.content if isinstance(part, ImagePart)]


def text_message(role: Literal["system", "user", "assistant"], text: str) -> Message:
    return Message(role=role, content=[TextPart(text=text)])


def messages_digest(messages: list[Message]) -> str:
    """SHA-256 of the messages as they are shown (roles, texts, image references, ids)."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(message.model_dump_json().encode())
        digest.update(b"\n")
    return digest.hexdigest()


# ---------------------------------------------------------------- actions


class Search(Record):
    kind: Literal["search"] = "search"
    query: str


class Crop(Record):
    kind: Literal["crop"] = "crop"
    box: tuple[float, float, float, float]
    """As the policy wrote it, in `space`."""
    space: Literal["norm1000", "pixels"]
    """norm1000: 0–1000 of width and height. pixels: of the smart-resized image the policy saw."""


class Answer(Record):
    kind: Literal["answer"] = "answer"
    text: str
    """Stripped; may be empty."""


class Invalid(Record):
    kind: Literal["invalid"] = "invalid"
    reason: str
    raw: str


class Memorised(Record):
    """A picture that the DAG agent asked to keep in front of it."""

    page_id: str
    priority: int = Field(3, ge=1, le=5)
    """As the model scored it; 3 where it gave none."""


class Summary(Record):
    """What the DAG agent wrote about the pages of its last search."""

    kind: Literal["summary"] = "summary"
    text: str
    memorised: list[Memorised] = []


Action = Annotated[Search | Crop | Answer | Summary | Invalid, Field(discriminator="kind")]


class ObservationKind(StrEnum):
    PAGE = "page"
    CROP = "crop"
    NO_NEW_PAGE = "no_new_page"
    INVALID = "invalid"


class Observation(Record):
    """What the environment returned after an action."""

    kind: ObservationKind
    message: Message
    page_ids: list[str] = []
    """Pages newly shown by a search; the cropped page for a crop."""
    crop: Box | None = None
    """Region in page pixels, margin included."""
    forced_answer: bool = False
    """True when the forced-answer prompt was added: the next response is final."""
    verification_hint: bool = False


# ---------------------------------------------------------------- turns and trajectories


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Completion(Record):
    """A policy client's reply."""

    text: str
    """Without the end-of-turn token."""
    token_ids: list[int] | None = None
    """The sampled ids, end-of-turn id included when sampled. None: the endpoint gives text only."""
    logprobs: list[float] | None = None
    """Log-probability of each sampled id under the sampling distribution's model at temperature 1."""
    finish_reason: FinishReason = FinishReason.STOP
    prompt_token_ids: list[int] | None = None
    """The exact prompt ids, image pads expanded."""
    image_sizes: list[tuple[int, int]] | None = None
    """(width, height) of each context image as the model saw it, in order."""
    seconds: float = 0.0
    model: str = ""
    policy_version: int = 0
    tool_calls: list[ToolCall] = []
    """Native calls of the reply, in order; none from a client that takes no tools."""
    image_bytes: int | None = None
    """Base64 bytes of the pictures sent with this call; None: they were not sent as text."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, pictures included, as the endpoint or tokenizer counted them; None: not told."""
    completion_tokens: int | None = None
    """Tokens of the reply as the endpoint counted them; None: not told, or the ids are here."""


class Turn(Record):
    """One policy call: the context, the reply, what it meant, what came back."""

    index: int
    context: list[Message]
    """The messages shown at this call, oldest first."""
    completion: Completion
    think: str = ""
    action: Action
    format_ok: bool = True
    flags: list[str] = []
    """Defects of the reply, for example "more than one action"."""
    is_verification: bool = False
    """A search whose thought says that the answer is ready to be confirmed."""
    query: str | None = None
    """For a search: the query as sent to the retriever."""
    candidates: list[tuple[str, float]] = []
    """For a search: (page_id, score) as ranked by the retriever."""
    observation: Observation | None = None
    """None after the final answer, and after a summary, which the next prompt shows."""
    retrieval_seconds: float = 0.0
    by_system: bool = False
    """True for a step that the system took without asking a model; `completion` is then empty."""


class StopReason(StrEnum):
    ANSWER = "answer"
    MAX_TURNS = "max_turns"
    """The reply to the forced-answer prompt was no answer."""
    LENGTH = "length"
    """The context no longer fits the model."""
    IMAGE_LIMIT = "image_limit"
    ERROR = "error"


class ErrorRecord(Record):
    source: Literal["environment", "policy", "judge"]
    type: str
    message: str


class RewardBreakdown(Record):
    """The parts of eqs. 3–5 of VISOR, kept beside their sum."""

    total: float | None
    """None: unscored (a fault of the environment or the judge); never to be read as 0."""
    retrieval: float | None = None
    answer: float | None = None
    format_penalty: int = 0
    """I_format."""
    searches: int = 0
    """T, the number of search turns."""
    complete_at: int | None = None
    """t*, the search turn (1-based) at which the last gold page had been shown; None = incomplete."""
    delta: int | None = None
    """Δ = T − t*; None = incomplete or no gold pages."""
    judge: str = ""
    """Name of the judge."""
    verdict: bool | None = None
    """The judge's verdict on the answer, asked whenever there is one; None = not asked or no verdict."""
    score: float | None = None
    """The judge's score where it gives one: 0 to 1 of a benchmark's scorer, a grade of 1 to 5."""
    judged_as: str = ""
    """The short form of the answer that was scored, where a model made one; "" = the answer as it is."""
    judge_reply: str = ""
    """What a model as judge wrote, from which the verdict was read; "" where none was asked."""
    honest: bool | None = None
    """For incomplete retrieval: the answer says that the information is missing."""
    parts: dict[str, float] = {}
    """Parts of a reward other than VISOR's, by name, before they are weighted."""
    unscored_reason: str = ""


class Trajectory(Record):
    """One question answered once by one system. A failed episode is a record with an error."""

    schema_version: int = SCHEMA_VERSION
    question_id: str
    question: str
    system: str = "visor"
    seed: int = 0
    sample_index: int = 0
    prompt: list[Message] = []
    """System and question messages that every context starts with."""
    turns: list[Turn] = []
    answer: str | None = None
    """None = no answer was given; "" = an empty one."""
    stop_reason: StopReason | None = None
    reward: RewardBreakdown | None = None
    error: ErrorRecord | None = None
    meta: dict[str, Any] = {}
    """Episode configuration, TAEC switches, model name, split."""

    @property
    def shown_page_ids(self) -> list[str]:
        """Pages shown by searches, in order, each once."""
        pages: dict[str, None] = {}
        for turn in self.turns:
            if turn.observation and turn.observation.kind == ObservationKind.PAGE:
                pages.update(dict.fromkeys(turn.observation.page_ids))
        return list(pages)


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from (run seed, step, question id, sample index, turn, …), stable across processes."""
    digest = hashlib.sha256("\x1f".join(f"{type(p).__name__}:{p}" for p in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
