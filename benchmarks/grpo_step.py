"""The update of a GRPO step: against TRL's on the same rows, turn credit against trajectory credit, padding.

One thread, sides taking turns, medians. Seconds are the processor's (nothing waits, so they are those of a
machine with nothing else to do) and run from rows to moved weights; TRL starts from ready-made tensors.
"""

import argparse
import asyncio
import contextlib
import gc
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: it has a file with a package's name

import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from data.corpus import Corpus, ingest
from data.slide_expert import SLIDE_EPISODE, describe
from data.slide_lessons import vocabulary_texts
from data.slide_world import make_world, write_world
from grpo.batch import PolicyRow, rows_of_groups
from grpo.loss import LossSettings
from grpo.update import PolicyUpdate, UpdateReport
from rewards.judge import RuleJudge
from rollout.engine import RolloutEngine
from rollout.group import sample_groups
from rollout.rows import TrainingRow, messages_row, trajectory_row, turn_rows
from rollout.tables import format_table
from visor.env.config import EpisodeConfig
from visor.env.crop import ImageCutter
from visor.env.prompts import load_prompts
from visor.models.base import Request, Sampling
from visor.models.features import ImageFeatures, collate_with_features
from visor.models.loading import load_model, load_processor
from visor.models.rendering import ChatRenderer
from visor.models.tensors import collate
from visor.models.tiny import build_tiny_policy
from visor.models.transformers import TransformersClient
from visor.retrieval.bm25 import BM25Retriever
from visor.systems.visor import VisorSystem
from visor.types import Completion, ImagePart, ImageRef, Message, TextPart, Trajectory, text_message

POLICY = Path(__file__).parents[1] / "data" / "slide_policy"
FROZEN = ["vision_tower", "projector"]
MICRO_BATCH, ROWS = 8, 40  # a step of 8 questions × 5
PAGE_TOKENS, REPLY_TOKENS, CALLS, WINDOW = 1296, 150, 10, 2  # the paper's
PREFIX_TOKENS = 776  # system and question with VISOR's prompts, as the plan of the 7B run counts them
PROPORTIONED = {"hidden_size": 384, "intermediate_size": 1920, "num_hidden_layers": 2}
PROPORTIONED |= {"num_attention_heads": 8, "num_key_value_heads": 2}
PROPORTIONED["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [8, 8, 8]}


def prepare() -> None:
    """A corpus of the slide world, and a wider policy with random weights, in the current folder."""
    world = make_world(decks={"test": 20})
    write_world(world, Path())
    ingest(["test/documents"], "corpus", workers=1)
    build_tiny_policy(Path("wide"), vocabulary_texts(), vocab_size=1000, text=PROPORTIONED)


class Stage:
    """Corpus, index and pictures beside one policy."""

    def __init__(self, policy: Path | str) -> None:
        self.policy = policy
        self.world = make_world(decks={"test": 20})
        self.corpus = Corpus.open("corpus")
        self.index = BM25Retriever.build(self.corpus.pages())
        self.images = ImageCutter(self.corpus)
        self.renderer = load_processor(policy).renderer()

    def model(self, freeze: Sequence[str] = ()):
        return load_model(self.policy, dtype="float32", freeze=freeze)

    def update(self, model, settings: LossSettings, reference=None, *, shared: bool, **options):
        """(a PolicyUpdate with AdamW, its features); `shared`: the vision tower runs once a picture."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.0, fused=True)
        features = ImageFeatures(model, self.renderer, self.images)
        with_features = partial(collate_with_features, features=features, device="cpu")
        with_pixels = partial(collate, renderer=self.renderer, images=self.images)
        update = PolicyUpdate(
            Accelerator(cpu=True), model, optimizer, with_features if shared else with_pixels, settings,
            reference=reference, max_logprob_gap=None, pad_id=self.renderer.pad_id, **options,
        )  # fmt: skip
        return update, features


def in_turns(sides: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median seconds of each side, after one run of each that is not counted."""
    times: list[list[float]] = [[] for _ in sides]
    for number in range(repeats + 1):
        for side, kept in zip(sides, times):
            gc.collect()
            started = process_time()
            side()
            if number:
                kept.append(process_time() - started)
    return [median(kept) for kept in times]


# ---------------------------------------------------------------- against TRL


def single_turn_rows(stage: Stage) -> list[PolicyRow]:
    """A page, and its description or a wrong one as the reply."""
    rng, slides = random.Random(0), list(stage.world.slides("test").values())
    rows = []
    for number in range(ROWS):
        slide = slides[number]
        ref = ImageRef(page_id=slide.page_id, min_pixels=112 * 112, max_pixels=112 * 112)
        shown = [ImagePart(image=ref), TextPart(text=f" question : {slide.topics[0]} of {slide.name}")]
        described = describe(rng.choice(slides)).split()[: rng.randint(5, 11)]
        reply = f"<think> {' '.join(described)}</think><answer> {number % 10}</answer>"
        messages = [text_message("system", "agent"), Message(role="user", content=shown)]
        messages.append(text_message("assistant", reply))
        row = messages_row(messages, stage.renderer, stage.images, train="last")
        row.advantage, row.trajectory = rng.gauss(0, 1), f"q/{number}"
        rows.append(PolicyRow(row))
    return rows


def trl_batch(rows: Sequence[PolicyRow], stage: Stage, total: int) -> dict:
    """The tensors that TRL's trainer has after generation: prompts padded left, completions right."""
    starts = [item.row.loss_mask.index(1) for item in rows]
    ends = [start + item.tokens for start, item in zip(starts, rows)]
    prompts = [item.row.input_ids[:start] for item, start in zip(rows, starts)]
    replies = [item.row.input_ids[start:end] for item, start, end in zip(rows, starts, ends)]

    def padded(sequences: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, sequences))
        gaps = [[0] * (longest - len(ids)) for ids in sequences]
        both = [(gap + ids, gap + [1] * len(ids)) if left else (ids + gap, [1] * len(ids) + gap)
                for ids, gap in zip(sequences, gaps)]  # fmt: skip
        return torch.tensor([ids for ids, _ in both]), torch.tensor([mask for _, mask in both])

    (prompt_ids, prompt_mask), (reply_ids, reply_mask) = padded(prompts, True), padded(replies, False)
    pictures = collate([item.row for item in rows], stage.renderer, stage.images)
    whole = torch.cat([prompt_ids, reply_ids], 1)
    return {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask,
        "completion_ids": reply_ids, "completion_mask": reply_mask,
        "advantages": torch.tensor([item.row.advantage for item in rows]),
        "num_items_in_batch": torch.tensor(float(total)),
        "pixel_values": pictures["pixel_values"], "image_grid_thw": pictures["image_grid_thw"],
        "num_images": [len(item.row.images) for item in rows],
        "mm_token_type_ids": (whole == stage.renderer.image_token_id).long(),
    }  # fmt: skip


def trl_trainer(stage: Stage, freeze: Sequence[str], beta: float) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir="trl", use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, beta=beta,
        per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=ROWS // MICRO_BATCH,
        num_generations=5, learning_rate=1e-5, use_bias_correction_kl=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=stage.model(freeze), args=config, processing_class=load_processor(stage.policy).tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "question"}] * ROWS),
    )  # fmt: skip
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = ROWS // MICRO_BATCH
    trainer._prepare_inputs = lambda inputs: inputs  # the rows are there: nothing is generated
    trainer.model.train()
    return trainer


def trl_update(trainer: GRPOTrainer, batches: Sequence[dict]) -> float:
    """What its loop does with the batches of one optimizer step, the reference's pass included."""
    total = 0.0
    for number, batch in enumerate(batches):
        trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches) - 1)
        inputs = dict(batch)
        if trainer.beta:
            inputs["ref_per_token_logps"] = trl_reference(trainer, batch)
        total += trainer.training_step(trainer.model, inputs, batch["num_items_in_batch"]).item()
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    return total


def trl_reference(trainer: GRPOTrainer, batch: dict) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    pictures = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, ids, mask, batch["completion_ids"].size(1),
            **{name: batch[name] for name in pictures},
        )[0]  # fmt: skip


def compare_trl(repeats: int) -> None:
    stage, table = Stage(POLICY), []
    rows = single_turn_rows(stage)
    total = sum(item.tokens for item in rows)
    ordered = sorted(rows, key=lambda item: -len(item.row.input_ids))
    batches = [trl_batch(ordered[i : i + MICRO_BATCH], stage, total) for i in range(0, ROWS, MICRO_BATCH)]
    for beta in (0.0, 0.04):
        for freeze in ([], FROZEN):
            trainer = trl_trainer(stage, freeze, beta)
            model, reference = stage.model(freeze), stage.model().requires_grad_(False) if beta else None
            settings = LossSettings(beta=beta)
            update, features = stage.update(
                model, settings, reference, shared=bool(freeze), micro_batch_size=MICRO_BATCH
            )

            ours = partial(_one_step, update, features, rows)  # a run has the features from its rollouts
            theirs = partial(trl_update, trainer, batches)
            torch.testing.assert_close(ours().loss, [theirs()], atol=1e-5, rtol=0.0)
            seconds = in_turns((ours, theirs), repeats)
            _check_same_weights(model, trainer.model)
            name = f"beta {beta}, {'vision frozen' if freeze else 'everything trains'}"
            table.append((name, *seconds, seconds[0] / seconds[1]))
    titles = (f"{ROWS} single-turn rows, {total} trained tokens", "ours, s", "TRL, s", "ours / TRL")
    print(format_table(titles, table), end="\n\n")


def _check_same_weights(ours, theirs) -> None:
    """After the same number of optimizer steps on either side."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    gap = max((one - other).abs().max().item() for one, other in pairs)
    assert gap < 1e-4, f"weights differ by {gap} after the updates"


# ---------------------------------------------------------------- turn credit against trajectory credit


class Typist:
    """Replies of exactly `tokens` tokens: nine searches with other words, then an answer."""

    name = "typist"

    def __init__(self, renderer: ChatRenderer, queries: Sequence[str], tokens: int) -> None:
        self.renderer, self.queries, self.tokens, self.call = renderer, queries, tokens, 0

    async def complete(self, request: Request) -> Completion:
        self.call += 1
        last = self.call == CALLS
        action = "<answer> 1</answer>" if last else f"<search> {self.queries[self.call - 1]}</search>"
        words = 0
        while len(ids := self._ids(words, action)) < self.tokens:
            words += self.tokens - len(ids)
        assert len(ids) == self.tokens, f"{len(ids)} tokens where {self.tokens} were asked for"
        text = self.renderer.reply_text(ids)
        return Completion(text=text, token_ids=ids, logprobs=[-1.0] * len(ids), model=self.name)

    def _ids(self, words: int, action: str) -> list[int]:
        return self.renderer.reply_ids(f"<think>{' page' * words}</think>{action}")


def long_episode(stage: Stage, side: int, tokens: int, prefix: int, sample: int) -> Trajectory:
    """CALLS calls: pages of `side` × `side` pixels, replies of `tokens` and a system turn of `prefix`."""
    area = side * side
    config = EpisodeConfig(
        **SLIDE_EPISODE | {"page_min_pixels": area, "page_max_pixels": area},
        max_turns=CALLS, window=WINDOW, min_thought_chars=0,
    )  # fmt: skip
    deck = stage.world.decks["test"][sample]
    question = stage.world.questions["test"][0]
    topics = [topic for slide in deck.slides for topic in slide.topics]
    client = Typist(stage.renderer, [f"{topic} of {deck.name}" for topic in topics], tokens)
    prompts = load_prompts("tiny").model_copy(update={"system": " page" * prefix})
    system = VisorSystem(client, stage.index, stage.corpus, config, prompts, Sampling())
    trajectory = asyncio.run(system.solve(question, sample_index=sample))
    pages = [turn.observation.page_ids for turn in trajectory.turns[:-1]]
    assert trajectory.answer == "1", trajectory.error or trajectory.stop_reason
    assert all(pages), "a search brought no page"
    return trajectory


def with_advantages(rows: Sequence[TrainingRow]) -> list[PolicyRow]:
    for row in rows:
        row.advantage = 1.0
    return [PolicyRow(row) for row in rows]


def image_tokens(rows: Sequence[PolicyRow]) -> int:
    return sum(end - start for item in rows for start, end in item.row.image_spans)


def compare_credit(name: str, policy: Path | str, scale: int, count: int, repeats: int) -> None:
    """The updates of both modes on `count` episodes with lengths of the paper's / `scale`."""
    stage = Stage(policy)
    side = 28 * round((PAGE_TOKENS / scale) ** 0.5)
    reply = round(REPLY_TOKENS / scale)
    prefix = round(PREFIX_TOKENS / scale)
    episodes = [long_episode(stage, side, reply, prefix, sample) for sample in range(count)]
    whole = with_advantages([trajectory_row(t, stage.renderer, stage.images) for t in episodes])
    turns = with_advantages([row for t in episodes for row in turn_rows(t, stage.renderer, stage.images)])
    assert image_tokens(turns) * 9 == image_tokens(whole) * 17
    lengths = [sum(len(item.row.input_ids) for item in rows) for rows in (whole, turns)]
    budget = max(len(item.row.input_ids) for item in whole)
    # The vision tower computes for every row, or once a picture; a pass holds one row, or as many as fit the
    # tokens of a trajectory.
    ways = [("trajectory", whole, False, None), ("trajectory, features shared", whole, True, None)]
    ways += [("turn", turns, False, None), ("turn, features shared", turns, True, None)]
    ways += [("turn, features shared, batched", turns, True, budget)]
    sides = []
    for _, rows, shared, tokens in ways:
        model = stage.model(FROZEN)
        update, features = stage.update(
            model, LossSettings(), shared=shared, exact_context=rows is turns,
            micro_batch_size=10_000 if tokens else 1, max_tokens_per_micro_batch=tokens,
        )  # fmt: skip
        sides.append(partial(_one_step, update, features, rows))
    seconds = in_turns(sides, repeats)
    table = [
        (way[0], len(way[1]), sum(len(item.row.input_ids) for item in way[1]), spent, spent / seconds[1])
        for way, spent in zip(ways, seconds)
    ]
    print(
        f"{name}: pages of {side // 28}² image tokens, replies of {reply}\nturn / trajectory: image tokens "
        f"{image_tokens(turns) / image_tokens(whole):.4f} (17/9), all tokens {lengths[1] / lengths[0]:.2f}"
    )
    titles = (f"{count} episodes of {CALLS} calls, W = {WINDOW}", "rows", "tokens", "s", "× second line")
    print(format_table(titles, table), end="\n\n")


def _one_step(update: PolicyUpdate, features: ImageFeatures, rows: Sequence[PolicyRow]) -> UpdateReport:
    features.clear()
    return update.run(rows, [], seed=0)


# ---------------------------------------------------------------- padding


def compare_padding() -> None:
    """Rows of a real step: 8 questions × 5 of the shipped policy, at temperature 1."""
    stage = Stage(POLICY)
    client = TransformersClient(stage.model(), stage.renderer, stage.images)
    config, prompts = EpisodeConfig(**SLIDE_EPISODE), load_prompts("tiny")
    system = VisorSystem(client, stage.index, stage.corpus, config, prompts, Sampling(max_tokens=64))
    questions = random.Random(0).sample(stage.world.questions["test"], 8)
    groups = sample_groups(RolloutEngine(system, RuleJudge()), questions, 5, run_seed=0, step=1)
    builders = {
        "trajectory": lambda t: [trajectory_row(t, stage.renderer, stage.images)],
        "turn": lambda t: turn_rows(t, stage.renderer, stage.images),
    }
    table = []
    for credit, build in builders.items():
        rows = rows_of_groups(groups, build).rows
        longest = max(len(item.row.input_ids) for item in rows)
        for size, tokens in ((8, None), (32, None), (10_000, 8 * longest)):
            model = stage.model(FROZEN)
            options = {"micro_batch_size": size, "max_tokens_per_micro_batch": tokens}
            settings = LossSettings(beta=0.1)  # every row has a gradient
            update, _ = stage.update(
                model, settings, stage.model(), shared=True, exact_context=credit == "turn", **options
            )
            in_order = [rows[i : i + size] for i in range(0, len(rows), size)] if tokens is None else []
            unsorted = sum(len(part) * max(len(item.row.input_ids) for item in part) for part in in_order)
            real = sum(len(item.row.input_ids) for item in rows)
            share = update.run(rows, [], seed=0).padding.share
            plain = f"{1 - real / unsorted:.1%}" if unsorted else "–"
            limit = str(size) if tokens is None else f"{tokens} tokens"
            table.append((credit, len(rows), limit, f"{share:.1%}", plain))
    print(format_table(("credit", "rows", "a pass takes", "padding", "in order of arrival"), table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="trl, credit, padding (default: these), credit-whole")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    parts = arguments.parts or ["trl", "credit", "padding"]
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare()
        if "trl" in parts:
            compare_trl(arguments.repeats)
        if "credit" in parts:
            compare_credit("attention's share as in a 7B model", "wide", 8, 1, arguments.repeats)
        if "credit-whole" in parts:
            compare_credit("the paper's lengths, tiny policy", POLICY, 1, 1, max(1, arguments.repeats // 2))
        if "padding" in parts:
            compare_padding()


if __name__ == "__main__":
    main()
