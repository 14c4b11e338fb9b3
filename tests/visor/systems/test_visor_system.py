import asyncio

from PIL import Image

from visor.env.config import EpisodeConfig
from visor.env.policy import PassThrough
from visor.env.prompts import load_prompts
from visor.models.base import ContextTooLong, Sampling, TooManyImages
from visor.retrieval.base import ScoredPage
from visor.systems.visor import VisorSystem
from visor.types import Completion, Page, Question, StopReason, derive_seed

QUESTION = Question(question_id="q1", text="what colour ?")
SEARCH = "<think>look for it</think><search>colour</search>"
ANSWER = "<think>it is red</think><answer>red</answer>"


class Store:
    def page(self, page_id):
        return Page(page_id=page_id, doc_id="d", page_number=1, image="x", width=280, height=280)

    def pages(self):
        return [self.page("d#page=1")]

    def image(self, page_id):
        return Image.new("RGB", (280, 280))

    def document_path(self, doc_id):
        return None


class Retriever:
    name = "fixed"

    def __init__(self, error=None):
        self.error = error

    def search(self, query, k):
        if self.error:
            raise self.error
        return [ScoredPage(f"d#page={n}", 1.0 / n) for n in range(1, 4)][:k]


class Client:
    """Replies in order; an exception among them is raised."""

    name = "scripted"

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []

    async def complete(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return Completion(text=reply)


def make_system(client, retriever=None, **more):
    config = EpisodeConfig(prompts="tiny")
    return VisorSystem(
        client, retriever or Retriever(), Store(), config, load_prompts("tiny"), Sampling(), **more
    )


def solve(client, retriever=None, factory=None, **more):
    return asyncio.run(
        make_system(client, retriever, evidence_policy_factory=factory).solve(QUESTION, **more)
    )


def test_searches_then_answers():
    client = Client(SEARCH, ANSWER)
    trajectory = solve(client, seed=7, sample_index=2)
    assert (trajectory.answer, trajectory.stop_reason) == ("red", StopReason.ANSWER)
    assert trajectory.shown_page_ids == ["d#page=1"]
    assert (trajectory.seed, trajectory.sample_index) == (7, 2)
    assert trajectory.meta["model"] == "scripted"
    assert client.requests[1].messages == trajectory.turns[1].context
    assert len(client.requests[1].messages[-1].images) == 1


def test_each_request_has_its_own_seed_from_question_sample_and_turn():
    client = Client(SEARCH, SEARCH, ANSWER)
    solve(client, seed=7, sample_index=2)
    assert [request.seed for request in client.requests] == [derive_seed(7, "q1", 2, t) for t in range(3)]


def test_faults_become_records():
    for client, retriever, source, name in [
        (Client(ConnectionError("gone")), None, "policy", "ConnectionError"),
        (Client(SEARCH), Retriever(OSError("index lost")), "environment", "OSError"),
    ]:
        trajectory = solve(client, retriever)
        assert trajectory.stop_reason == StopReason.ERROR
        assert (trajectory.error.source, trajectory.error.type) == (source, name)
        assert trajectory.answer is None
    assert trajectory.turns[0].completion.text == SEARCH, "the turn of the fault stays in the record"


def test_limits_of_the_model_end_the_episode_without_a_fault():
    for error, reason in [
        (ContextTooLong("x"), StopReason.LENGTH),
        (TooManyImages("x"), StopReason.IMAGE_LIMIT),
    ]:
        trajectory = solve(Client(SEARCH, error))
        assert trajectory.stop_reason == reason
        assert trajectory.error is None
        assert len(trajectory.turns) == 1


def test_a_context_that_cannot_be_built_is_an_environment_fault():
    class Broken(PassThrough):
        def render(self, entry, view):
            raise KeyError("caption")

    thoughtful = "<think>the page says it is red</think><search>more</search>"
    trajectory = solve(Client(SEARCH, thoughtful, ANSWER), factory=lambda question: Broken())
    assert trajectory.error is not None
    assert trajectory.error.source == "environment"


def test_evidence_policy_factories_may_wait_and_may_fail():
    async def later(question):
        await asyncio.sleep(0)
        return PassThrough()

    assert solve(Client(ANSWER), factory=later).answer == "red"

    async def failing(question):
        raise TimeoutError("slots")

    trajectory = solve(Client(ANSWER), factory=failing)
    assert (trajectory.error.source, trajectory.error.type) == ("policy", "TimeoutError")
    assert trajectory.turns == []


def test_no_layer_equals_pass_through():
    """The plain agent and the pass-through policy write the same record, times aside."""

    def record(factory):
        trajectory = solve(Client(SEARCH, SEARCH, "?", ANSWER), factory=factory)
        for turn in trajectory.turns:
            turn.retrieval_seconds = 0.0
        del trajectory.meta["wall_seconds"]
        return trajectory.model_dump_json()

    assert record(None) == record(lambda question: PassThrough())


def test_on_turn_sees_every_turn_once_in_order():
    seen = []
    solve(Client(SEARCH, "no action", SEARCH, ANSWER), on_turn=seen.append)
    assert [turn.index for turn in seen] == [0, 1, 2, 3]
    assert seen[-1].observation is None
