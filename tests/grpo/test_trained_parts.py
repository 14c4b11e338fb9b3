"""Which parts of the policy move in SFT and GRPO, and that gradient checkpointing changes nothing."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from training_world import read_metrics, trainer_for

from sft.arguments import SftConfig
from sft.train import train
from visor.models.loading import MODEL_PARTS, load_model

FREEZES = [
    [], ["vision_tower"], ["projector"], ["language_model"], ["vision_tower", "projector"],
    ["vision_tower", "language_model"], ["projector", "language_model"],
]  # fmt: skip


def part_of(name: str) -> str:
    if ".visual.merger." in name:
        return "projector"
    return "vision_tower" if ".visual." in name else "language_model"


def moved_parts(before: Path, after: Path) -> set[str]:
    ours, theirs = (dict(load_model(path).named_parameters()) for path in (before, after))
    assert ours.keys() == theirs.keys()
    return {part_of(name) for name in ours if not torch.equal(ours[name], theirs[name])}


@pytest.fixture(scope="module")
def pictures(world, tmp_path_factory) -> Path:
    """A chat that shows pages, so that every part has a gradient."""
    folder = tmp_path_factory.mktemp("chats")
    shown = [{"type": "image", "image": str(world / "corpus" / "images" / f"{n}.png")} for n in (1, 2)]
    lines = [
        {
            "messages": [
                {"role": "user", "content": "<image> page"},
                {"role": "assistant", "content": f" {topic} {n}"},
            ],
            "images": [image["image"]],
        }
        for n, (topic, image) in enumerate(zip(("apple", "brick"), shown), 1)
    ]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sft(world, data, out, **settings) -> SftConfig:
    known = {
        "model_name_or_path": str(world / "policy"), "output_dir": str(out), "max_steps": 2,
        "data": [{"path": str(data), "kind": "messages"}], "learning_rate": 1e-3, "warmup_steps": 0,
        "per_device_train_batch_size": 2, "torch_threads": 1, "save_strategy": "no", "logging_steps": 1,
        "image_min_pixels": 56 * 56, "image_max_pixels": 56 * 56,
    }  # fmt: skip
    return SftConfig(**{**known, **settings})


@pytest.mark.parametrize("freeze", FREEZES, ids="+".join)
def test_exactly_the_parts_that_are_not_frozen_move(world, pictures, tmp_path, freeze):
    train(sft(world, pictures, tmp_path / "sft", freeze=freeze))
    # The replies of a random policy show no pages: the pictures come with an auxiliary loss.
    auxiliary = {"path": str(pictures), "rows_per_step": 2}
    trainer_for(world, tmp_path / "grpo", freeze=freeze, max_steps=1, auxiliary=auxiliary).train()
    for run in ("sft", "grpo"):
        assert moved_parts(world / "policy", tmp_path / run) == set(MODEL_PARTS) - set(freeze), run


@pytest.mark.parametrize("freeze", [[], ["vision_tower", "projector"]], ids=["nothing named", "vision named"])
def test_with_an_adapter_only_the_adapter_moves(world, pictures, tmp_path, freeze):
    settings = {"use_peft": True, "lora_r": 2, "freeze": freeze}
    train(sft(world, pictures, tmp_path / "sft", **settings))
    trainer = trainer_for(world, tmp_path / "grpo", max_steps=2, **settings)
    trainer.train()
    base = dict(load_model(world / "policy").named_parameters())
    for name, parameter in (
        trainer.accelerator.unwrap_model(trainer.model).get_base_model().named_parameters()
    ):
        if ".lora_" not in name:
            assert torch.equal(parameter, base[name.replace(".base_layer.", ".")]), name
    for run in ("sft", "grpo"):
        saved = load_file(tmp_path / run / "adapter_model.safetensors")
        assert all("language_model" in name for name in saved)
        assert any(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)


@pytest.mark.parametrize("settings", [{}, {"freeze": ["vision_tower", "projector"]}, {"use_peft": True}],
                         ids=["all", "language model", "LoRA"])  # fmt: skip
def test_gradient_checkpointing_changes_nothing(world, tmp_path, settings):
    for name, on in (("without", False), ("with", True)):
        run = {"gradient_checkpointing": on, "max_steps": 2, "beta": 0.1, "learning_rate": 1e-4}
        trainer = trainer_for(world, tmp_path / name, **run, **settings)
        trainer.train()
        assert on == any(
            getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()
        )
    ours, theirs = (read_metrics(tmp_path / name) for name in ("with", "without"))
    for one, other in zip(ours, theirs, strict=True):
        for figure in ("loss", "grad_norm", "kl", "entropy", "reward"):
            assert one[figure] == pytest.approx(other[figure], abs=1e-6, rel=1e-5), figure
    file = "adapter_model.safetensors" if "use_peft" in settings else "model.safetensors"
    moved = [load_file(tmp_path / name / file) for name in ("with", "without")]
    assert max((moved[0][n] - moved[1][n]).abs().max() for n in moved[0]) < 1e-6


def test_a_frozen_vision_tower_gets_no_gradients_to_pass_on(world, pictures, tmp_path):
    """Transformers makes the embeddings' outputs require gradients with checkpointing, the patches' too."""
    trainer = trainer_for(
        world, tmp_path, gradient_checkpointing=True, freeze=["vision_tower", "projector"], max_steps=1,
        auxiliary={"path": str(pictures), "rows_per_step": 2},
    )  # fmt: skip
    visual = trainer.accelerator.unwrap_model(trainer.model).model.visual
    needed = []
    visual.register_forward_hook(
        lambda module, args, output: needed.append(output.pooler_output[0].requires_grad)
    )
    trainer.model.train()
    trainer.train()
    assert needed
    assert not any(needed)


def test_text_alone_with_a_frozen_language_model_moves_nothing_and_stops_nothing(world, tmp_path):
    chats = tmp_path / "chats.jsonl"
    line = {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": " apple 1"}]}
    chats.write_text((json.dumps(line) + "\n") * 2)
    freeze = ["language_model"]
    train(sft(world, chats, tmp_path / "sft", freeze=freeze, max_steps=1))
    trainer_for(world, tmp_path / "grpo", freeze=freeze, max_steps=1).train()
    for run in ("sft", "grpo"):
        assert moved_parts(world / "policy", tmp_path / run) == set()


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps the precision of a process's first run."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def test_rollouts_compute_in_the_precision_of_the_updates(world, tmp_path, fresh_accelerator):
    """Float32 weights under bf16: replies sampled in float32 would differ from the rows by its rounding."""
    gaps = {}
    for name in ("same", "float32"):
        trainer = trainer_for(world, tmp_path / name, bf16=True, dtype="float32", credit="turn", max_steps=1)
        assert trainer.client.bf16
        trainer.client.bf16 = name == "same"
        trainer.train()
        gaps[name] = read_metrics(tmp_path / name)[0]["logprob_gap_mean"]
    assert gaps["same"] < gaps["float32"]
