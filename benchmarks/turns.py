"""What a turn costs: around the policy, on real pages; and at the policy, by the number of the turn.

One thread, medians; seconds are the processor's.

- around: episodes of four calls (search, crop, search, answer) over pages rendered from PDFs, 5 samples of
  each of 8 questions, VISOR's prompts and page sizes, with a client that replies at once. It renders every
  prompt to ids and prepares every picture, as one with a model does.
- window: ten calls with replies of equal length, each call then sampled again on its own: with the window,
  with all turns kept, and with the window but without the evidence block ("net of the evidence").
"""

import argparse
import asyncio
import contextlib
import gc
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: it has a file with a package's name

import torch

from data.corpus import Corpus, ingest
from data.slide_expert import SLIDE_EPISODE
from data.slide_world import make_world, write_world
from rewards.judge import RuleJudge
from rollout.engine import RolloutEngine
from rollout.group import sample_groups
from rollout.tables import format_table
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.models.loading import load_model, load_processor
from visor.models.scripted import ScriptedClient
from visor.models.transformers import TransformersClient
from visor.retrieval.bm25 import BM25Retriever
from visor.systems.visor import VisorSystem
from visor.types import Completion, Question, Trajectory

POLICY = Path(__file__).parents[1] / "data" / "slide_policy"
PDFS = Path(__file__).resolve().parents[2] / "shared" / "data" / "mmlongbench" / "documents"
QUESTIONS, GROUP, CALLS, REPLY_TOKENS = 8, 5, 10, 40


# ---------------------------------------------------------------- around the policy


class PreparingClient(ScriptedClient):
    """Replies from a script after doing what a client with a model does before its model runs."""

    def __init__(self, script, renderer, images) -> None:
        super().__init__(script)
        self.renderer, self.images = renderer, images
        self.encoding = self.pictures = 0.0
        self.shown: set[tuple] = set()

    async def complete(self, request: Request) -> Completion:
        started = process_time()
        prompt = self.renderer.encode(request.messages, self.images)
        encoded = process_time()
        for ref in prompt.images:
            self.renderer.pixels(ref, self.images)
            self.shown.add(ref.key)
        self.encoding += encoded - started
        self.pictures += process_time() - encoded
        reply = await super().complete(request)
        return reply.model_copy(
            update={"prompt_token_ids": prompt.input_ids, "image_sizes": prompt.image_sizes}
        )


def script_for(texts: Sequence[str]):
    """Search, crop the page, search again, answer; every question has queries of its own, from `texts`."""

    def reply(request: Request) -> str:
        shown = "".join("C" if ref.box else "P" for message in request.messages for ref in message.images)
        rng = random.Random(request.messages[1].text)
        queries = [" ".join(rng.sample(rng.choice(texts).split(), 4)) for _ in range(2)]
        actions = {"": f"<search>{queries[0]}</search>", "P": "<bbox>[100,100,600,500]</bbox>"}
        actions |= {"PC": f"<search>{queries[1]}</search>", "CP": "<answer>1</answer>"}
        return f"<think>The page gives 4 for sales and 7 for energy.</think>{actions[shown]}"

    return reply


def around(pdfs: Path, repeats: int) -> None:
    documents = sorted(pdfs.glob("*.pdf"))
    if not documents:
        print(f"no PDFs in {pdfs}: nothing is measured around the policy", end="\n\n")
        return
    ingest(documents[:3], "real", workers=1)
    corpus = Corpus.open("real")
    index = BM25Retriever.build(corpus.pages())
    gold = [next(iter(corpus.pages())).page_id]
    scripted = script_for([page.text for page in corpus.pages() if len(page.text.split()) > 20])
    questions = [
        Question(question_id=f"q{i}", text=f"What is number {i}?", gold_answers=["1"], gold_page_ids=gold)
        for i in range(QUESTIONS)
    ]
    rows = []
    for _ in range(repeats):
        images = ImageCutter(corpus)
        client = PreparingClient(scripted, load_processor(POLICY).renderer(), images)
        parts = client, index, corpus, EpisodeConfig(), load_prompts("visor"), Sampling()
        engine = RolloutEngine(VisorSystem(*parts), RuleJudge())
        gc.collect()
        started = process_time()
        groups = sample_groups(engine, questions, GROUP, run_seed=0, step=1)
        spent = process_time() - started
        done = [t for group in groups for t in group.trajectories]
        assert all(len(t.turns) == 4 and t.answer == "1" for t in done), "the script was not played"
        environment = spent - client.encoding - client.pictures
        turns = sum(len(t.turns) for t in done)
        each = client.pictures / len(client.shown)
        shares = environment, client.encoding, client.pictures
        rows.append((*(share / turns for share in shares), each, len(client.shown)))
    *times, pictures = [median(column) for column in zip(*rows)]
    names = ["environment: parsing, BM25, crop, templates, records, score", "prompt to ids"]
    names += [f"pictures: {pictures:.0f}, each made once and shared", "  … each of them"]
    table = [(name, f"{1000 * value:.2f}") for name, value in zip(names, times)]
    print(format_table((f"around the policy, real pages, {turns} turns", "ms a turn"), table), end="\n\n")


# ---------------------------------------------------------------- by the number of the turn


class Typist:
    """Nine searches and an answer, with thoughts of equal length."""

    name = "typist"

    def __init__(self, renderer, queries: Sequence[str]) -> None:
        self.renderer, self.queries, self.call = renderer, list(queries), 0

    async def complete(self, request: Request) -> Completion:
        self.call += 1
        last = self.call == CALLS
        action = "<answer> 1</answer>" if last else f"<search> {self.queries[self.call - 1]}</search>"
        text = f"<think>{' page' * 30}</think>{action}"
        return Completion(text=text, token_ids=self.renderer.reply_ids(text), model=self.name)


def episode(stage, **options) -> Trajectory:
    world, corpus, index, renderer = stage
    config = EpisodeConfig(**SLIDE_EPISODE, max_turns=CALLS, **options)
    deck = world.decks["test"][0]
    queries = [f"{topic} of {deck.name}" for slide in deck.slides for topic in slide.topics]
    client = Typist(renderer, random.Random(0).sample(queries, CALLS))
    system = VisorSystem(client, index, corpus, config, load_prompts("tiny"), Sampling())
    trajectory = asyncio.run(system.solve(world.questions["test"][0]))
    assert len(trajectory.turns) == CALLS, trajectory.error
    return trajectory


def window(repeats: int) -> None:
    world = make_world(decks={"test": 20})
    write_world(world, Path())
    ingest(["test/documents"], "corpus", workers=1)
    corpus = Corpus.open("corpus")
    renderer, images = load_processor(POLICY).renderer(), ImageCutter(corpus)
    stage = world, corpus, BM25Retriever.build(corpus.pages()), renderer
    renderer.stop_ids = frozenset()  # every call decodes REPLY_TOKENS
    client = TransformersClient(load_model(POLICY, dtype="float32"), renderer, images)
    greedy = Sampling(temperature=0.0, max_tokens=REPLY_TOKENS)
    ways = {"W = 2": {"window": 2}, "W = 2, net of the evidence": {"window": 2, "evidence_space": False}}
    ways["all turns"] = {"window": None, "evidence_space": False}
    table = []
    for name, options in ways.items():
        contexts = [turn.context for turn in episode(stage, **options).turns]
        prompts = [renderer.encode(messages, images) for messages in contexts]
        visual = [sum(end - start for start, end in prompt.image_spans) for prompt in prompts]
        text = [len(prompt.input_ids) - seen for prompt, seen in zip(prompts, visual)]
        if options["window"]:
            assert visual == [0, 16, *[32] * 8], f"image tokens by call: {visual}"
        seconds: list[list[float]] = [[] for _ in contexts]
        for _ in range(repeats):
            for call, messages in enumerate(contexts):
                started = process_time()
                (reply,) = client.serve([Request(messages, seed=0, sampling=greedy)])
                seconds[call].append(process_time() - started)
                assert isinstance(reply, Completion), reply
        third, tenth = median(seconds[2]), median(seconds[9])
        table.append((name, f"{visual[2]} {visual[9]}", f"{text[2]} {text[9]}", 1000 * third, 1000 * tenth,
                      tenth / third))  # fmt: skip
    titles = ("calls 3 and 10", "image tokens", "text tokens", "call 3, ms", "call 10, ms", "10 / 3")
    print(format_table(titles, table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help="around, window (default: both)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pdfs", type=Path, default=PDFS, help=f"folder of real documents (default {PDFS})")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if "around" in (arguments.parts or ["around"]):
            around(arguments.pdfs, arguments.repeats)
        if "window" in (arguments.parts or ["window"]):
            window(arguments.repeats)


if __name__ == "__main__":
    main()
