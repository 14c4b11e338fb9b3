import asyncio

import pytest
from training_world import EPISODE, answer, search

from rewards.judge import RuleJudge
from rollout.recorder import Recorder
from sft.augment import (
    AugmentConfig,
    Augmenter,
    CannotAugment,
    augment_all,
    augment_file,
    main,
    query_replaced,
    verification_reply,
)
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import ContextTooLong
from visor.types import Completion, Search

STATEMENT = "verify it with one more search"
CONFIG = EpisodeConfig(**{**EPISODE, "max_turns": 8, "window": None, "evidence_space": False})


class Teacher:
    name = "teacher"

    def __init__(self, text="<think> page brick , not apple .</think><answer> 9</answer>"):
        self.text = text
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        return Completion(text=self.text)


def augmenter(play, teacher=None, **options):
    config = options.pop("config", CONFIG)
    return Augmenter(
        teacher or Teacher(), play.corpus, config, load_prompts("tiny"), statement=STATEMENT, **options
    )


def run(play, trajectory, **options):
    return asyncio.run(augmenter(play, **options).augment(trajectory, play.questions[trajectory.question_id]))


def test_queries_become_the_question_and_a_verification_round_is_added(play):
    original = play([search("brick thing"), search("the apple"), answer("1", " page apple 1 .")])
    assert original.shown_page_ids == ["deck#page=2", "deck#page=1"]
    teacher = Teacher()
    edited = run(play, original, teacher=teacher)
    kinds = [turn.action.kind for turn in edited.turns]
    assert kinds == ["search", "search", "search", "answer"]
    assert {turn.action.query.strip() for turn in edited.turns[:3]} == {"apple number"}
    assert edited.shown_page_ids[:2] == original.shown_page_ids
    assert edited.shown_page_ids[2] in {"deck#page=3", "deck#page=4"}
    assert [turn.is_verification for turn in edited.turns[:3]] == [False, False, True]
    assert edited.turns[2].think.strip() == f"page apple 1 . {STATEMENT}"
    assert edited.turns[3].think == "page brick , not apple ."
    assert edited.answer == original.answer == "1"
    # The teacher saw the very context the new last turn stands in, the new page last.
    assert teacher.requests[0].messages == edited.turns[3].context
    assert [ref.page_id for ref in edited.turns[3].context[-1].images] == [edited.shown_page_ids[2]]
    assert all(turn.completion.token_ids is None for turn in edited.turns)


def test_crops_stay_on_their_page(play):
    crop = "<think> page</think><bbox>[100,100,600,600]</bbox>"
    original = play([search("the apple"), crop, answer("1")])
    edited = run(play, original)
    assert edited.turns[1].observation.crop == original.turns[1].observation.crop
    assert edited.turns[1].completion.text == crop


def test_one_verification_is_enough(play):
    original = play([search("apple number"), search("brick", f" {STATEMENT}"), answer("1")])
    assert original.turns[1].is_verification
    teacher = Teacher()
    edited = run(play, original, teacher=teacher)
    assert len(edited.turns) == 3
    assert not teacher.requests
    assert edited.turns[1].action == Search(query=play.questions["q1"].text)


def test_the_new_page_depends_on_the_seed_alone(play):
    original = play([search("apple number"), answer("1")])
    pages = [run(play, original, seed=seed).shown_page_ids[-1] for seed in (0, 0, *range(1, 12))]
    assert pages[0] == pages[1]
    assert set(pages) == {"deck#page=2", "deck#page=3", "deck#page=4"}


@pytest.mark.parametrize(
    ("replies", "options", "reason"),
    [
        ([search("apple"), answer("1")], {"teacher": Teacher("<answer> 9</answer>")}, "no thought"),
        ([search("apple"), search("brick"), search("cloud"), search("delta"), answer("1")], {}, "every page"),
        (
            [search("apple"), answer("1")],
            {"config": CONFIG.model_copy(update={"max_turns": 2})},
            "no turn left",
        ),
        ([search("apple")] * 8, {}, "no answer"),
    ],
)
def test_what_cannot_be_edited_says_why(play, replies, options, reason):
    with pytest.raises(CannotAugment, match=reason):
        run(play, play(replies), **options)


def test_all_are_recorded_scored_and_counted(play, tmp_path):
    trajectories = [
        play([search("apple number"), answer("1")]),
        play([search("apple number"), answer("1")], sample_index=1),
        play([search("apple")] * 8, sample_index=2),
    ]

    def once():
        with Recorder(tmp_path / "out.jsonl") as recorder:
            return asyncio.run(
                augment_all(augmenter(play), trajectories, play.questions, RuleJudge(), recorder)
            )

    report = once()
    assert (report.read, report.kept, report.left_out) == (3, 2, {"no answer": 1})
    assert (once().read, once().kept) == (1, 0)
    from rollout.recorder import read_lines

    records = list(read_lines(tmp_path / "out.jsonl"))
    assert [(r["reward"]["delta"], r["reward"]["verdict"]) for r in records] == [(1, True)] * 2


def test_a_fault_costs_its_own_trajectory_only(play, tmp_path, capsys):
    class Failing(Teacher):
        async def complete(self, request):
            faults = {2: ConnectionError("503"), 3: ContextTooLong("9000 tokens")}
            asked = next(m.text for m in request.messages if m.role == "user")
            for number, fault in faults.items():
                if play.questions[f"q{number}"].text in asked:
                    raise fault
            return await super().complete(request)

    trajectories = [play([search("apple number"), answer("1")], number=n) for n in (2, 1, 3)]
    trajectories.append(play([search("brick number"), answer("2")], number=2, sample_index=1))
    with Recorder(tmp_path / "out.jsonl") as recorder:
        working = augment_all(
            augmenter(play, Failing()), trajectories, play.questions, RuleJudge(), recorder
        )  # fmt: skip
        report = asyncio.run(working)
    assert report.left_out == {"fault: ConnectionError": 2, "fault: ContextTooLong": 1}
    assert recorder.done == {("q1", 0)}
    assert "q2/1: ConnectionError: 503" in capsys.readouterr().err
    with Recorder(tmp_path / "out.jsonl") as recorder:
        working = augment_all(
            augmenter(play), trajectories, play.questions, RuleJudge(), recorder
        )  # fmt: skip
        report = asyncio.run(working)
    assert (report.read, report.kept) == (3, 3)


def test_a_statement_without_verification_is_refused(play):
    with pytest.raises(ValueError, match="not recognised"):
        Augmenter(Teacher(), play.corpus, CONFIG, load_prompts("tiny"), statement="And now something else.")


def test_text_edits():
    assert query_replaced("<think>use <search>a</search></think><search>b</search>", "Q & A") == (
        "<think>use <search>a</search></think><search>Q & A</search>"
    )
    assert query_replaced("<think>x</think><answer>b</answer>", "Q") == "<think>x</think><answer>b</answer>"
    assert verification_reply("<think>It is 4. </think>\n<answer>4</answer>", "Verify it.", "Q") == (
        "<think>It is 4. Verify it.</think>\n<search>Q</search>"
    )


def test_a_file_is_augmented_and_a_missing_one_explained(play, world, tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text(play([search("apple number"), answer("1")]).model_dump_json() + "\n")
    config = AugmentConfig(
        input=str(path), output=str(tmp_path / "out.jsonl"),
        questions=f"questions:{world / 'questions.jsonl'}", corpus=str(world / "corpus"),
        model="script:unused", episode=CONFIG, statement=STATEMENT,
    )  # fmt: skip
    report = augment_file(config, Teacher())
    assert (report.read, report.kept) == (1, 1)
    arguments = ["--input", str(tmp_path / "none"), "--output", "o", "--questions", "questions:none"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--corpus", str(tmp_path), "--model", "script:none"])
    assert stopped.value.code == 2
    assert "none: there is no such file of trajectories" in capsys.readouterr().err
