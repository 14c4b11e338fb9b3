"""Random inputs: no exception, no region outside its page. A failure names its input; see `fuzz_inputs`."""

import math
import random
from collections.abc import Callable

import pytest
from env_helpers import TINY, VISOR, Broken, Ranking, pages
from fuzz_inputs import box, budget, generator, reply, side, turn_reply

from visor.env.actions import parse_response
from visor.env.config import EpisodeConfig
from visor.env.crop import MIN_SIDE, InvalidBox, crop_region
from visor.env.episode import EnvironmentFault, Episode
from visor.env.policy import PassThrough
from visor.models.smart_resize import FACTOR, MAX_RATIO, smart_resize
from visor.types import Answer, Completion, Crop, Invalid, Question, Search, StopReason, Trajectory

SHORT = 2_000


def check_parser(index: int) -> None:
    rng = generator("parser", index)
    text, space = reply(rng), rng.choice(["norm1000", "pixels"])
    parsed = parse_response(text, space)
    assert parsed.format_ok == (not parsed.flags)
    assert len(set(parsed.flags)) == len(parsed.flags)
    assert parsed.think == parsed.think.strip()
    match parsed.action:
        case Crop(box=values, space=stamped):
            assert stamped == space
            assert all(math.isfinite(value) and abs(value) < 1e6 for value in values)
        case Search(query=query):
            assert query
            assert query == query.strip()
        case Invalid(reason=reason, raw=raw):
            assert reason
            assert raw == text
            assert not parsed.format_ok
        case Answer():
            assert parsed.think_closed


def check_crop(index: int) -> bool:
    """True when the box names a region; it then lies in the page and can be shown within the bounds."""
    rng = generator("crop", index)
    page, seen = (side(rng), side(rng)), (side(rng), side(rng))
    space, margin = rng.choice(["norm1000", "pixels"]), rng.choice([0, 0, 1, 28, 28, 500, 50_000])
    action = Crop(box=box(rng, (1000, 1000) if space == "norm1000" else seen), space=space)
    try:
        left, top, right, bottom = crop_region(action, page, seen, margin=margin)
    except InvalidBox:
        return False
    assert all(type(value) is int for value in (left, top, right, bottom))
    assert 0 <= left < right <= page[0]
    assert 0 <= top < bottom <= page[1]
    shorter, longer = sorted((right - left, bottom - top))
    assert shorter >= MIN_SIDE
    assert longer <= MAX_RATIO * shorter
    check_resize(right - left, bottom - top, *budget(rng))
    return True


def check_resize(width: int, height: int, min_pixels: int, max_pixels: int) -> None:
    """Sides are multiples of the factor, and the area leaves the bounds only as `smart_resize` says."""
    if max(width, height) > MAX_RATIO * min(width, height):
        with pytest.raises(ValueError, match="longer than"):
            smart_resize(width, height, min_pixels=min_pixels, max_pixels=max_pixels)
        return
    new_width, new_height = smart_resize(width, height, min_pixels=min_pixels, max_pixels=max_pixels)
    assert new_width % FACTOR == new_height % FACTOR == 0
    assert min(new_width, new_height) >= FACTOR
    area = new_width * new_height
    one_step = FACTOR * (new_width + new_height + FACTOR)
    assert area <= max_pixels or area - one_step < min_pixels or min(new_width, new_height) == FACTOR
    assert area >= min_pixels or area + one_step > max_pixels
    settings = EpisodeConfig()
    for low, high in (
        (settings.page_min_pixels, settings.page_max_pixels),
        (settings.crop_min_pixels, settings.crop_max_pixels),
    ):
        new_width, new_height = smart_resize(width, height, min_pixels=low, max_pixels=high)
        assert low <= new_width * new_height <= high


def check_pages(index: int) -> None:
    """The smart resize of whole pages, 1×20000 among them."""
    rng = generator("page", index)
    check_resize(side(rng), side(rng), *budget(rng))


def random_config(rng: random.Random) -> EpisodeConfig:
    page, crop = budget(rng), budget(rng)
    return EpisodeConfig(
        max_turns=rng.choice([1, 2, 3, 10, 15]),
        window=rng.choice([None, 1, 2, 2, 3, 20]),
        top_k=rng.choice([1, 3, 10]),
        page_min_pixels=page[0],
        page_max_pixels=page[1],
        crop_min_pixels=crop[0],
        crop_max_pixels=crop[1],
        crop_margin=rng.choice([0, 28, 5000]),
        box_space=rng.choice(["norm1000", "pixels"]),
        intent_injection=rng.random() < 0.5,
        evidence_space=rng.random() < 0.7,
        min_thought_chars=rng.choice([0, 5, 50]),
    )


def check_episode(index: int) -> int:
    """Play one episode of random replies to its end; returns its turns."""
    rng = generator("episode", index)
    config = random_config(rng)
    sizes = {page_id: (side(rng), side(rng)) for page_id in pages(12)}
    episode = Episode(
        Question(question_id="q", text=rng.choice(["How many ships?", "{thought} <search>", "\u2028"])),
        Broken() if rng.random() < 0.02 else Ranking(pages(rng.choice([0, 1, 5, 12]))),
        config,
        rng.choice([VISOR, TINY]),
        sizes.__getitem__,
        evidence_policy=rng.choice([None, PassThrough()]),
    )
    try:
        while not episode.done:
            check_context(episode, config)
            episode.step(Completion(text=(turn_reply if rng.random() < 0.8 else reply)(rng)))
    except EnvironmentFault:
        assert episode.trajectory().error is not None
    check_trajectory(episode.trajectory(), config, sizes)
    return len(episode.trajectory().turns)


def check_context(episode: Episode, config: EpisodeConfig) -> None:
    messages = episode.context()
    kept = len(episode.trajectory().turns)
    kept = kept if config.window is None else min(kept, config.window)
    roles = [message.role for message in messages]
    assert roles[:2] == ["system", "user"]
    assert roles.count("assistant") == kept
    assert len(roles) - 2 - 2 * kept in ((0, 1) if config.evidence_space else (0,))
    assert sum(len(message.images) for message in messages) <= kept


def check_trajectory(trajectory: Trajectory, config: EpisodeConfig, sizes: dict) -> None:
    assert 1 <= len(trajectory.turns) <= config.max_turns
    assert trajectory.stop_reason in (StopReason.ANSWER, StopReason.MAX_TURNS, StopReason.ERROR)
    assert (trajectory.answer is not None) == (trajectory.stop_reason == StopReason.ANSWER)
    searched = [
        turn.observation.page_ids
        for turn in trajectory.turns
        if isinstance(turn.action, Search) and turn.observation
    ]
    shown = [page_id for page_ids in searched for page_id in page_ids]
    assert len(set(shown)) == len(shown)
    for turn in trajectory.turns:
        if turn.observation and turn.observation.crop:
            left, top, right, bottom = turn.observation.crop
            width, height = sizes[turn.observation.page_ids[0]]
            assert turn.observation.page_ids[0] in shown
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height


def run(check: Callable[[int], int | None], index: int) -> int:
    """Run `check` on input `index`; an exception or a failed check names the input."""
    try:
        return check(index) or 0
    except Exception as error:
        error.add_note(f"input: {check.__name__}({index})")
        raise


def run_turns(count: int) -> None:
    played = index = 0
    while played < count:
        played, index = played + run(check_episode, index), index + 1


def test_random_replies():
    for index in range(SHORT):
        run(check_parser, index)


def test_random_boxes_and_pages():
    regions = sum(run(check_crop, index) for index in range(SHORT))
    assert SHORT / 10 < regions < SHORT
    for index in range(SHORT):
        run(check_pages, index)


def test_random_episodes():
    run_turns(SHORT)


@pytest.mark.slow
def test_100_000_random_replies():
    for index in range(100_000):
        run(check_parser, index)


@pytest.mark.slow
def test_50_000_random_boxes_and_as_many_pages():
    for index in range(50_000):
        run(check_crop, index)
        run(check_pages, index)


@pytest.mark.slow
def test_50_000_random_turns():
    run_turns(50_000)
