"""The planned context against rendered prompts of real episodes: the longest one, random ones, every one."""

import asyncio
import itertools
import math
import random

import pytest
from training_world import EPISODE, grpo_settings

from data.corpus import Corpus
from data.questions import load_questions
from grpo.arguments import GrpoConfig
from grpo.planning.context import longest_turns, plan_context
from grpo.planning.pictures import crop_budget, fullest_picture
from grpo.planning.rehearsal import Rehearsal
from grpo.planning.scene import gather
from grpo.planning.wording import Filler, counting_renderer, stand_in_tokenizer
from rollout.rows import trajectory_row, turn_rows
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import Sampling
from visor.models.loading import load_processor
from visor.retrieval.index import open_index
from visor.systems.visor import VisorSystem
from visor.types import Completion, FinishReason

REPLY = 40
"""Tokens of a reply: enough for a box."""


@pytest.fixture(scope="module")
def stage(world):
    """(renderer, corpus, questions)."""
    corpus = Corpus.open(world / "corpus")
    renderer = load_processor(world / "policy").renderer()
    return renderer, corpus, load_questions(f"questions:{world / 'questions.jsonl'}", corpus)


def config_for(world, tmp_path, reply=REPLY, **episode) -> GrpoConfig:
    settings = grpo_settings(world, tmp_path, max_completion_length=reply)
    return GrpoConfig(**{**settings, "episode": {**EPISODE, **episode}})


def plan_of(stage, config, turns=2, reply_tokens=10):
    renderer, corpus, questions = stage
    material = gather(renderer, config.episode, corpus.pages(), questions)
    return plan_context(config, renderer, material, turns, reply_tokens)


class Player:
    """Gives replies of exactly REPLY tokens that were cut: the text, then words up to the limit."""

    name = "player"

    def __init__(self, renderer, texts):
        self.renderer, self.texts, self.prompts = renderer, list(texts), []

    async def complete(self, request):
        encoded = self.renderer.encode(request.messages, self.images)
        self.prompts.append(len(encoded.input_ids))
        ids = self.renderer.text_ids(self.texts.pop(0))
        assert len(ids) <= REPLY
        ids += self.renderer.text_ids(" page") * (REPLY - len(ids))
        return Completion(
            text=self.renderer.reply_text(ids),
            token_ids=ids,
            finish_reason=FinishReason.LENGTH,
            prompt_token_ids=encoded.input_ids,
            image_sizes=encoded.image_sizes,
        )


def play(stage, config, texts, question=0):
    """(trajectory, length of each prompt) of an episode with the real corpus, index and renderer."""
    renderer, corpus, questions = stage
    player = Player(renderer, texts)
    player.images = ImageCutter(corpus)
    retriever = open_index(corpus.path / "index" / "bm25", corpus)
    prompts = load_prompts(config.episode.prompts)
    system = VisorSystem(player, retriever, corpus, config.episode, prompts, Sampling())
    trajectory = asyncio.run(system.solve(questions[question]))
    assert trajectory.error is None, trajectory.error
    return trajectory, player.prompts


def filled(renderer, before, after):
    """A reply of exactly REPLY tokens that ends with `after`."""
    text = before + after
    while len(renderer.text_ids(text)) < REPLY:
        before += " page"
        text = before + after
    assert len(renderer.text_ids(text)) == REPLY
    return text


# ---------------------------------------------------------------- the longest episode


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize("prompts", ["tiny", "visor"])
def test_the_longest_prompts_are_those_of_a_real_episode(stage, world, tmp_path, window, prompts):
    """Pages only: a crop of one image token is not the longest observation then."""
    renderer = stage[0]
    config = config_for(
        world, tmp_path, max_turns=4, window=window, prompts=prompts, page_min_pixels=40000,
        page_max_pixels=50000, crop_min_pixels=784, crop_max_pixels=784,
    )  # fmt: skip
    plan = plan_of(stage, config)
    search = filled(renderer, "verify it", "</think><search> number</search>")
    trajectory, lengths = play(stage, config, [search] * 4)
    assert [turn.observation.kind for turn in trajectory.turns[:3]] == ["page"] * 3
    assert all(turn.is_verification for turn in trajectory.turns[:3])
    assert [call.total for call in plan.calls] == lengths
    assert plan.max_context == lengths[-1] + REPLY
    assert plan.max_images == min(window or 3, 3)
    assert plan.calls[-1].visual == plan.max_images * plan.page_tokens
    image_source = ImageCutter(stage[1])
    whole = trajectory_row(trajectory, renderer, image_source)
    assert plan.worst["trajectory"].longest.tokens == len(whole.input_ids)
    assert plan.worst["trajectory"].longest.sampled == sum(whole.loss_mask) == 4 * REPLY
    rows = turn_rows(trajectory, renderer, image_source)
    assert plan.worst["turn"].tokens == sum(len(row.input_ids) for row in rows)
    assert plan.worst["turn"].longest.tokens == max(len(row.input_ids) for row in rows)
    assert plan.worst["turn"].visual == sum(end - start for row in rows for start, end in row.image_spans)


def test_the_longest_prompts_with_a_crop(stage, world, tmp_path):
    """Without evidence the length of a thought does not matter, only that of the reply."""
    renderer = stage[0]
    config = config_for(
        world, tmp_path, max_turns=4, window=2, evidence_space=False,
        crop_min_pixels=112 * 112, crop_max_pixels=112 * 112,
    )  # fmt: skip
    plan = plan_of(stage, config)
    width, height = fullest_picture(crop_budget(config.episode, 28), (56, 56))
    # The margin of 28 pixels is added to the right and below; a page is 56 pixels wide.
    x, y = (math.ceil((side - 28) / 56 * 1000) for side in (width, height))
    search = filled(renderer, "verify it", "</think><search> number</search>")
    crop = filled(renderer, " page", f"</think><bbox>[0,0,{x},{y}]</bbox>")
    trajectory, early = play(stage, config, [search, crop, search, search])
    assert trajectory.turns[1].observation.crop == (0, 0, width, height)
    _, late = play(stage, config, [search, search, crop, search])
    assert plan.crop_tokens > plan.page_tokens
    assert [call.total for call in plan.calls] == [*early[:3], max(early[3], late[3])]
    assert plan.calls[2].visual == plan.page_tokens + plan.crop_tokens


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize("evidence", [True, False])
@pytest.mark.parametrize("crop_tokens", [1, 4, 30])
def test_no_order_of_turns_is_longer(stage, world, tmp_path, window, evidence, crop_tokens):
    renderer, corpus, questions = stage
    config = config_for(
        world, tmp_path, max_turns=5, window=window, evidence_space=evidence, prompts="visor",
        crop_min_pixels=784, crop_max_pixels=784 * crop_tokens,
    )  # fmt: skip
    scene = gather(renderer, config.episode, corpus.pages(), questions).worst
    rehearsal = Rehearsal(
        scene, config.episode, load_prompts("visor"), renderer, Filler(renderer), reply_tokens=REPLY, cut=True
    )
    for turns in range(5):
        every = [
            kinds
            for kinds in itertools.product(("page", "crop", "notice"), repeat=turns)
            if all(kind != "crop" or (i and kinds[i - 1] == "page") for i, kind in enumerate(kinds))
        ]
        longest = max(rehearsal.lengths(kinds).total for kinds in every)
        # Two orders can differ by the joints between texts alone, which the search does not see.
        assert longest - rehearsal.lengths(longest_turns(rehearsal, turns)).total <= 2


def test_random_episodes_stay_below_the_plan(stage, world, tmp_path):
    """Replies that mean something, of any length up to the limit, in any order."""
    renderer = stage[0]
    config = config_for(world, tmp_path, max_turns=4, window=2)
    plan = plan_of(stage, config)
    images = ImageCutter(stage[1])
    draw = random.Random(1)
    endings = [
        "</think><search> number</search>", "</think><search> apple number</search>",
        "</think><bbox>[0,0,179,179]</bbox>", "</think><bbox>[1,1,9]</bbox>", "</think>", " page",
        "</think><answer> 1</answer>", "</think><search> zzz</search>",
    ]  # fmt: skip
    for _ in range(60):
        texts = []
        for _ in range(4):
            ending = draw.choice(endings)
            words = draw.choices([" page", " apple", " verify it", " evidence", " number", " 7"], k=12)
            text = "".join(words) + ending
            while len(renderer.text_ids(text)) > REPLY:
                words.pop()
                text = "".join(words) + ending
            texts.append(text)
        trajectory, lengths = play(stage, config, texts, question=draw.randrange(4))
        for length, call in zip(lengths, plan.calls):
            assert length <= call.total
        whole = trajectory_row(trajectory, renderer, images)
        assert len(whole.input_ids) <= plan.worst["trajectory"].longest.tokens
        for row in turn_rows(trajectory, renderer, images):
            assert len(row.input_ids) <= plan.worst["turn"].longest.tokens


# ---------------------------------------------------------------- limits


def test_max_prompt_length_bounds_prompts_and_rows(stage, world, tmp_path):
    config = config_for(world, tmp_path, max_turns=5, window=2)
    free = plan_of(stage, config)
    limit = free.calls[2].total - 5
    config.max_prompt_length = limit
    plan = plan_of(stage, config)
    assert plan.stopped_at == 3
    assert (plan.max_prompt, plan.max_context) == (limit, limit + REPLY)
    assert plan.worst["turn"].longest.tokens == limit + REPLY + 2
    assert plan.worst["trajectory"].longest.tokens <= free.worst["trajectory"].longest.tokens


@pytest.mark.parametrize("window", [1, 2, None])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.0])
def test_no_trajectory_that_keeps_to_the_limit_has_a_longer_row(stage, world, tmp_path, window, share):
    renderer, corpus, questions = stage
    config = config_for(world, tmp_path, max_turns=4, window=window)
    config.max_prompt_length = round(share * plan_of(stage, config).max_prompt)
    bound = plan_of(stage, config).worst["trajectory"].longest.tokens
    scene = gather(renderer, config.episode, corpus.pages(), questions).worst
    rehearsal = Rehearsal(
        scene, config.episode, load_prompts("tiny"), renderer, Filler(renderer), reply_tokens=REPLY, cut=True
    )
    longest = 0
    for thoughts in itertools.product(("long", "short"), repeat=3):
        for kinds in itertools.product(("page", "crop", "notice"), repeat=3):
            if any(kind == "crop" and (not i or kinds[i - 1] != "page") for i, kind in enumerate(kinds)):
                continue
            episode = rehearsal._start()
            for kind, thought in [*zip(kinds, thoughts), ("notice", "short")]:
                prompt = renderer.encode(episode.context(), scene.picture)
                if len(prompt.input_ids) > config.max_prompt_length:
                    break
                episode.step(rehearsal.reply(kind, thought))
            if episode.trajectory().turns:
                row = trajectory_row(episode.trajectory(), renderer, scene.picture)
                longest = max(longest, len(row.input_ids))
    assert 0 < longest <= bound


def test_replies_too_short_for_an_action_still_have_a_plan(stage, world, tmp_path):
    plan = plan_of(stage, config_for(world, tmp_path, reply=2))
    assert plan.possible == []
    assert plan.max_images == 0
    plan = plan_of(stage, config_for(world, tmp_path, reply=8))
    assert plan.possible == ["page", "answer"]


def test_one_turn_is_one_call(stage, world, tmp_path):
    plan = plan_of(stage, config_for(world, tmp_path, max_turns=1), turns=1)
    assert len(plan.calls) == 1
    assert plan.worst["turn"].rows == plan.worst["trajectory"].rows == 1


def test_the_typical_episode_has_the_assumed_calls(stage, world, tmp_path):
    plan = plan_of(stage, config_for(world, tmp_path, max_turns=4), turns=3, reply_tokens=12)
    assert plan.typical["turn"].rows == len(plan.typical_calls) == 3
    assert plan.typical["trajectory"].longest.sampled == 3 * 12
    assert plan.typical["trajectory"].visual == 2 * plan.page_tokens


# ---------------------------------------------------------------- without a tokenizer


def test_the_stand_in_counts_characters():
    renderer = counting_renderer(stand_in_tokenizer(), _Vision())
    assert len(renderer.text_ids("a" * 41)) == 11
    text = "agent\n<|im_end|> {question} é"
    assert len(renderer.text_ids(text)) == -(-len(text) // 4)
    assert len(renderer.text_ids(Filler(renderer).text(50, "verify it", "</think>"))) == 50


class _Vision:
    spatial_merge_size, patch_size = 2, 14


def test_without_corpus_and_questions_something_usual_is_assumed():
    renderer = counting_renderer(stand_in_tokenizer(), _Vision())
    material = gather(renderer, EpisodeConfig(), None, None)
    assert len(material.assumed) == 2
    config = GrpoConfig(model_name_or_path="m", output_dir="o", corpus="c", questions="q")
    plan = plan_context(config, renderer, material, 5, 150)
    assert (plan.page_tokens, plan.crop_tokens) == (512, 1024)
    assert plan.max_images == 2
    assert plan.calls[-1].visual == 512 + 1024
