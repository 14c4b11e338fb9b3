"""The built-in slide world: decks of slides as PDF, with questions whose answers stand only in the pixels.

A deck describes one company ("amber falcon") on a few pages; a page has a title and three facts, each a
topic and a one-digit value. The value is drawn as a picture, so no text layer and no index ever holds it.
Some pages carry a small "see also" line naming topics of other pages: a word retriever then ranks them as
high as the page that has the fact. Decks are split into train (for SFT), rl (for GRPO, so that it practises
on pages that SFT has not shown), validation and test; company names are pairs of words, every word occurs in
training, no pair occurs in two splits.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from visor.types import Question, make_page_id

FIRST_NAMES = (
    "amber azure black brave calm clear coral crisp deep eager early fair fresh gold grand green happy iron "
    "jade keen light lucky misty noble quiet rapid red royal sharp silver swift warm"
).split()
SECOND_NAMES = (
    "bear bird cedar cliff cloud comet crane creek delta eagle field forge fox grove harbor hawk hill lake "
    "lion maple moon oak otter panda peak pine river stone tiger valley whale wolf"
).split()
TOPICS = (
    "assets budget cash clients cost debt energy growth hours income loans market orders output plants "
    "profit rent sales shares staff stores tax trucks users"
).split()
PAGES_PER_DECK = 4
FACTS_PER_PAGE = 3
SIDE_POINTS = 168
"""Side of the square page in PDF points (336 px at 144 dpi, shown to the tiny policy at 112 px)."""
BAR_COLORS = ("#1f3a5f", "#5f1f3a", "#1f5f3a", "#4a3a6a", "#6a4a1f", "#333333")
QUESTION_FILES = {
    "questions.jsonl": ("single", "multi"),
    "single_hop.jsonl": ("single",),
    "multi_hop.jsonl": ("multi",),
}
"""Files of a split and the kinds of question they hold, all in one random order."""
SEE_ALSO_SHARE = 0.5
"""Share of pages with a cross reference. At 0.5 BM25 ranks the page with the fact first in 55 % of the
single-hop questions of the study, second in 17 %, third in 15 % (docs/study.md): no fixed number fits."""
SPLITS = {"train": 240, "validation": 40, "test": 60, "rl": 240}


@dataclass(frozen=True)
class Slide:
    """What one page says; the ground truth behind its picture."""

    page_id: str
    name: str
    facts: tuple[tuple[str, int], ...]
    see_also: tuple[str, ...] = ()

    @property
    def topics(self) -> list[str]:
        return [topic for topic, _ in self.facts]


@dataclass(frozen=True)
class Deck:
    doc_id: str
    slides: tuple[Slide, ...]

    @property
    def name(self) -> str:
        return self.slides[0].name


@dataclass
class World:
    """Decks and questions by split."""

    seed: int
    decks: dict[str, list[Deck]] = field(default_factory=dict)
    questions: dict[str, list[Question]] = field(default_factory=dict)

    def slides(self, split: str) -> dict[str, Slide]:
        return {slide.page_id: slide for deck in self.decks[split] for slide in deck.slides}


def make_world(
    seed: int = 0,
    decks: dict[str, int] | None = None,
    see_also_share: float = SEE_ALSO_SHARE,
    multi_hop_per_deck: int = 6,
) -> World:
    """Draw a world. `decks` gives the number of decks a split, `see_also_share` the share of pages with a
    cross reference."""
    sizes = SPLITS if decks is None else decks
    rng = random.Random(f"slide-world-{seed}")
    pairs = [(first, second) for first in FIRST_NAMES for second in SECOND_NAMES]
    rng.shuffle(pairs)
    if sum(sizes.values()) > len(pairs):
        raise ValueError(f"{sum(sizes.values())} decks asked for, but there are only {len(pairs)} names")
    world = World(seed)
    for split, count in sizes.items():
        names, pairs = pairs[:count], pairs[count:]
        world.decks[split] = [_make_deck(rng, f"{a} {b}", see_also_share) for a, b in names]
        world.questions[split] = [
            question
            for deck in world.decks[split]
            for question in (*_single_hop(deck, split), *_multi_hop(rng, deck, split, multi_hop_per_deck))
        ]
    return world


def _make_deck(rng: random.Random, name: str, see_also_share: float) -> Deck:
    doc_id = f"{name.replace(' ', '-')}.pdf"
    topics = rng.sample(TOPICS, PAGES_PER_DECK * FACTS_PER_PAGE)
    slides = []
    for number in range(PAGES_PER_DECK):
        own = topics[number * FACTS_PER_PAGE : (number + 1) * FACTS_PER_PAGE]
        others = [topic for topic in topics if topic not in own]
        see_also = tuple(rng.sample(others, 3)) if rng.random() < see_also_share else ()
        facts = tuple((topic, rng.randrange(10)) for topic in own)
        slides.append(Slide(make_page_id(doc_id, number + 1), name, facts, see_also))
    return Deck(doc_id, tuple(slides))


def _single_hop(deck: Deck, split: str) -> list[Question]:
    return [
        Question(
            question_id=f"{deck.doc_id}/{topic}",
            text=f"{topic} of {deck.name}",
            gold_answers=[str(value)],
            gold_page_ids=[slide.page_id],
            answer_format="Int",
            tags={"hop": "single", "split": split},
        )
        for slide in deck.slides
        for topic, value in slide.facts
    ]


def _multi_hop(rng: random.Random, deck: Deck, split: str, count: int) -> list[Question]:
    """Which of two topics, on two pages of the deck, has the larger value."""
    questions: list[Question] = []
    while len(questions) < count:
        first, second = rng.sample(deck.slides, 2)
        (topic_a, a), (topic_b, b) = rng.choice(first.facts), rng.choice(second.facts)
        if a == b or any(q.question_id == f"{deck.doc_id}/{topic_a}>{topic_b}" for q in questions):
            continue
        questions.append(
            Question(
                question_id=f"{deck.doc_id}/{topic_a}>{topic_b}",
                text=f"more {topic_a} or {topic_b} of {deck.name}",
                gold_answers=[topic_a if a > b else topic_b],
                gold_page_ids=[first.page_id, second.page_id],
                answer_format="Str",
                tags={"hop": "multi", "split": split},
            )
        )
    return questions


# ---------------------------------------------------------------- pictures


def write_deck(deck: Deck, path: Path) -> None:
    """Write a deck as PDF: title, topics and cross references as text, values as pictures of digits."""
    from reportlab.lib.colors import HexColor
    from reportlab.lib.utils import ImageReader
    from reportlab.pdfgen.canvas import Canvas

    font = _register_font()
    buffer = io.BytesIO()
    canvas = Canvas(buffer, pagesize=(SIDE_POINTS, SIDE_POINTS), invariant=1)
    bar = BAR_COLORS[int(hashlib.sha256(deck.name.encode()).hexdigest(), 16) % len(BAR_COLORS)]
    row = SIDE_POINTS / 4
    for slide in deck.slides:
        canvas.setFillColor(HexColor(bar))
        canvas.rect(0, SIDE_POINTS - row, SIDE_POINTS, 3, stroke=0, fill=1)
        canvas.setFillColor(HexColor("#111111"))
        canvas.setFont(font, 21)
        for column, word in enumerate(slide.name.split()):
            canvas.drawString(4 + column * SIDE_POINTS / 2, SIDE_POINTS - row + 14, word)
        for line, (topic, value) in enumerate(slide.facts, start=1):
            base = SIDE_POINTS - (line + 1) * row
            canvas.setFillColor(HexColor("#111111"))
            canvas.setFont(font, 21)
            canvas.drawString(4, base + 14, topic)
            picture = ImageReader(_digit_picture(value))
            canvas.drawImage(picture, SIDE_POINTS - row + 8, base + 6, width=26, height=32)
        if slide.see_also:
            canvas.setFillColor(HexColor("#888888"))
            canvas.setFont(font, 6)
            canvas.drawString(4, 4, "see also " + " ".join(slide.see_also))
        canvas.showPage()
    canvas.save()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def _font_path() -> Path:
    """Bitstream Vera Bold, which ships inside reportlab."""
    import reportlab

    return Path(reportlab.__file__).parent / "fonts" / "VeraBd.ttf"


def _register_font() -> str:
    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont

    if "SlideWorld" not in pdfmetrics.getRegisteredFontNames():
        pdfmetrics.registerFont(TTFont("SlideWorld", str(_font_path())))
    return "SlideWorld"


def _digit_picture(value: int):
    """A digit, black on white, as a picture of 104x128 pixels."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (104, 128), "white")
    font = ImageFont.truetype(str(_font_path()), 128)
    ImageDraw.Draw(picture).text((52, 64), str(value), font=font, fill="#111111", anchor="mm")
    return picture


# ---------------------------------------------------------------- files


def write_world(world: World, out: Path) -> None:
    """Write `out/<split>/documents/*.pdf`, the QUESTION_FILES, and `out/<split>/slides.jsonl`: the truth
    behind each page, which only the scripted expert and the page-reading lessons may read."""
    for split, decks in world.decks.items():
        folder = out / split
        for stale in (folder / "documents").glob("*.pdf"):
            stale.unlink()
        for deck in decks:
            write_deck(deck, folder / "documents" / deck.doc_id)
        questions = list(world.questions[split])
        random.Random(f"order-{world.seed}-{split}").shuffle(questions)
        for name, hops in QUESTION_FILES.items():
            chosen = [question for question in questions if question.tags["hop"] in hops]
            (folder / name).write_text("".join(question.model_dump_json() + "\n" for question in chosen))
        (folder / "slides.jsonl").write_text(
            "".join(
                json.dumps({"page_id": s.page_id, "name": s.name, "facts": s.facts, "see_also": s.see_also})
                + "\n"
                for s in world.slides(split).values()
            )
        )


def read_slides(path: Path) -> dict[str, Slide]:
    """Read a `slides.jsonl`: page id → slide."""
    slides = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        facts = tuple((topic, value) for topic, value in row["facts"])
        slides[row["page_id"]] = Slide(row["page_id"], row["name"], facts, tuple(row["see_also"]))
    return slides


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m data.slide_world", description="Write the slide world.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for split, count in SPLITS.items():
        parser.add_argument(f"--{split}", type=int, default=count, help=f"decks in {split} (default {count})")
    parser.add_argument("--see-also-share", type=float, default=SEE_ALSO_SHARE)
    arguments = parser.parse_args()
    world = make_world(
        arguments.seed, {s: getattr(arguments, s) for s in SPLITS}, see_also_share=arguments.see_also_share
    )
    write_world(world, arguments.output)
    for split, decks in world.decks.items():
        print(f"{split}: {len(decks)} documents, {len(world.questions[split])} questions")


if __name__ == "__main__":
    main()
