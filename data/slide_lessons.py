"""Warm-up lessons of the tiny policy, written as chat data ({messages, images}, one JSON line each).

A 7B policy arrives able to copy text, to look a fact up in a text and to read a page; a policy that starts
from random weights is taught these before it is taught to be an agent. The lessons are no part of VISOR, and
none shows an episode:

- `text` (text induction): repeat a list of random words; look up topics in a list of facts and say which are
  not there. The circuit that does both forms suddenly, and only on text dense in repeats.
- `read` (page reading): describe a page of the training split. Mixed in are more lists of facts and the first
  turn of an episode, the question copied into a query, which holds no page.
- `look` (page look-up): describe a page and look topics up on it.
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
FACTS = (3, 8)
ASKED = (2, 5)
ABSENT_SHARE = 0.3
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


def lookup_lessons(count: int, seed: int = 0) -> Iterator[dict]:
    """`count` lists of facts with topics to look up."""
    rng = random.Random(f"lookup-{seed}")
    for _ in range(count):
        topics = rng.sample(TOPICS, rng.randint(*FACTS))
        facts = {topic: rng.randrange(10) for topic in topics}
        listed = " , ".join(f"{topic} {value}" for topic, value in facts.items())
        asked, thought, answer = _looked_up(facts, rng)
        yield _chat(
            f"read {listed} . question : {asked}", f"<think> {thought}</think><answer> {answer}</answer>"
        )


def _looked_up(facts: dict[str, int], rng: random.Random) -> tuple[str, str, str]:
    """Topics to ask for, a share of them absent; what to say of them, in the words of the expert; the last
    one's value."""
    present = list(facts)
    absent = [topic for topic in TOPICS if topic not in facts]
    count = rng.randint(*ASKED)
    asked = [topic for topic in rng.sample(present, len(present)) if rng.random() > ABSENT_SHARE][:count]
    asked += rng.sample(absent, count - len(asked))
    rng.shuffle(asked)
    said = [f"{topic} {facts[topic]} ." if topic in facts else f"{topic} not found ." for topic in asked]
    answer = str(facts.get(asked[-1], "not found"))
    return " ".join(asked), " ".join([*said, f"the answer is {answer} ."]), answer


def read_lessons(slides: dict[str, Slide]) -> Iterator[dict]:
    """Each page once, with its description."""
    for page_id, slide in slides.items():
        yield _chat("<image>read", f" {describe(slide)}", _shown(page_id))


def look_lessons(slides: dict[str, Slide], seed: int = 0) -> Iterator[dict]:
    """Each page once, with its description and topics to look up on it."""
    rng = random.Random(f"look-{seed}")
    for page_id, slide in slides.items():
        asked, thought, answer = _looked_up(dict(slide.facts), rng)
        reply = f"<think> {describe(slide)} {thought}</think><answer> {answer}</answer>"
        yield _chat(f"<image>read . question : {asked}", reply, _shown(page_id))


def _shown(page_id: str) -> list[dict]:
    budget = {key: SLIDE_EPISODE[f"page_{key}"] for key in ("min_pixels", "max_pixels")}
    return [{"page_id": page_id, **budget}]


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
    parser.add_argument("lesson", choices=("vocabulary", "text", "read", "look"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=9600, help="text: number of lessons")
    parser.add_argument("--split", type=Path, help="read, look: folder with slides.jsonl and questions.jsonl")
    parser.add_argument("--repeats", type=int, default=6, help="read, look: lessons a page")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.lesson == "vocabulary":
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("".join(text.rstrip() + "\n" for text in vocabulary_texts()))
        return
    rng = random.Random(f"order-{arguments.seed}")
    if arguments.lesson == "text":
        half = arguments.count // 2
        lessons = [*copy_lessons(half, arguments.seed), *lookup_lessons(half, arguments.seed)]
        rng.shuffle(lessons)
        write_lessons(arguments.output, lessons)
        return
    if arguments.split is None:
        parser.error(f"{arguments.lesson} needs --split, the folder with slides.jsonl and questions.jsonl")
    slides = read_slides(arguments.split / "slides.jsonl")
    if arguments.lesson == "look":
        lessons = [lesson for repeat in range(arguments.repeats) for lesson in look_lessons(slides, repeat)]
    else:
        pages = list(read_lessons(slides)) * arguments.repeats
        questions = load_questions(f"questions:{arguments.split / 'questions.jsonl'}")
        first = rng.choices(list(first_turn_lessons(questions)), k=len(pages) // 8)
        lessons = [*pages, *first, *lookup_lessons(len(pages) // 8, arguments.seed + 1)]
    rng.shuffle(lessons)
    write_lessons(arguments.output, lessons)


if __name__ == "__main__":
    main()
