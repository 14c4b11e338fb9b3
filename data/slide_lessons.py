"""Warm-up lessons of the tiny policy, written as chat data ({messages, images}, one JSON line each).

A 7B policy arrives able to copy text and to read a page; a policy that starts from random weights is taught
both before it is taught to be an agent. Neither lesson is part of VISOR, and neither shows an episode:

- `copy` (text induction): repeat a random list of words. The circuit that copies forms suddenly, and only
  when the text is dense in repeats.
- `read` (page reading): describe a page of the training split. Mixed in are more lists to copy and the first
  turn of an episode, the question copied into a query, which holds no page.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from data.questions import load_questions
from data.slide_expert import SLIDE_EPISODE, describe
from data.slide_world import FIRST_NAMES, SECOND_NAMES, TOPICS, Slide, read_slides
from visor.env.prompts import PromptSet, fill, load_prompts
from visor.types import Question

WORDS = (*FIRST_NAMES, *SECOND_NAMES, *TOPICS, *map(str, range(10)))
COPY_LENGTHS = (8, 24)
PHRASES = (
    "the answer is not found . confirmed . verify it",
    "search",
    "copy",
    "read",
    "more or of ,",
    "see also",
)
"""Words of the expert's thoughts and of the lessons; the prompts add theirs."""


@cache
def _prompts() -> PromptSet:
    return load_prompts(SLIDE_EPISODE["prompts"])


def vocabulary_texts(repeats: int = 400, seed: int = 0) -> list[str]:
    """Text that holds every word of the world, its prompts and its expert, each often enough to become one
    token with the space before it; the words that open a message also without it."""
    templates = [text for value in _prompts().model_dump().values() for text in _texts(value)]
    openers = [text.split()[0] for text in templates if text.split()] + ["system", "user", "assistant"]
    words = sorted({word for text in (*templates, *PHRASES) for word in text.split() if "{" not in word})
    words += [word for word in WORDS if word not in words]
    rng = random.Random(seed)
    texts = []
    for _ in range(repeats):
        rng.shuffle(words)
        texts.append(" " + " ".join(words))
        texts += [f"{word}\n" for word in (*openers, "copy", "read")]
    return texts


def _texts(value) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)


def copy_lessons(count: int, seed: int = 0) -> Iterator[dict]:
    """`count` lists of random words to repeat."""
    rng = random.Random(f"copy-{seed}")
    for _ in range(count):
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(*COPY_LENGTHS)))
        yield _chat(f"copy {words}", f" {words}")


def read_lessons(slides: dict[str, Slide]) -> Iterator[dict]:
    """Each page once, with its description."""
    budget = {key: SLIDE_EPISODE[f"page_{key}"] for key in ("min_pixels", "max_pixels")}
    for page_id, slide in slides.items():
        yield _chat("<image>read", f" {describe(slide)}", images=[{"page_id": page_id, **budget}])


def first_turn_lessons(questions: list[Question]) -> Iterator[dict]:
    """Each question once, with the first reply of an episode."""
    template = _prompts().question
    for question in questions:
        reply = f"<think> search</think><search> {question.text}</search>"
        yield _chat(fill(template, question=question.text), reply)


def _chat(user: str, assistant: str, images: list[dict] | None = None) -> dict:
    system = _prompts().system
    roles = (("system", system), ("user", user), ("assistant", assistant))
    return {"messages": [{"role": r, "content": c} for r, c in roles], "images": images or []}


def write_lessons(path: Path, lessons: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(lesson) + "\n" for lesson in lessons)
    print(f"{len(lessons)} lessons → {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.slide_lessons",
        description="Write the warm-up lessons and the text that trains the tokenizer.",
    )
    parser.add_argument("lesson", choices=("vocabulary", "copy", "read"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6400, help="copy: number of lists")
    parser.add_argument("--split", type=Path, help="read: folder with slides.jsonl and questions.jsonl")
    parser.add_argument("--repeats", type=int, default=6, help="read: how often each page is described")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.lesson == "vocabulary":
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("".join(text.rstrip() + "\n" for text in vocabulary_texts()))
        return
    if arguments.lesson == "copy":
        write_lessons(arguments.output, list(copy_lessons(arguments.count, arguments.seed)))
        return
    if arguments.split is None:
        parser.error("read needs --split, the folder with slides.jsonl and questions.jsonl")
    pages = list(read_lessons(read_slides(arguments.split / "slides.jsonl"))) * arguments.repeats
    questions = load_questions(f"questions:{arguments.split / 'questions.jsonl'}")
    rng = random.Random(f"read-{arguments.seed}")
    first = rng.choices(list(first_turn_lessons(questions)), k=len(pages) // 3)
    lessons = [*pages, *first, *copy_lessons(len(pages) // 3, arguments.seed + 1)]
    rng.shuffle(lessons)
    write_lessons(arguments.output, lessons)


if __name__ == "__main__":
    main()
