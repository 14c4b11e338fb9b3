"""The slide world: answers stand in the pixels only, splits share no company, the expert is right."""

import random
from itertools import pairwise
from pathlib import Path

import pypdfium2
import pytest

from data import slide_world
from data.corpus import Corpus, ingest
from data.slide_expert import (
    EXTRA_SEARCH_SHARES,
    SLIDE_EPISODE,
    Teacher,
    describe,
    expert_trajectories,
    main,
    malformed,
)
from data.slide_lessons import WORDS, copy_lessons, first_turn_lessons, read_lessons, vocabulary_texts
from data.slide_world import FIRST_NAMES, SECOND_NAMES, TOPICS, make_world, read_slides, write_world
from rewards.combine import score
from rewards.judge import RuleJudge
from visor.env.actions import parse_response
from visor.models.loading import load_model, load_processor
from visor.models.tiny import build_tokenizer
from visor.retrieval.index import build_index, default_index_path, open_index
from visor.types import Invalid, Search, split_page_id

DECKS = {"train": 12, "validation": 2, "test": 4}


@pytest.fixture(scope="module")
def world():
    return make_world(seed=3, decks=DECKS)


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    write_world(world, out)
    return out


@pytest.fixture(scope="module")
def train(folder):
    report = ingest([folder / "train" / "documents"], folder / "corpus", workers=1)
    assert report.ok
    corpus = Corpus.open(folder / "corpus")
    build_index(corpus, default_index_path(folder / "corpus"))
    return corpus


def test_the_same_seed_gives_the_same_world_and_another_seed_another(world):
    again = make_world(seed=3, decks=DECKS)
    assert again.decks == world.decks
    assert again.questions == world.questions
    assert make_world(seed=4, decks=DECKS).decks != world.decks


def test_splits_share_no_company_and_no_question(world):
    names = [deck.name for decks in world.decks.values() for deck in decks]
    assert len(set(names)) == len(names) == sum(DECKS.values())
    ids = [q.question_id for questions in world.questions.values() for q in questions]
    assert len(set(ids)) == len(ids)


def test_gold_pages_hold_the_asked_facts(world):
    for split in DECKS:
        slides = world.slides(split)
        for question in world.questions[split]:
            facts = [fact for page in question.gold_page_ids for fact in slides[page].facts]
            if question.tags["hop"] == "single":
                topic = question.text.split(" of ")[0]
                assert dict(facts)[topic] == int(question.gold_answers[0])
            else:
                first, second = question.text.split(" of ")[0].removeprefix("more ").split(" or ")
                values = dict(facts)
                assert values[first] != values[second]
                assert question.gold_answers == [first if values[first] > values[second] else second]


def test_no_text_layer_holds_a_value_but_all_titles_and_topics(folder, world):
    deck = world.decks["train"][0]
    with pypdfium2.PdfDocument(folder / "train" / "documents" / deck.doc_id) as document:
        assert len(document) == len(deck.slides)
        for page, slide in zip(document, deck.slides):
            text = page.get_textpage().get_text_range()
            assert not any(character.isdigit() for character in text)
            assert slide.name in text
            assert all(topic in text for topic in slide.topics)


def test_different_values_give_different_pixels(folder, train, world):
    """The value is on the page: two digits at the same place differ clearly."""
    crops = {}
    for slide in world.slides("train").values():
        picture = train.image(slide.page_id).convert("L")
        side = picture.width
        crop = picture.crop((side * 3 // 4, side // 4, side, side // 2))
        crops.setdefault(slide.facts[0][1], crop)
    assert len(crops) >= 5
    values = sorted(crops)
    for a, b in pairwise(values):
        difference = sum(abs(x - y) for x, y in zip(crops[a].tobytes(), crops[b].tobytes()))
        assert difference > 255 * 100


def test_slides_read_back(folder, world):
    assert read_slides(folder / "test" / "slides.jsonl") == world.slides("test")


def test_a_rewritten_world_keeps_no_document_of_the_old_one(tmp_path):
    write_world(make_world(seed=1, decks={"train": 3}), tmp_path)
    other = make_world(seed=2, decks={"train": 2})
    write_world(other, tmp_path)
    documents = sorted(path.name for path in (tmp_path / "train" / "documents").iterdir())
    assert documents == sorted(deck.doc_id for deck in other.decks["train"])


def test_expert_trajectories_are_right_and_verify_only_sometimes(folder, train, world):
    retriever = open_index(default_index_path(folder / "corpus"), train)
    questions = world.questions["train"]
    trajectories = expert_trajectories(questions, world.slides("train"), retriever, train, seed=0)
    assert [t.question_id for t in trajectories] == [q.question_id for q in questions]
    deltas = []
    for trajectory, question in zip(trajectories, questions):
        reward = score(trajectory, question, RuleJudge())
        assert reward.verdict is True, trajectory.question
        assert reward.delta is not None
        assert all(turn.format_ok for turn in trajectory.turns)
        deltas.append(reward.delta)
    share = deltas.count(1) / len(deltas)
    assert abs(share - EXTRA_SEARCH_SHARES[1]) < 0.1
    verifying = [t for t, delta in zip(trajectories, deltas) if delta == 1]
    assert all(sum(turn.is_verification for turn in t.turns) == 1 for t in verifying)


def test_expert_writes_what_stands_on_the_page_it_was_shown(folder, train, world):
    retriever = open_index(default_index_path(folder / "corpus"), train)
    slides = world.slides("train")
    for trajectory in expert_trajectories(world.questions["train"][:20], slides, retriever, train):
        for before, turn in zip(trajectory.turns, trajectory.turns[1:]):
            page = before.observation.page_ids[0]
            assert turn.think.strip().startswith(describe(slides[page]))


def test_a_fixed_searcher_searches_as_often_as_told(folder, train, world):
    retriever = open_index(default_index_path(folder / "corpus"), train)
    questions = [q for q in world.questions["train"] if q.tags["hop"] == "single"]
    teacher = Teacher(always_searches=2)
    ended = set()
    for question, trajectory in zip(
        questions, expert_trajectories(questions, world.slides("train"), retriever, train, teacher=teacher)
    ):
        reward = score(trajectory, question, RuleJudge())
        assert (reward.searches, len(trajectory.turns)) == (2, 3)
        assert reward.verdict is (reward.delta is not None)  # right when the page was among the two
        ended.add(reward.delta)
    assert ended == {None, 0, 1}


def test_a_noisy_expert_is_refused_and_says_it_again(folder, train, world):
    retriever = open_index(default_index_path(folder / "corpus"), train)
    questions = world.questions["train"]
    noisy = expert_trajectories(
        questions, world.slides("train"), retriever, train, teacher=Teacher(noise=0.4)
    )
    invalid = [isinstance(turn.action, Invalid) for t in noisy for turn in t.turns]
    assert 0.3 < sum(invalid) / len(invalid) < 0.5
    clean = expert_trajectories(questions, world.slides("train"), retriever, train)
    finished = [(a, b) for a, b in zip(noisy, clean) if a.answer]
    assert len(finished) > len(questions) // 2
    for trajectory in noisy:
        for turn, after in zip(trajectory.turns, trajectory.turns[1:]):
            if isinstance(turn.action, Invalid) and isinstance(after.action, Search):
                assert after.action.query == trajectory.question


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 2.0}, "noise 2.0"),
        ({"noise": -1.0}, "noise -1.0"),
        ({"shares": (-1.0, 2.0)}, "extra_searches"),
        ({"shares": (0.0, 0.0)}, "extra_searches"),
        ({"shares": (float("nan"), 1.0)}, "extra_searches"),
        ({"always_searches": -3}, "always_searches -3"),
        ({"always_searches": 10}, "the answer among them"),
        ({"always_searches": 2, "noise": 0.5}, "has no noise"),
    ],
)
def test_a_teacher_of_nonsense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Teacher(**settings)


def test_slides_of_another_split_are_refused(folder, train, monkeypatch, capsys):
    arguments = {
        "--questions": f"questions:{folder / 'train' / 'questions.jsonl'}",
        "--slides": folder / "test" / "slides.jsonl",
        "--corpus": folder / "corpus",
        "--output": folder / "never.jsonl",
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["slide_expert", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "slides.jsonl lacks pages of" in capsys.readouterr().err
    assert not (folder / "never.jsonl").exists()


@pytest.mark.parametrize("seed", range(6))
def test_no_malformed_reply_can_be_carried_out(seed):
    rng = random.Random(seed)
    for action in ("<search> tax of red fox</search>", "<answer> 4</answer>"):
        text = malformed(f"<think> red fox , tax 4 .</think>{action}", rng)
        assert isinstance(parse_response(text).action, Invalid), text


def test_every_word_is_one_token_in_context():
    tokenizer = build_tokenizer(vocabulary_texts(repeats=100), 1000)
    for word in (*FIRST_NAMES, *SECOND_NAMES, *TOPICS, *map(str, range(10)), "answer", "found", "verify"):
        assert len(tokenizer.tokenize(f" {word}")) == 1, word
    assert len(tokenizer) < 800


def test_lessons_show_no_page_but_the_one_they_describe(world):
    for lesson, (page_id, slide) in zip(read_lessons(world.slides("train")), world.slides("train").items()):
        assert [image["page_id"] for image in lesson["images"]] == [page_id]
        assert lesson["images"][0]["max_pixels"] == SLIDE_EPISODE["page_max_pixels"]
        assert split_page_id(page_id)[0].removesuffix(".pdf") == slide.name.replace(" ", "-")
        assert lesson["messages"][-1]["content"] == f" {describe(slide)}"
    for lesson in first_turn_lessons(world.questions["train"][:5]):
        assert lesson["images"] == []
    for lesson in copy_lessons(20):
        user, reply = lesson["messages"][1]["content"], lesson["messages"][2]["content"]
        assert user == f"copy{reply}"


def test_the_shipped_warm_start_is_small_and_speaks_the_world_s_words():
    folder = Path(slide_world.__file__).parent / "slide_policy"
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(files.values()) <= 5 * 2**20
    assert all(name.endswith((".json", ".safetensors", ".jinja")) for name in files)
    processor = load_processor(folder)
    for word in (*WORDS, "answer", "found", "verify", "confirmed"):
        assert len(processor.tokenizer.tokenize(f" {word}")) == 1, word
    assert load_model(folder, dtype="float32").num_parameters() < 1_000_000
