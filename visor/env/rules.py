"""Which actions are possible at a call. Pure functions of the turns so far, which are the only state."""

from __future__ import annotations

from collections.abc import Sequence

from visor.env.config import EpisodeConfig
from visor.env.window import first_in_window
from visor.types import Action, Crop, ObservationKind, Search, Turn


def latest_page(turns: Sequence[Turn]) -> tuple[int, str] | None:
    """(index of the turn, page id) of the full page shown last; None before any page."""
    for turn in reversed(turns):
        if turn.observation and turn.observation.kind == ObservationKind.PAGE:
            return turn.index, turn.observation.page_ids[0]
    return None


def refusal(action: Action, turns: Sequence[Turn], config: EpisodeConfig) -> str | None:
    """Why a well-formed action is not possible after `turns`, as told to the policy; None when it is.

    The last call takes an answer only, and so does every call after a search whose candidates had all been
    shown. A search without any candidate (words that the collection does not have) closes nothing.
    """
    if not isinstance(action, Search | Crop):
        return None
    if len(turns) + 1 == config.max_turns:
        return "this was the last reply, and it had to be an answer"
    if any(_all_shown(turn) for turn in turns):
        return "no new page is left to see, and only an answer was possible"
    return _crop_refusal(turns, config.window) if isinstance(action, Crop) else None


def _crop_refusal(turns: Sequence[Turn], window: int | None) -> str | None:
    """A crop needs the latest full page, in the window and not yet cropped, and never follows a crop."""
    shown = latest_page(turns)
    if shown is None:
        return "no page has been shown yet that could be enlarged"
    shown_at, _ = shown
    if _observed(turns[-1:]) == [ObservationKind.CROP]:
        return "an enlarged part cannot be enlarged again, and only a search or an answer was possible"
    if ObservationKind.CROP in _observed(turns[shown_at:]):
        return "a part of this page has been enlarged already"
    if shown_at < first_in_window(len(turns), window):
        return "the page is no longer in view"
    return None


def _all_shown(turn: Turn) -> bool:
    nothing_new = turn.observation is not None and turn.observation.kind == ObservationKind.NO_NEW_PAGE
    return nothing_new and bool(turn.candidates)


def _observed(turns: Sequence[Turn]) -> list[ObservationKind]:
    return [turn.observation.kind for turn in turns if turn.observation]
