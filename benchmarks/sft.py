"""A step of the SFT trainer against bare PyTorch loops, and what sorting the rows of a step by length saves.

Rows: expert episodes of the slide world, by turn and whole, built beforehand. One thread; medians of repeats.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: this file has a package's name

import torch
from transformers import PrinterCallback, TrainerCallback, logging

from data.corpus import Corpus, ingest
from data.slide_expert import expert_trajectories
from data.slide_lessons import vocabulary_texts
from data.slide_world import make_world, write_world
from rollout.tables import format_table
from sft.arguments import SftConfig
from sft.train import build_trainer
from sft.trainer import ROW_COLUMN
from visor.models.loading import load_model
from visor.models.tensors import forward_logprobs, model_inputs
from visor.models.tiny import build_tiny_policy
from visor.retrieval.bm25 import BM25Retriever

ROWS, STEPS, LEARNING_RATE = 16, 5, 1e-3
ORDERS = (("random", 32, 1), ("random", 8, 4), ("sorted_steps", 8, 4))  # …, rows × micro-batches of a step
DATA = [{"path": "expert.jsonl", "context": context} for context in ("episode", "append")]
SETTINGS = {"model_name_or_path": "policy", "corpus": "corpus", "data": DATA, "output_dir": "out"}
SETTINGS |= {"dtype": "float32", "torch_threads": 1, "save_strategy": "no", "logging_steps": 1}
SETTINGS |= {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "warmup_steps": 0}


class Watch(TrainerCallback):
    """Notes when training began and when each optimizer step ended, and the mask of each batch."""

    def __init__(self, collate) -> None:
        self.collate, self.times, self.masks = collate, [], []

    def on_step_end(self, *args, **kwargs) -> None:
        self.times.append(perf_counter())

    on_train_begin = on_step_end

    def __call__(self, features) -> dict[str, torch.Tensor]:
        batch = self.collate(features)
        self.masks.append(batch["attention_mask"].flatten())
        return batch


def prepare() -> None:
    """Write a policy, a corpus and the expert's trajectories to the current folder."""
    build_tiny_policy(Path("policy"), vocabulary_texts(), vocab_size=1000)
    world = make_world(decks={"train": 3})
    write_world(world, Path())
    ingest(["train/documents"], "corpus", workers=1)
    index = BM25Retriever.build((corpus := Corpus.open("corpus")).pages())
    done = expert_trajectories(world.questions["train"], world.slides("train"), index, corpus)
    Path("expert.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in done))


def train(order: str, rows: int, micro_batches: int = 1, **settings) -> tuple:
    """Train with every row and picture ready; returns (losses of the steps, watch)."""
    settings |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    trainer = build_trainer(SftConfig(**SETTINGS, **settings, train_sampling_strategy=order))
    trainer.data_collator(list(trainer.train_dataset))
    trainer.data_collator = watch = Watch(trainer.data_collator)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(watch)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], watch


def bare_loop(collate, own_loss: bool) -> Iterator[tuple[float, float]]:
    """Yield each step's loss, the model's own or the trainer's, and the time at which the step ended."""
    model = load_model("policy", dtype="float32").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    for step in range(STEPS):
        batch = collate([{ROW_COLUMN: step * ROWS + row} for row in range(ROWS)])
        if own_loss:
            loss = model(**model_inputs(batch), labels=batch["labels"], use_cache=False).loss
        else:
            loss = -forward_logprobs(model, batch).sum() / batch["loss_mask"].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), perf_counter()


def compare_steps(repeats: int) -> None:
    ends = {"trainer": [], "bare loop, the same loss": [], "bare loop, Transformers' loss": []}
    for _ in range(repeats):
        losses, watch = train("sequential", ROWS, max_steps=STEPS)
        runs = [(losses, watch.times[1:]), *(zip(*bare_loop(watch.collate, own)) for own in (False, True))]
        for kept, (found, times) in zip(ends.values(), runs):
            torch.testing.assert_close(list(found), losses, rtol=1e-3, atol=0.0)
            kept += torch.tensor(times, dtype=torch.double).diff().tolist()
    rows = [(name, median(kept), median(kept) / median(ends["trainer"])) for name, kept in ends.items()]
    print(format_table((f"{ROWS} rows a step", "s a step", "of the trainer's"), rows), end="\n\n")


def compare_orders(repeats: int) -> None:
    runs = [[train(*order, num_train_epochs=1)[1] for order in ORDERS] for _ in range(repeats)]
    seconds = [median(watch.times[-1] - watch.times[0] for watch in column) for column in zip(*runs)]
    rows = []
    for (name, size, count), watch, spent in zip(ORDERS, runs[0], seconds):
        mask = torch.cat(watch.masks)
        share = f"{1 - mask.float().mean().item():.0%}"
        rows.append((f"{name}, {count} × {size}", len(mask), share, spent, spent / seconds[-1]))
    print(format_table(("order, batches × rows of a step", "tokens", "padding", "s", "of sorted"), rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        prepare()
        compare_steps(repeats)
        compare_orders(repeats)
