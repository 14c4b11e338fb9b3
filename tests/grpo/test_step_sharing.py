"""What the episodes of a step share, and what they record: pictures, features, seeds, turns."""

import json
from collections import Counter

import pytest
import torch
from training_world import EPISODE, TOPICS, search, spread_reward, trainer_for

from data.corpus import Corpus
from visor.models.rendering import ChatRenderer
from visor.types import RewardBreakdown, Trajectory, derive_seed

FREE = {"filter_zero_std_groups": False, "max_steps": 1, "save_steps": 5}


class Searching:
    """Asks the policy, then puts a search in the place of its reply: a random policy finds no page."""

    def __init__(self, client):
        self.client, self.name = client, client.name

    async def complete(self, request):
        completion = await self.client.complete(request)
        turn = sum(message.role == "assistant" for message in request.messages)
        text = search(f"{TOPICS[turn]} number")
        ids = self.client.renderer.reply_ids(text)
        update = {"text": text, "token_ids": ids, "logprobs": [-1.0] * len(ids)}
        return completion.model_copy(update=update)


def by_sample(trajectory, question, judge):
    return RewardBreakdown(total=float(trajectory.sample_index), judge="test")


@pytest.fixture
def counted(monkeypatch):
    """How often each page was decoded and each (page, budget) resized."""
    decoded, resized = Counter(), Counter()
    image, make = Corpus.image, ChatRenderer._make_pixels

    def counting_image(corpus, page_id):
        decoded[page_id] += 1
        return image(corpus, page_id)

    def counting_make(renderer, ref, images):
        resized[ref.key] += 1
        return make(renderer, ref, images)

    monkeypatch.setattr(Corpus, "image", counting_image)
    monkeypatch.setattr(ChatRenderer, "_make_pixels", counting_make)
    return decoded, resized


@pytest.mark.parametrize("frozen", [True, False])
def test_pictures_are_made_once_and_features_kept_while_vision_is_frozen(world, tmp_path, counted, frozen):
    """Two steps of six episodes with three searches each, and their updates."""
    freeze = {"freeze": ["vision_tower", "projector"]} if frozen else {}
    settings = {**FREE, "max_steps": 2, "credit": "trajectory", **freeze}
    trainer = trainer_for(world, tmp_path, by_sample, **settings)
    trainer.engine.system.client = Searching(trainer.client)
    encoded = []
    visual = trainer.model.model.visual
    forward = visual.forward

    def counting_forward(pixels, *args, **kwargs):
        grids = kwargs.get("grid_thw", args[0] if args else None)
        if torch.is_inference_mode_enabled():
            encoded.append(len(grids))
        return forward(pixels, *args, **kwargs)

    visual.forward = counting_forward
    trainer.train()
    decoded, resized = counted
    shown = {ref.key for t in trajectories(tmp_path) for turn in t.turns for ref in images_of(turn)}
    assert len(shown) == 2  # of three searches, the last one's page is never shown to a call
    assert sum(len(images_of(turn)) for t in trajectories(tmp_path) for turn in t.turns) == 2 * 6 * 2
    assert set(decoded.values()) == set(resized.values()) == {1}
    assert resized.keys() == shown
    # Frozen: each picture encoded once in the whole run. Training: once for each batch of calls it is in.
    assert sum(encoded) == (2 if frozen else 2 * 2)


def images_of(turn):
    return [ref for message in turn.context for ref in message.images]


def trajectories(folder):
    return [
        Trajectory.model_validate_json(line)
        for path in sorted((folder / "rollouts").iterdir())
        for line in path.read_text().splitlines()
    ]


def test_what_a_turn_records(world, tmp_path):
    trainer = trainer_for(world, tmp_path, **{**FREE, "max_steps": 2})
    trainer.engine.system.client = Searching(trainer.client)
    trainer.train()
    renderer = trainer.client.renderer
    found = trajectories(tmp_path)
    assert len(found) == 12
    for number, trajectory in enumerate(found):
        assert trajectory.turns
        for turn in trajectory.turns:
            completion = turn.completion
            encoded = renderer.encode(turn.context, trainer.client.images)
            assert completion.prompt_token_ids == encoded.input_ids
            assert renderer.reply_text(completion.token_ids) == completion.text
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            assert completion.policy_version == number // 6  # the updates done before the step
            for ref in images_of(turn):
                budget = EPISODE["page_min_pixels"], EPISODE["page_max_pixels"]
                assert (ref.min_pixels, ref.max_pixels) == budget
            assert completion.image_sizes == [(56, 56)] * len(images_of(turn))


def samples(folder):
    return [
        (t.question_id, t.sample_index, t.seed, [turn.completion.token_ids for turn in t.turns])
        for t in trajectories(folder)
    ]


def test_samples_depend_on_neither_batch_size_nor_concurrency(world, tmp_path):
    settings = {**FREE, "max_completion_length": 16}
    folders = {}
    modes = {
        "together": {},
        "calls alone": {"rollout_batch_size": 1},
        "episodes alone": {"max_concurrency": 1},
    }
    for name, more in modes.items():
        folders[name] = tmp_path / name
        trainer_for(world, folders[name], spread_reward, **settings, **more).train()
    together, *others = (samples(folder) for folder in folders.values())
    assert len({json.dumps(ids) for *_, ids in together}) == 6
    assert {seed for _, _, seed, _ in together} == {derive_seed(7, 1)}
    assert others == [together, together]
    logprobs = [
        [x for t in trajectories(folder) for turn in t.turns for x in turn.completion.logprobs]
        for folder in folders.values()
    ]
    for other in logprobs[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(logprobs[0]), atol=1e-5, rtol=0)
