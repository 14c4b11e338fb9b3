"""The messages of the environment: picture first, then the text of the event and its injections."""

from __future__ import annotations

from visor.env.config import EpisodeConfig
from visor.env.prompts import EventPrompt, PromptSet, fill
from visor.types import (
    Box,
    ImagePart,
    ImageRef,
    Message,
    Observation,
    ObservationKind,
    Part,
    TextPart,
    text_message,
)


def prompt_messages(question: str, prompts: PromptSet, config: EpisodeConfig) -> list[Message]:
    """The system message and the question, which every context starts with."""
    system = fill(prompts.system, box_rule=prompts.box_rules.get(config.box_space, ""))
    return [text_message("system", system), text_message("user", fill(prompts.question, question=question))]


class ObservationWriter:
    """Words the observations of one question, according to the switches of the configuration."""

    def __init__(self, question: str, prompts: PromptSet, config: EpisodeConfig) -> None:
        self._question = question
        self._prompts = prompts
        self._config = config

    def page(self, page_id: str, *, verification: bool, final: str | None) -> Observation:
        """A page that a search found. `final`: see `_observation`."""
        ref = ImageRef(
            page_id=page_id,
            min_pixels=self._config.page_min_pixels,
            max_pixels=self._config.page_max_pixels,
        )
        texts = self._event(self._prompts.page_observation)
        if self._config.evidence_space and final is None:
            texts.append(self._prompts.crop_evaluation)
        if verification:
            texts.append(self._prompts.verification_hint)
        observation = self._observation(ObservationKind.PAGE, texts, final, ref)
        return observation.model_copy(update={"page_ids": [page_id], "verification_hint": verification})

    def crop(self, page_id: str, region: Box, *, final: str | None) -> Observation:
        """The region of a page, in page pixels, margin included."""
        ref = ImageRef(
            page_id=page_id,
            box=region,
            min_pixels=self._config.crop_min_pixels,
            max_pixels=self._config.crop_max_pixels,
        )
        texts = self._event(self._prompts.crop_observation)
        if self._config.evidence_space:
            texts.append(self._prompts.crop_correction)
        observation = self._observation(ObservationKind.CROP, texts, final, ref)
        return observation.model_copy(update={"page_ids": [page_id], "crop": region})

    def no_new_page(self, *, any_candidate: bool, final: str | None) -> Observation:
        """A search that showed no page: all candidates have been shown, or there was none at all."""
        event = self._prompts.no_new_page if any_candidate else self._prompts.no_match
        return self._observation(ObservationKind.NO_NEW_PAGE, self._event(event), final)

    def invalid(self, reason: str, *, final: str | None) -> Observation:
        texts = self._event(self._prompts.invalid_action, reason=reason)
        return self._observation(ObservationKind.INVALID, texts, final)

    def _event(self, event: EventPrompt, **values: str) -> list[str]:
        return [fill(event.text, **values), *self._intent(event)]

    def _intent(self, event: EventPrompt) -> list[str]:
        """The intent injection: the question again and, where there is one, the way to the evidence."""
        if not self._config.intent_injection:
            return []
        pointer = self._prompts.evidence_pointer if self._config.evidence_space else ""
        return [fill(event.intent, question=self._question), pointer]

    def _observation(
        self, kind: ObservationKind, texts: list[str], final: str | None, ref: ImageRef | None = None
    ) -> Observation:
        """`final` is the evidence block ("" when empty) before the last call, else None: the forced-answer
        prompt and the whole block then follow the observation."""
        if final is not None:
            forced = self._prompts.forced_answer
            texts = [*texts, forced.text, *self._intent(forced), final]
        parts: list[Part] = [ImagePart(image=ref)] if ref else []
        parts.append(TextPart(text=self._prompts.join(texts)))
        return Observation(
            kind=kind, message=Message(role="user", content=parts), forced_answer=final is not None
        )
