"""`visor ask`: one question, a live trace of its turns, the answer with its pages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollout.build import AgentConfig, build_agent
from rollout.trace import ending_text, turn_text
from visor.models.base import PolicyClient
from visor.types import Question, Trajectory


def ask(
    config: AgentConfig,
    question: str,
    seed: int = 0,
    client: PolicyClient | None = None,
    show: Callable[[str], None] = print,
) -> Trajectory:
    """Answer one question; `show` gets each turn's text as it is done, then the ending.

    `client` stands in for the configured model. ValueError for an empty question or an agent that cannot be
    built; a fault while answering is shown and recorded in the trajectory.
    """
    if not question.strip():
        raise ValueError("the question is empty")
    agent = build_agent(config, client)
    asked = Question(question_id="ask", text=question.strip())
    solving = agent.system.solve(asked, seed=seed, on_turn=lambda turn: show(turn_text(turn)))
    trajectory = asyncio.run(solving)
    show(ending_text(trajectory))
    return trajectory
