"""A corpus of four pages, questions, an index and a tiny random policy: the smallest world to train in."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

from data.corpus_files import DocumentRecord, write_corpus
from visor.models.tiny import build_tiny_policy
from visor.retrieval.index import build_index
from visor.types import Page, Question, make_page_id

TOPICS = ["apple", "brick", "cloud", "delta"]
EPISODE = {
    "prompts": "tiny",
    "max_turns": 3,
    "window": 1,
    "page_min_pixels": 56 * 56,
    "page_max_pixels": 56 * 56,
    "crop_min_pixels": 56 * 56,
    "crop_max_pixels": 56 * 56,
}
TEXTS = [
    f"<think> search</think><search> {topic} number</search> page {topic} {n} .<answer> {n}</answer>"
    for topic in TOPICS
    for n in range(10)
] + ["agent question : for page system user assistant invalid . last turn . evidence : no new page"] * 9


def write_world(folder: Path) -> None:
    """`corpus/` with its index, `questions.jsonl`, `held_out.jsonl` for validation, and `policy/`."""
    from data.corpus import Corpus

    corpus = folder / "corpus"
    (corpus / "images").mkdir(parents=True)
    pages = {}
    for number, topic in enumerate(TOPICS, 1):
        image = Image.new("RGB", (56, 56), "white")
        ImageDraw.Draw(image).rectangle(
            (7 * number, 8, 7 * number + 12, 48), fill=(60 * number % 255, 40, 90)
        )
        image.save(corpus / "images" / f"{number}.png")
        page_id = make_page_id("deck", number)
        pages[page_id] = Page(
            page_id=page_id, doc_id="deck", page_number=number, image=f"images/{number}.png",
            width=56, height=56, text=f"{topic} number {number}",
        )  # fmt: skip
    write_corpus(corpus, {"deck": DocumentRecord(doc_id="deck", status="done", page_count=4)}, pages)
    build_index(Corpus.open(corpus), corpus / "index" / "bm25")
    questions = [
        Question(
            question_id=f"q{number}", text=f"{topic} number", gold_answers=[str(number)],
            gold_page_ids=[make_page_id("deck", number)],
        )
        for number, topic in enumerate(TOPICS, 1)
    ]  # fmt: skip
    (folder / "questions.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in questions))
    held_out = [
        question.model_copy(update={"question_id": f"held-out-{topic}", "text": f"number {topic}"})
        for topic, question in zip(TOPICS, questions)
    ]
    (folder / "held_out.jsonl").write_text("".join(q.model_dump_json() + "\n" for q in held_out))
    write_policy(folder / "policy")


def write_policy(path: Path, seed: int = 0) -> None:
    build_tiny_policy(
        path, TEXTS, seed=seed, vocab_size=340,
        text={"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}},
        vision={"depth": 1, "hidden_size": 32, "intermediate_size": 64, "fullatt_block_indexes": [0]},
    )  # fmt: skip


def grpo_settings(world: Path, output_dir: Path, **overrides) -> dict:
    return {
        "model_name_or_path": str(world / "policy"),
        "output_dir": str(output_dir),
        "corpus": str(world / "corpus"),
        "questions": f"questions:{world / 'questions.jsonl'}",
        "episode": EPISODE,
        "questions_per_step": 2,
        "num_generations": 3,
        "max_completion_length": 8,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "seed": 7,
        "torch_threads": 1,
        **overrides,
    }


def spread_reward(trajectory, question, judge):
    """A reward that a random policy does not meet equally: it depends on every sampled id."""
    from visor.types import RewardBreakdown

    ids = [i for turn in trajectory.turns for i in turn.completion.token_ids]
    return RewardBreakdown(total=sum(i % 5 for i in ids) / (1 + len(ids)), judge="test")


def picky_reward(trajectory, question, judge):
    """No gradient for the groups of q1 (all equal), q3 (unscored) and, in part of its samples, q4 (one scored
    of each three)."""
    from visor.types import RewardBreakdown

    unscored = question.question_id == "q3" or (
        question.question_id == "q4" and trajectory.sample_index % 3 and trajectory.sample_index < 3
    )
    if unscored:
        return RewardBreakdown(total=None, judge="test", unscored_reason="judge fault: down")
    if question.question_id == "q1":
        return RewardBreakdown(total=0.5, judge="test")
    return spread_reward(trajectory, question, judge)


def trainer_for(world, output_dir, scorer=spread_reward, **overrides):
    """A built trainer whose rollouts are scored by `scorer`."""
    from grpo.arguments import GrpoConfig
    from grpo.build import build_trainer

    trainer = build_trainer(GrpoConfig(**grpo_settings(world, output_dir, **overrides)))
    trainer.engine.scorer = scorer
    if trainer.validation:
        trainer.validation.engine.scorer = scorer
    return trainer


def validating(world: Path, **settings) -> dict:
    """The settings of a validation after every step."""
    return {"eval_steps": 1, "eval_questions": f"questions:{world / 'held_out.jsonl'}", **settings}


def read_metrics(output_dir: Path) -> list[dict]:
    """The metrics lines without what depends on the clock."""
    return read_timeless(output_dir / "metrics.jsonl")


def read_timeless(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def search(query: str, think: str = " page") -> str:
    return f"<think>{think}</think><search> {query}</search>"


def answer(text: str, think: str = " page") -> str:
    return f"<think>{think}</think><answer> {text}</answer>"
