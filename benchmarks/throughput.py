"""Sampled tokens a second of whole episodes: this engine, one episode after the other, and TRL's tool loop.

8 questions × 5 episodes of ten calls on the slide world, the tiny policy. Every side decodes 32 tokens a
call at temperature 1; what the episode then reads is a reply of 32 tokens from a script (nine searches, each
sample with queries and thoughts of its own, and an answer), so that all sides play the same episodes. One
thread, sides taking turns, medians; seconds are the processor's.

- plain: one episode at a time, whole history kept, Transformers' `generate` with its KV cache within a call,
  images encoded again each turn; the same retriever and environment.
- TRL: `GRPOTrainer` with an environment whose one tool is the search and shows one page a turn, `generate` as
  the backend. Its tokenizer's parser is told how a search looks here, and its processor is Transformers' own
  without the video part, which needs torchvision.
"""

import argparse
import contextlib
import gc
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from types import MethodType

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: it has a file with a package's name

import torch
from datasets import Dataset
from transformers import GenerationConfig, ProcessorMixin, Qwen2_5_VLProcessor
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from data.corpus import Corpus, ingest
from data.slide_expert import SLIDE_EPISODE
from data.slide_world import make_world, write_world
from rewards.judge import RuleJudge
from rollout.engine import RolloutEngine
from rollout.group import Group, sample_groups
from rollout.tables import format_table
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.models.loading import load_model, load_processor
from visor.models.tensors import collate, model_inputs
from visor.models.transformers import TransformersClient, banned_ids
from visor.retrieval.bm25 import BM25Retriever
from visor.systems.visor import VisorSystem
from visor.types import Completion, FinishReason, ImageRef, derive_seed

POLICY = Path(__file__).parents[1] / "data" / "slide_policy"
QUESTIONS, GROUP, REPLY_TOKENS, CALLS = 8, 5, 32, 10
AREA = SLIDE_EPISODE["page_min_pixels"]


class Stage:
    """The slide world's corpus and questions beside the shipped policy."""

    def __init__(self) -> None:
        world = make_world(decks={"test": 20})
        write_world(world, Path())
        ingest(["test/documents"], "corpus", workers=1)
        self.corpus = Corpus.open("corpus")
        self.index = BM25Retriever.build(self.corpus.pages())
        self.images = ImageCutter(self.corpus)
        self.processor = load_processor(POLICY)
        self.questions = random.Random(0).sample(world.questions["test"], QUESTIONS)
        self.renderer = self.processor.renderer()
        decks = random.Random(1).sample(world.decks["test"], QUESTIONS)
        self.scripts = {  # (question, sample) → ids of its replies
            (question.question_id, sample): self._script(deck, f"{question.question_id}/{sample}")
            for question, deck in zip(self.questions, decks)
            for sample in range(GROUP)
        }

    def _script(self, deck, name: str) -> list[list[int]]:
        rng = random.Random(name)
        topics = [topic for slide in deck.slides for topic in slide.topics]
        actions = [f"<search> {topic} of {deck.name}</search>" for topic in rng.sample(topics, CALLS - 1)]
        return [self._reply(rng, topics, action) for action in [*actions, "<answer> 1</answer>"]]

    def _reply(self, rng: random.Random, words: Sequence[str], action: str) -> list[int]:
        """Of exactly REPLY_TOKENS tokens."""
        while True:
            thought = " ".join(rng.choices(words, k=rng.randint(8, REPLY_TOKENS)))
            ids = self.renderer.reply_ids(f"<think> {thought}</think>{action}")
            if len(ids) == REPLY_TOKENS:
                return ids

    def model(self):
        return load_model(POLICY, dtype="float32", freeze=["vision_tower", "projector"])

    def engine(self, client, **options) -> RolloutEngine:
        concurrency = options.pop("max_concurrency", QUESTIONS * GROUP)
        client = Prompter(client, self)
        config = EpisodeConfig(**SLIDE_EPISODE, max_turns=CALLS, **options)
        sampling = Sampling(max_tokens=REPLY_TOKENS)
        parts = (client, self.index, self.corpus, config, load_prompts("tiny"), sampling)
        return RolloutEngine(VisorSystem(*parts), RuleJudge(), max_concurrency=concurrency)


class Prompter:
    """Puts the script's reply in the place of the one that was sampled."""

    name = "prompter"

    def __init__(self, client, stage: Stage) -> None:
        self.client, self.renderer = client, stage.renderer
        self.replies = {
            derive_seed(derive_seed(0, 1), question, sample, call): ids
            for (question, sample), script in stage.scripts.items()
            for call, ids in enumerate(script)
        }

    async def complete(self, request: Request) -> Completion:
        sampled = await self.client.complete(request)
        assert len(sampled.token_ids or []) == REPLY_TOKENS, "a reply ended early"
        ids = self.replies[request.seed]
        return sampled.model_copy(update={"text": self.renderer.reply_text(ids), "token_ids": ids})


class PlainClient:
    """One request at a time through `generate`, its images encoded each time."""

    name = "plain"

    def __init__(self, stage: Stage) -> None:
        self.model, self.images = stage.model(), stage.images
        self.renderer = stage.processor.renderer()
        banned = banned_ids(self.model.lm_head.out_features, self.renderer).nonzero().flatten().tolist()
        self.settings = GenerationConfig(
            do_sample=True, max_new_tokens=REPLY_TOKENS, suppress_tokens=banned, min_new_tokens=REPLY_TOKENS,
            pad_token_id=self.renderer.pad_id, top_k=0,
        )  # fmt: skip

    async def complete(self, request: Request) -> Completion:
        prompt = self.renderer.encode(request.messages, self.images)
        batch = model_inputs(collate([prompt], self.renderer, self.images))
        del batch["position_ids"]  # `generate` computes its own
        sampled = self.model.generate(**batch, generation_config=self.settings)
        ids = sampled[0, len(prompt.input_ids) :].tolist()
        return Completion(
            text=self.renderer.reply_text(ids), token_ids=ids, prompt_token_ids=prompt.input_ids,
            finish_reason=FinishReason.LENGTH, image_sizes=prompt.image_sizes,
        )  # fmt: skip


@dataclass
class Run:
    """What one side sampled."""

    tokens: int
    calls: int
    episodes: int


def counted(groups: Sequence[Group]) -> Run:
    done = [trajectory for group in groups for trajectory in group.trajectories]
    assert not any(t.error for t in done), next(t.error for t in done if t.error)
    assert all(len(t.turns) == CALLS and t.answer == "1" for t in done), "the script was not played"
    replies = [turn.completion.token_ids or [] for t in done for turn in t.turns]
    return Run(sum(map(len, replies)), len(replies), len(done))


def ours(stage: Stage) -> Callable[[], Run]:
    renderer = stage.processor.renderer()
    renderer.stop_ids = frozenset()  # every call decodes REPLY_TOKENS
    client = TransformersClient(stage.model(), renderer, stage.images)
    engine = stage.engine(client)

    def run() -> Run:
        client.clear_cache()  # every page is new to a step
        return counted(sample_groups(engine, stage.questions, GROUP, run_seed=0, step=1))

    return run


def plain(stage: Stage, episodes: int) -> Callable[[], Run]:
    """`episodes` of the 40: the rate of one at a time does not depend on their number."""
    options = {"window": None, "evidence_space": False, "max_concurrency": 1}
    engine = stage.engine(PlainClient(stage), **options)
    return lambda: counted(sample_groups(engine, stage.questions[:episodes], 1, run_seed=0, step=1))


# ---------------------------------------------------------------- TRL


class SlideProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without videos."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


TOOL_CALLS = "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"


def parse_search(tokenizer, ids: list[int], prefix=None, tools=None) -> dict:
    """A reply of this policy as TRL takes it: its first search is a tool call."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    found = re.search(r"</think><search>(.*?)</search>", text)
    reply: dict = {"role": "assistant", "content": text}
    if found:
        call = {"name": "search", "arguments": {"query": found[1].strip()}}
        reply["tool_calls"] = [{"type": "function", "function": call}]
    return reply


def trl(stage: Stage) -> Callable[[], Run]:
    processor = load_processor(POLICY)
    tokenizer, pictures = processor.tokenizer, processor.image_processor
    tokenizer.parse_response = MethodType(parse_search, tokenizer)
    tokenizer.response_template = {"defaults": {"role": "assistant"}}  # that it has one
    pictures.size = {"shortest_edge": AREA, "longest_edge": AREA}
    # A tool's message stands where the episode's observation does; calls are shown for TRL's checks only.
    role = "{{ 'user' if message['role'] == 'tool' else message['role'] }}"
    template = tokenizer.chat_template.replace("{{ message['role'] }}", role)
    template = template.replace("<|im_end|>\n{% endfor %}", TOOL_CALLS + "<|im_end|>\n{% endfor %}")
    template = "{% if false %}{{ tools }}{% endif %}" + template
    sampled = []

    class Searches:
        """One page a search, each page once: what an episode shows."""

        def reset(self, question: str, **kwargs) -> None:
            self.question, self.shown = question, set()

        def search(self, query: str) -> list:
            """Search for a page.

            Args:
                query: What to look for.
            """
            found = [hit.page_id for hit in stage.index.search(query, 10) if hit.page_id not in self.shown]
            if not found:
                return [{"type": "text", "text": f" no new page . {self.question}"}]
            self.shown.add(found[0])
            ref = ImageRef(page_id=found[0], min_pixels=AREA, max_pixels=AREA)
            image = {"type": "image", "image": stage.images(ref)}
            return [image, {"type": "text", "text": f"page for {self.question}"}]

    config = GRPOConfig(
        output_dir="trl", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, beta=0.0,
        per_device_train_batch_size=QUESTIONS * GROUP, num_generations=GROUP, gradient_checkpointing=False,
        max_completion_length=CALLS * (REPLY_TOKENS + 64), max_tool_calling_iterations=CALLS - 1,
        generation_kwargs={"max_new_tokens": REPLY_TOKENS, "min_new_tokens": REPLY_TOKENS},
        temperature=1.0, top_k=0,
    )  # fmt: skip
    prompts = [[{"role": "system", "content": "agent"}, {"role": "user", "content": f"question : {q.text}"}]
               for q in stage.questions]  # fmt: skip
    trainer = GRPOTrainer(
        model=stage.model(), args=config,
        processing_class=SlideProcessor(pictures, tokenizer, chat_template=template),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        environment_factory=Searches,
        train_dataset=Dataset.from_list([{"prompt": p, "question": q.text}
                                         for p, q in zip(prompts, stage.questions)]),
    )  # fmt: skip
    single_turn = trainer._generate_single_turn
    scripts = list(stage.scripts.values())

    def prompted(*args, **kwargs):
        """The script's replies in the place of those that were sampled."""
        ids, logprobs = single_turn(*args, **kwargs)
        assert [len(reply) for reply in ids] == [REPLY_TOKENS] * len(scripts), "a reply ended early"
        call = len(sampled) // len(scripts)
        sampled.extend(map(len, ids))
        return [list(script[call]) for script in scripts], logprobs

    trainer._generate_single_turn = prompted
    generate = trainer._generate
    spent = []

    def timed(*args, **kwargs):
        started = process_time()
        out = generate(*args, **kwargs)
        spent.append(process_time() - started)
        return out

    trainer._generate = timed
    inputs = [dict(row) for row in trainer.train_dataset for _ in range(GROUP)]
    trainer.model.train()

    def run() -> Run:
        sampled.clear()
        trainer._generate_and_score_completions([dict(row) for row in inputs])
        run.seconds = spent[-1]  # without the scoring that follows
        assert len(sampled) == len(inputs) * CALLS, "the script was not played"
        return Run(sum(sampled), len(sampled), len(inputs))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain-episodes", type=int, default=QUESTIONS, help="of the plain way (default 8)")
    parser.add_argument("--without-trl", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        stage = Stage()
        sides = {"this engine, 40 episodes": ours(stage)}
        sides["one episode after the other"] = plain(stage, arguments.plain_episodes)
        if not arguments.without_trl:
            sides["TRL's tool loop, 40 episodes"] = trl(stage)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        last: dict[str, Run] = {}
        for _ in range(arguments.repeats):
            for name, side in sides.items():
                gc.collect()
                started = process_time()
                last[name] = side()
                seconds = getattr(side, "seconds", process_time() - started)
                rates[name].append(last[name].tokens / seconds)
    fastest = median(rates["this engine, 40 episodes"])
    table = [
        (name, last[name].calls / last[name].episodes, last[name].tokens / last[name].calls, median(kept),
         fastest / median(kept))
        for name, kept in rates.items()
    ]  # fmt: skip
    print(format_table(("", "calls an episode", "tokens a call", "tokens/s", "times as fast"), table))


if __name__ == "__main__":
    main()
