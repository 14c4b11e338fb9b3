"""The questions of a run: what it trains on, what it is validated on, and that the two are apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from data.corpus import Corpus
from data.questions import load_questions
from grpo.arguments import GrpoConfig
from grpo.figures import OF_GOLD_PAGES
from visor.types import Question, split_page_id

SHOWN_PROBLEMS = 2
"""Defects of a question file that are shown; the rest is counted."""


def load_training_questions(config: GrpoConfig, corpus: Corpus) -> list[Question]:
    """The questions of a run; what the reader reports of them goes to stderr.

    ValueError when none is left, or when one has no gold pages, hence no Δ, and such questions are not to be
    dropped.
    """
    questions = _read(config.questions, corpus)
    without = [question.question_id for question in questions if not question.gold_page_ids]
    if config.drop_questions_without_gold:
        questions = [question for question in questions if question.gold_page_ids]
        print(f"{len(without)} questions without gold pages left out, {len(questions)} kept", flush=True)
    if not questions:
        raise ValueError(f"{config.questions} holds no questions to train on")
    if without and not config.drop_questions_without_gold:
        raise ValueError(
            f"{len(without)} of {len(questions)} questions have no gold pages, so they have no retrieval "
            f"reward: {', '.join(without[:5])}; remove them from {config.questions}, or set "
            "drop_questions_without_gold"
        )
    return questions


def load_validation_questions(
    config: GrpoConfig, corpus: Corpus, training: Sequence[Question]
) -> list[Question]:
    """The validation questions, `eval_limit` of them.

    ValueError when there is none, when none has gold pages and the metric for the best model needs them, or
    when one of them is trained on.
    """
    assert config.eval_questions is not None, "checked with the settings"
    questions = _read(config.eval_questions, corpus)[: config.eval_limit]
    if not questions:
        raise ValueError(f"{config.eval_questions} holds no questions to validate on")
    metric = config.metric_for_best_model
    if metric in OF_GOLD_PAGES and not any(question.gold_page_ids for question in questions):
        raise ValueError(
            f"no question of {config.eval_questions} has gold pages, so there is no {metric} to choose the "
            "best model by; set metric_for_best_model to accuracy"
        )
    refuse_overlap(training, questions, config.eval_questions)
    return questions


def refuse_overlap(training: Sequence[Question], validation: Sequence[Question], name: str) -> None:
    """ValueError when a validation question is a training question: the same id, or the same text (case and
    spaces aside) with the same gold pages."""
    ids = {question.question_id for question in training}
    contents = {_content(question) for question in training}
    shared = [
        question.question_id
        for question in validation
        if question.question_id in ids or _content(question) in contents
    ]
    if shared:
        raise ValueError(
            f"{len(shared)} of {len(validation)} validation questions are training questions too (the same "
            f"id, or the same text and gold pages): {', '.join(shared[:5])}; a validation on them measures "
            f"memory, so remove them from {name} or from the training questions"
        )


def _content(question: Question) -> tuple:
    return " ".join(question.text.casefold().split()), frozenset(question.gold_page_ids)


def _read(spec: str, corpus: Corpus) -> list[Question]:
    """Read questions; their defects are one line on stderr. ValueError when the corpus is not theirs."""
    problems: list[str] = []
    questions = load_questions(spec, corpus, problems)
    documents = corpus.page_counts()
    with_gold = [question for question in questions if question.gold_page_ids]
    if with_gold and not any(
        split_page_id(page_id)[0] in documents for question in with_gold for page_id in question.gold_page_ids
    ):
        example = split_page_id(with_gold[0].gold_page_ids[0])[0]
        raise ValueError(
            f"no gold document of the {len(with_gold)} questions of {spec} is in the corpus {corpus.path} "
            f"(for example {example}); name the corpus the questions are about"
        )
    if problems:
        shown = "; ".join(problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        rest = f"; and {more} more" if more > 0 else ""
        print(f"questions: {len(problems)} defects in {spec}: {shown}{rest}", file=sys.stderr)
    return questions
