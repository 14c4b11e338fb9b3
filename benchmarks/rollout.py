"""Sampling with the Transformers client against `model.generate`, and the cost of an episode around it.

Same requests, one thread, taking turns, medians. `generate` is timed on ready-made tensors, the client from
messages to completions with log-probabilities; the patches of the pages are ready for both.
"""

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: this file has a package's name

import torch
from PIL import Image
from transformers.utils.logging import disable_progress_bar

from data.slide_lessons import vocabulary_texts
from data.slide_world import World, make_world
from rewards.judge import RuleJudge
from rollout.engine import EpisodeJob, RolloutEngine
from rollout.tables import format_table
from visor.env.config import EpisodeConfig
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.models.loading import load_model, load_processor
from visor.models.scripted import ScriptedClient
from visor.models.tensors import collate, model_inputs
from visor.models.tiny import build_tiny_policy
from visor.models.transformers import TransformersClient, banned_ids
from visor.retrieval.bm25 import BM25Retriever
from visor.systems.visor import VisorSystem
from visor.types import ImagePart, ImageRef, Message, Page, Question, TextPart, split_page_id, text_message

AREA, REQUESTS, NEW_TOKENS = 112 * 112, 40, 40
GREEDY = Sampling(temperature=0.0, max_tokens=NEW_TOKENS)
CASES = (("40 different prompts", 40, False), ("the same, page features kept", 40, True))
CASES += (("8 prompts, each 5 times", 8, False),)  # name, number of different prompts, keep features
WIDE = {"initializer_range": 0.1}  # random weights whose replies depend on the prompt
clock = partial(timeit, setup="gc.enable()", number=1)


def picture(ref: ImageRef) -> Image.Image:
    number = split_page_id(ref.page_id)[1]
    return Image.linear_gradient("L").rotate(4 * number).resize((112, 112)).convert("RGB")


def request(number: int, question: str) -> Request:
    """The third call of an episode: two searches, two pages."""
    shown = [text_message("system", load_prompts("tiny").system), text_message("user", question)]
    for page in (2 * number + 1, 2 * number + 2):
        reply = f"<think> {question} not found .</think><search> {question}</search>"
        ref = ImageRef(page_id=f"d#page={page}", min_pixels=AREA, max_pixels=AREA)
        parts = [ImagePart(image=ref), TextPart(text=f" question : {question}")]
        shown += [text_message("assistant", reply), Message(role="user", content=parts)]
    return Request(shown, seed=number, sampling=GREEDY)


def check_equal(replies: list[list[int]], peer) -> None:
    """Every token, up to one where the two best logits of `generate` are a near tie."""
    best = torch.stack(peer.scores, 1).topk(2).values
    tied = (best[..., 0] - best[..., 1] < 1e-3).cumsum(1) > 0  # rounding may swap the two
    differs = torch.tensor(replies) != peer.sequences[:, -NEW_TOKENS:]
    assert not (differs & ~tied).any(), f"(request, token): {(differs & ~tied).nonzero().tolist()} differ"


def compare(policy: str, distinct: int, keep: bool, questions: list[Question], repeats: int) -> list[float]:
    """Median seconds of [generate, client] for REQUESTS requests, `distinct` of them different."""
    model, renderer = load_model(policy, dtype="float32"), load_processor(policy).renderer()
    renderer.stop_ids = frozenset()  # both sides decode NEW_TOKENS
    client = TransformersClient(model, renderer, picture, keep_features=keep)
    requests = [request(i % distinct, questions[i % distinct].text) for i in range(REQUESTS)]
    prompts = [renderer.encode(request.messages, picture) for request in requests]
    batch = model_inputs(collate(prompts, renderer, picture, padding="left"))
    del batch["position_ids"]  # `generate` computes its own
    banned = banned_ids(model.lm_head.out_features, renderer).nonzero().flatten().tolist()
    batch |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "suppress_tokens": banned}

    async def ask() -> list[list[int]]:
        return [c.token_ids for c in await asyncio.gather(*map(client.complete, requests))]

    check_equal(asyncio.run(ask()), model.generate(**batch, output_scores=True, return_dict_in_generate=True))
    sides = (lambda: model.generate(**batch), lambda: asyncio.run(ask()))
    return [median(times) for times in zip(*([clock(side) for side in sides] for _ in range(repeats)))]


def episode_seconds(world: World, repeats: int) -> float:
    """Of an episode of four calls (search, crop, search, answer), scored, whose policy replies at once."""
    page = partial(Page, doc_id="", page_number=1, image="", width=336, height=336)
    pages = [page(page_id=i, text=" ".join(s.topics)) for i, s in world.slides("test").items()]
    jobs = [EpisodeJob(question) for question in world.questions["test"]]
    script = {"": "<search>profit</search>", "P": "<bbox>[0,0,500,500]</bbox>"}  # images shown → reply
    script |= {"PC": "<search>sales</search>", "CP": "<answer>1</answer>"}  # P: page, C: crop

    def reply(request: Request) -> str:
        shown = (ref for message in request.messages for ref in message.images)
        return f"<think>sales 4 , energy 7</think>{script[''.join('C' if r.box else 'P' for r in shown)]}"

    parts = ScriptedClient(reply), BM25Retriever.build(pages), lambda page_id: (336, 336)
    config, prompts = EpisodeConfig(prompts="tiny"), load_prompts("tiny")
    engine = RolloutEngine(VisorSystem(*parts, config, prompts, GREEDY), RuleJudge())
    assert all(len(t.turns) == 4 and t.answer == "1" for t in engine.run(jobs)), "the script was not played"
    return median(clock(lambda: engine.run(jobs)) for _ in range(repeats)) / len(jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    disable_progress_bar()
    rows, world = [], make_world(decks={"test": 10})
    with tempfile.TemporaryDirectory() as policy:
        build_tiny_policy(Path(policy), vocabulary_texts(), vocab_size=1000, text=WIDE, vision=WIDE)
        for name, *case in CASES:
            peer, ours = compare(policy, *case, world.questions["test"], repeats)
            rows.append((name, peer, ours, peer / ours))
    print(format_table(("40 requests", "generate, s", "client, s", "times as fast"), rows))
    episode, calls = episode_seconds(world, repeats), 4 * rows[0][2] / REQUESTS
    print(f"\nepisode of 4 calls: {1000 * episode:.2f} ms beside the calls, {episode / calls:.1%} of them")


if __name__ == "__main__":
    main()
