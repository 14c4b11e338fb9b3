import pytest
from training_world import answer, search

from rollout.recorder import read_lines
from sft.filter import FilterSettings, defects, filter_trajectories, main

GOOD = [search("apple number"), answer("1")]


def reasons(play, replies, number=1, **settings):
    trajectory = play(replies, number)
    gold = play.questions[trajectory.question_id].gold_page_ids
    return defects(trajectory, gold, FilterSettings(**settings))


def box(*values):
    return f"<think> page</think><bbox>[{','.join(map(str, values))}]</bbox>"


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (GOOD, []),
        ([search("apple number"), box(100, 100, 600, 600), answer("1")], []),
        ([search("apple number"), box(0, 0, 1000, 1000), answer("1")], ["full-image box"]),
        (
            [search("apple number"), box(0, 0, 500, 500), box(0, 0, 400, 400), answer("1")],
            ["box not after a retrieval", "invalid action"],
        ),
        ([box(0, 0, 500, 500), *GOOD], ["box not after a retrieval", "invalid action"]),
        ([search("apple number"), answer("2")], ["wrong answer"]),
        ([search("brick"), answer("1")], ["incomplete retrieval"]),
        ([search("apple number"), search("brick"), answer("1")], []),
        ([search("apple number"), search("brick"), search("cloud"), answer("1")], ["redundant searches"]),
        (["<think> no action</think>", *GOOD], ["invalid action"]),
        ([search("apple number")] * 8, ["failed or unanswered", "answer not judged", "redundant searches"]),
    ],
)
def test_each_filter(play, replies, expected):
    found = reasons(play, replies)
    assert [name for name in found if name in expected] == expected
    if expected != found:  # eight searches also run into the end of the episode
        assert replies == [search("apple number")] * 8


def test_uninformative_searches_count_until_the_gold_page(play):
    replies = [search("brick"), search("cloud"), search("delta"), search("apple number"), answer("1")]
    assert reasons(play, replies) == ["uninformative searches"]
    assert reasons(play, replies, max_uninformative_searches=3) == []


def test_many_retrievals(play):
    replies = [search("brick"), search("cloud"), search("apple number"), answer("1")]
    assert "too many retrievals" in reasons(play, replies, max_retrievals=2)
    assert "too many retrievals" not in reasons(play, replies, max_retrievals=3)


def test_search_that_finds_nothing_new_is_redundant(play):
    replies = [
        *[search(f"{t} number") for t in ("apple", "brick", "cloud", "delta")],
        search("apple"),
        answer("1"),
    ]
    assert "redundant searches" in reasons(play, replies, max_extra_searches=9)


def test_full_box_in_pixels(play):
    trajectory = play([search("apple number"), box(0, 0, 56, 56), answer("1")], box_space="pixels")
    assert "full-image box" not in defects(trajectory, ["deck#page=1"], FilterSettings())
    trajectory.turns[1].completion.image_sizes = [(56, 56)]
    assert "full-image box" in defects(trajectory, ["deck#page=1"], FilterSettings())


def test_report_counts_first_and_all_reasons(play):
    trajectories = [
        play(GOOD),
        play([search("brick"), answer("2")], sample_index=1),
        play([search("apple number"), answer("2")], sample_index=2),
    ]
    kept, report = filter_trajectories(trajectories, play.questions)
    assert [t.sample_index for t in kept] == [0]
    assert (report.read, report.kept) == (3, 1)
    assert report.removed == {"incomplete retrieval": 1, "wrong answer": 1}
    assert report.failing == {"incomplete retrieval": 1, "wrong answer": 2}
    assert "1 of 3 trajectories kept" in str(report)


def test_an_unjudged_answer_is_its_own_reason(play):
    trajectory = play(GOOD)
    trajectory.reward.verdict = None
    assert defects(trajectory, ["deck#page=1"], FilterSettings()) == ["answer not judged"]


def test_the_command_scores_what_has_no_reward(play, world, tmp_path, capsys):
    records = [play(GOOD), play([search("apple number"), answer("2")], sample_index=1)]
    for record in records:
        record.reward = None
    path = tmp_path / "t.jsonl"
    path.write_text("".join(record.model_dump_json() + "\n" for record in records))
    questions = f"questions:{world / 'questions.jsonl'}"
    main([str(path), "--questions", questions, "-o", str(tmp_path / "kept.jsonl")])
    assert "1 of 2 trajectories kept" in capsys.readouterr().out
    (kept,) = read_lines(tmp_path / "kept.jsonl")
    assert (kept["sample_index"], kept["reward"]["verdict"]) == (0, True)


def test_keeping_nothing_is_a_failure(play, world, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(play([search("apple number"), answer("2")]).model_dump_json() + "\n")
    with pytest.raises(SystemExit) as stop:
        main(
            [str(path), "--questions", f"questions:{world / 'questions.jsonl'}", "-o", str(tmp_path / "kept")]
        )
    assert stop.value.code == 1
    shown = capsys.readouterr()
    assert "0 of 1 trajectories kept" in shown.out
    assert "no trajectory was kept" in shown.err
