"""GRPO on LoRA adapters: the reference is the adapter the run started from, on one copy of the base."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_grpo_processes import launch
from training_world import grpo_settings, read_metrics, trainer_for
from transformers import Qwen2_5_VLForConditionalGeneration

from grpo.planning.demand import reference_bytes
from grpo.planning.model import count_parameters, read_model_config
from sft.arguments import SftConfig
from sft.train import train
from visor.models.loading import load_model, load_processor
from visor.models.lora import REFERENCE, ReferencePolicy, one_base_suffices

ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def sft_adapter(world, tmp_path_factory) -> Path:
    """A real one, after LoRA SFT."""
    folder = tmp_path_factory.mktemp("sft")
    lines = [
        {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": f" {topic} {n}"}]}
        for n, topic in enumerate(("apple", "brick", "cloud", "delta"), 1)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = folder / "adapter"
    train(
        SftConfig(
            model_name_or_path=str(world / "policy"), output_dir=str(out), use_peft=True, lora_r=4,
            data=[{"path": str(folder / "chats.jsonl"), "kind": "messages"}], max_steps=8, warmup_steps=0,
            learning_rate=2e-2, per_device_train_batch_size=4, torch_threads=1, save_strategy="no",
        )
    )  # fmt: skip
    return out


def lora_settings(start: Path | None = None, **settings) -> dict:
    """Of a run that goes on with an adapter, or with a fresh one."""
    begin = {"model_name_or_path": str(start)} if start else {"use_peft": True, "lora_r": 4}
    return {"beta": 0.1, "max_steps": 3, "learning_rate": 1e-2, **begin, **settings}


def adapter_tensors(trainer, name: str) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {n: p.detach().clone() for n, p in model.named_parameters() if f".{name}." in n}


def test_the_reference_is_the_sft_adapter_and_stays_it(world, sft_adapter, tmp_path):
    """Case E6."""
    trainer = trainer_for(world, tmp_path, **lora_settings(sft_adapter))
    reference = adapter_tensors(trainer, REFERENCE)
    stored = load_file(sft_adapter / ADAPTER)
    assert {n.replace(f".{REFERENCE}.", "."): None for n in reference}.keys() == stored.keys()
    assert all(torch.equal(p, stored[n.replace(f".{REFERENCE}.", ".")]) for n, p in reference.items())
    assert max(p.abs().max() for n, p in reference.items() if "lora_B" in n) > 1e-3
    trainer.train()
    kls = [line["kl"] for line in read_metrics(tmp_path)]
    assert kls[0] < 1e-6 < min(kls[1:])
    after = adapter_tensors(trainer, REFERENCE)
    assert all(torch.equal(p, reference[n]) for n, p in after.items())
    moved = load_file(tmp_path / ADAPTER)
    assert any(not torch.equal(moved[n], stored[n]) for n in stored)


@pytest.mark.parametrize("kind", ["adapter", "fresh", "fresh with dropout", "checkpointing"])
def test_kl_is_that_of_two_separate_models(kind, world, sft_adapter, tmp_path):
    start = sft_adapter if kind in ("adapter", "checkpointing") else None
    settings = lora_settings(
        start, lora_dropout=0.2 if "dropout" in kind else 0.0, gradient_checkpointing=kind == "checkpointing"
    )
    one = trainer_for(world, tmp_path / "one", **settings)
    assert isinstance(one.update.reference, ReferencePolicy)
    two = trainer_for(world, tmp_path / "two", **settings)
    two.update.reference = load_model(settings.get("model_name_or_path", world / "policy"), dtype="float32")
    # What dropout draws follows from the run's seed, and building two trainers at once draws twice.
    for trainer in (one, two):
        torch.manual_seed(3)
        trainer.train()
    ours, theirs = ([line["kl"] for line in read_metrics(tmp_path / name)] for name in ("one", "two"))
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert ours[0] == 0.0 or "dropout" in kind
    assert ours[-1] > 1e-4
    moved = [load_file(tmp_path / name / ADAPTER) for name in ("one", "two")]
    assert all(torch.allclose(moved[0][n], moved[1][n], atol=1e-6) for n in moved[0])


def test_there_is_one_copy_of_the_base_weights_and_the_plan_says_so(world, sft_adapter, tmp_path):
    for name, start in (("adapter", sft_adapter), ("fresh", None)):
        trainer = trainer_for(world, tmp_path / name, **lora_settings(start))
        config, model_config = trainer.config, read_model_config(str(world / "policy"))
        beside = {
            tensor.data_ptr(): tensor.nbytes
            for tensor in [*trainer.update.reference.model.parameters()]
            if not any(tensor is parameter for parameter in trainer.optimizer.param_groups[0]["params"])
        }
        base = {p.data_ptr(): p.nbytes for p in load_model(world / "policy").parameters()}
        planned = reference_bytes(config, model_config, count_parameters(config, model_config))
        assert sum(beside.values()) - sum(base.values()) == planned
        assert (planned > 0) == (start is not None)


def test_saved_folders_hold_one_adapter_that_peft_and_the_loader_read(world, sft_adapter, tmp_path):
    trainer = trainer_for(world, tmp_path, **lora_settings(sft_adapter, save_steps=3))
    trainer.train()
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(world / "policy")
    trained = adapter_tensors(trainer, "default")
    for folder in (tmp_path, tmp_path / "checkpoint-3"):
        assert not (folder / REFERENCE).exists()
        assert not any(REFERENCE in name for name in load_file(folder / ADAPTER))
        assert not (folder / "model.safetensors").exists()
        for model in (PeftModel.from_pretrained(base, folder), load_model(folder)):
            assert list(model.peft_config) == ["default"]
            loaded = dict(model.named_parameters())
            assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
        base = Qwen2_5_VLForConditionalGeneration.from_pretrained(world / "policy")
        load_processor(folder).renderer()


@pytest.mark.parametrize("kind", ["adapter", "fresh"])
def test_a_resumed_run_equals_an_unbroken_one_and_keeps_the_first_reference(
    kind, world, sft_adapter, tmp_path
):
    start = sft_adapter if kind == "adapter" else None
    settings = lora_settings(start, lora_dropout=0.1 if start is None else 0.0, save_steps=2)
    trainer_for(world, tmp_path / "whole", **{**settings, "max_steps": 4}).train()
    trainer_for(world, tmp_path / "broken", **{**settings, "max_steps": 2}).train()
    resumed = trainer_for(world, tmp_path / "broken", **{**settings, "max_steps": 4})
    if start:
        stored = load_file(start / ADAPTER)
        reference = adapter_tensors(resumed, REFERENCE)
        assert all(torch.equal(p, stored[n.replace(f".{REFERENCE}.", ".")]) for n, p in reference.items())
    resumed.train()
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")
    ours, theirs = (load_file(tmp_path / name / ADAPTER) for name in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_that_changes_more_than_itself_is_compared_with_a_second_model(world, tmp_path):
    """Trained biases are the base's own, so that switching adapters would not bring the first values back."""
    from peft import LoraConfig, get_peft_model

    from visor.models.lora import TARGET_MODULES

    start = tmp_path / "start"
    config = LoraConfig(r=2, target_modules=TARGET_MODULES, bias="lora_only")
    get_peft_model(load_model(world / "policy"), config).save_pretrained(start)
    load_processor(world / "policy").save_pretrained(start)
    assert not one_base_suffices(start)
    trainer = trainer_for(world, tmp_path / "run", **lora_settings(start))
    assert not isinstance(trainer.update.reference, ReferencePolicy)
    trainer.train()
    assert read_metrics(tmp_path / "run")[0]["kl"] < 1e-6


@pytest.mark.slow
def test_two_processes_equal_one(world, sft_adapter, tmp_path):
    """The reference switches adapters within the step, between DDP's forward and backward pass."""
    settings = lora_settings(sft_adapter, gradient_checkpointing=True, per_device_train_batch_size=2)
    for name, kind in (("one", "one"), ("two", "data parallel")):
        done = launch(grpo_settings(world, tmp_path / name, **settings), kind, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [line["kl"] for line in ours] == pytest.approx([line["kl"] for line in theirs], abs=1e-6)
    assert ours[-1]["kl"] > 1e-4
    moved = [load_file(tmp_path / name / ADAPTER) for name in ("one", "two")]
    assert all(torch.allclose(moved[0][n], moved[1][n], atol=1e-4) for n in moved[0])


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("start", ["adapter", "fresh"])
def test_qlora(start, world, sft_adapter, tmp_path):
    """The same on a base in 4 bits: reference, turn rows as sampled, resume, a checkpoint for any base."""
    settings = lora_settings(
        sft_adapter if start == "adapter" else None, load_in_4bit=True, use_bnb_nested_quant=True,
        credit="turn", save_steps=2,
    )  # fmt: skip
    trainer = trainer_for(world, tmp_path / "whole", **settings)
    kinds = {p.dtype for p in trainer.update.reference.model.parameters()}
    assert kinds == {torch.uint8, torch.float32}
    trainer.train()
    lines = read_metrics(tmp_path / "whole")
    assert lines[0]["kl"] < 1e-6 < lines[-1]["kl"]
    assert lines[0]["logprob_gap_max"] < 1e-4
    trainer_for(world, tmp_path / "broken", **{**settings, "max_steps": 2}).train()
    trainer_for(world, tmp_path / "broken", **settings).train()
    assert read_metrics(tmp_path / "broken") == lines
    ours, theirs = (load_file(tmp_path / name / ADAPTER) for name in ("broken", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert load_model(tmp_path / "whole").peft_config.keys() == {"default"}
