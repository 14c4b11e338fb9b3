"""A step of the SFT trainer against bare PyTorch loops, and what sorting the rows of a step by length saves.

Rows are the turns of expert episodes of the slide world, built before the clock starts. One thread, taking
turns, medians. The bare loops take the same rows in the same order and must reach the same losses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # before this folder: this file has a package's name

import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar

from data.corpus import Corpus, ingest
from data.slide_expert import expert_trajectories
from data.slide_lessons import vocabulary_texts
from data.slide_world import make_world, write_world
from rollout.tables import format_table
from sft.arguments import SftConfig
from sft.train import build_trainer
from visor.models.loading import load_model
from visor.models.tensors import forward_logprobs, model_inputs
from visor.models.tiny import build_tiny_policy
from visor.retrieval.bm25 import BM25Retriever

STEPS = 5
"""Optimizer steps of a measurement; the first is not counted."""


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ends.append(time.perf_counter())


def prepare(folder: Path) -> None:
    """A policy, a corpus, and the trajectories of the expert."""
    build_tiny_policy(folder / "policy", vocabulary_texts(), vocab_size=1000)
    world = make_world(decks={"train": 10})
    write_world(world, folder)
    with contextlib.redirect_stderr(None):
        ingest([folder / "train" / "documents"], folder / "corpus")
    corpus = Corpus.open(folder / "corpus")
    retriever = BM25Retriever.build(corpus.pages())
    done = expert_trajectories(world.questions["train"], world.slides("train"), retriever, corpus)
    (folder / "expert.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in done))
