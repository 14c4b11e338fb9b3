"""The SFT command on a tiny policy: loss, resume, entry points."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_world import answer, search

from sft.arguments import SftConfig
from sft.train import build_trainer, train
from visor.models.tensors import forward_logprobs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(play, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "t.jsonl"
    trajectories = [
        play([search(f"{t} number"), answer(str(n))], number=n, sample_index=s)
        for n, t in enumerate(["apple", "brick", "cloud", "delta"], 1)
        for s in range(2)
    ]
    path.write_text("".join(t.model_dump_json() + "\n" for t in trajectories[:6]))
    return path


def settings(world, data, output_dir, kind="trajectories", **overrides) -> SftConfig:
    return SftConfig(
        **{
            "model_name_or_path": str(world / "policy"),
            "output_dir": str(output_dir),
            "data": [{"path": str(data), "kind": kind}],
            "corpus": str(world / "corpus"),
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "warmup_steps": 0.2,
            "logging_steps": 1,
            "torch_threads": 1,
            **overrides,
        }
    )


def logged(output_dir):
    state = json.loads((output_dir / "trainer_state.json").read_text())
    return [
        (e["step"], e["loss"], e["grad_norm"], e["learning_rate"])
        for e in state["log_history"]
        if "loss" in e
    ]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [3, 6])
def test_resume_equals_an_unbroken_run(world, data, tmp_path, optimizer, stop):
    """12 rows, batch 2: 6 steps an epoch, stopped within it and exactly at its end."""
    options = {"optimizer": optimizer, "num_train_epochs": 2, "save_steps": 3, "save_total_limit": None}
    train(settings(world, data, tmp_path / "whole", **options))
    broken = settings(world, data, tmp_path / "broken", **options)
    trainer = build_trainer(broken)

    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == stop

    trainer.add_callback(Stop())
    trainer.train()
    count = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    broken.resume_from_checkpoint = True
    train(broken)
    assert logged(tmp_path / "broken") == logged(tmp_path / "whole")
    assert len(logged(tmp_path / "whole")) == 12
    ours, theirs = (load_file(tmp_path / run / "model.safetensors") for run in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    resumed = build_trainer(broken)
    assert sum(p.numel() for p in resumed.model.parameters() if p.requires_grad) == count


def test_step_loss_is_the_token_mean_over_accumulated_batches(world, tmp_path):
    """Replies of 2 and of 25 tokens: a mean of micro-batch means would weigh them alike."""
    replies = [" apple", " brick 4" * 12, " cloud", " delta 7 1" * 8, " page", " apple 1"]
    lines = [[{"role": "user", "content": "page"}, {"role": "assistant", "content": r}] for r in replies]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    logs = {}
    for size, accumulation in ((6, 1), (2, 3), (1, 6)):
        out = tmp_path / f"{size}"
        config = settings(
            world, data, out, kind="messages", max_steps=1, warmup_steps=0,
            per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        train(config)
        ((_, loss, norm, _),) = logged(out)
        logs[size] = (loss, norm)
    trainer = build_trainer(config)
    batch = trainer.data_collator([{"row": i} for i in range(6)])
    loss = -forward_logprobs(trainer.model, batch).sum() / batch["loss_mask"].sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])
    for logged_loss, logged_norm in logs.values():
        assert logged_loss == pytest.approx(loss.item(), rel=1e-5)
        assert logged_norm == pytest.approx(norm.item(), rel=1e-4)


def test_it_learns_and_every_saved_folder_loads(world, data, tmp_path):
    from visor.models.loading import load_model, load_processor

    config = settings(
        world, data, tmp_path, max_steps=40, optimizer="muon", per_device_train_batch_size=6,
        lr_scheduler_type="constant", warmup_steps=0, save_steps=20, learning_rate=5e-3,
    )  # fmt: skip
    train(config)
    losses = [loss for _, loss, _, _ in logged(tmp_path)]
    assert losses[-1] < 0.3 < 3 < losses[0]
    for folder in (tmp_path, tmp_path / "checkpoint-20"):
        load_model(folder)
        load_processor(folder).renderer()
    torch.load(tmp_path / "checkpoint-20" / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize(("stop_loss", "steps"), [(None, 3), (100.0, 1), (1e-6, 3)])
def test_a_run_ends_at_the_wanted_loss(world, data, tmp_path, stop_loss, steps):
    train(settings(world, data, tmp_path, max_steps=3, stop_loss=stop_loss))
    assert [entry[0] for entry in logged(tmp_path)] == list(range(1, steps + 1))


def test_frozen_parts_and_lora(world, data, tmp_path):
    before = load_file(world / "policy" / "model.safetensors")
    train(
        settings(
            world, data, tmp_path / "f", freeze=["vision_tower", "projector"], max_steps=2, warmup_steps=0
        )
    )
    after = load_file(tmp_path / "f" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(".visual." in name or name.startswith("visual") for name in changed)
    train(settings(world, data, tmp_path / "lora", use_peft=True, lora_r=2, max_steps=2, warmup_steps=0))
    assert (tmp_path / "lora" / "adapter_config.json").exists()
    assert not (tmp_path / "lora" / "model.safetensors").exists()


@pytest.mark.parametrize("entry", [["-m", "sft.train"], ["-m", "sft"], [str(ROOT / "sft")]])
def test_entry_points(entry, tmp_path):
    """`accelerate launch sft` runs the folder as a script, with the folder first on the module path."""
    done = subprocess.run(
        [sys.executable, *entry, "--help"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--per_device_train_batch_size" in done.stdout
    wrong = subprocess.run(
        [sys.executable, *entry, "--learning_rat", "1"], capture_output=True, text=True, cwd=tmp_path
    )
    assert wrong.returncode == 2
    assert "did you mean 'learning_rate'" in wrong.stderr


def test_no_file_of_the_folder_hides_a_package():
    from importlib.metadata import packages_distributions

    taken = set(packages_distributions()) | set(sys.stdlib_module_names)
    own = {path.stem for path in (ROOT / "sft").glob("*.py")} - {"__init__", "__main__"}
    assert not own & taken


def test_a_corpus_without_its_images_is_refused_before_training(world, data, tmp_path):
    corpus = tmp_path / "corpus"
    shutil.copytree(world / "corpus", corpus)
    shutil.rmtree(corpus / "images")
    with pytest.raises(ValueError, match=r"lacks 4 of its 4 page images"):
        build_trainer(settings(world, data, tmp_path / "out", corpus=str(corpus)))
