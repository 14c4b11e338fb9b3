"""Whole runs that upload: SFT and GRPO against a hub on this machine, their cards included."""

import json
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from training_world import trainer_for, validating
from transformers import Qwen2_5_VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from fake_hub import serve_hub

from sft.arguments import SftConfig
from sft.train import train

HUB = {"push_to_hub": True, "hub_model_id": "team/agent"}


@pytest.fixture
def hub(monkeypatch):
    with serve_hub() as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield served


def uploaded(commit: tuple, folder: Path) -> Path:
    folder.mkdir()
    for name, data in commit[2].items():
        (folder / name).write_bytes(data)
    return folder


def test_grpo_uploads_what_loads_with_its_figures(hub, world, tmp_path):
    out = tmp_path / "run"
    values = validating(world, eval_num_samples=2)
    trainer_for(world, out, max_steps=2, save_steps=1, **HUB, **values).train()
    messages = [message for _, message, _ in hub.commits]
    assert messages[-1] == "End of training"
    assert set(messages[:-1]) <= {"Training in progress, step 1", "Training in progress, step 2"}
    final = uploaded(hub.commits[-1], tmp_path / "down")
    assert not {"optimizer.pt", "run_config.json", "metrics.jsonl", "best.json"} & set(hub.commits[-1][2])
    ours, theirs = (Qwen2_5_VLForConditionalGeneration.from_pretrained(path) for path in (final, out))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert not any(str(tmp_path).encode() in data for data in hub.commits[-1][2].values())
    assert not any(str(world).encode() in data for data in hub.commits[-1][2].values())
    line = [json.loads(text) for text in (out / "validation.jsonl").read_text().splitlines()][-1]
    for folder in (final, out / "checkpoint-2", out / "best"):
        card = ModelCard.load(folder / "README.md")
        assert {"grpo", "visual-rag"} <= set(card.data.tags)
        assert "- corpus: corpus" in card.text
        assert "- training questions: questions.jsonl" in card.text
    assert f"| pass_at_2 | {line['pass_at_2']:.4g} |" in ModelCard.load(out / "README.md").text
    assert "8 episodes on the validation questions, after step 2" in ModelCard.load(out / "README.md").text
    assert "episodes on the validation questions" in ModelCard.load(out / "best" / "README.md").text


def test_a_run_survives_a_hub_that_fails_and_changes_by_nothing(hub, world, tmp_path, capsys):
    from safetensors.torch import load_file

    trainer_for(world, tmp_path / "alone", max_steps=2, save_steps=1).train()
    hub.refuse_commits = 503
    trainer_for(world, tmp_path / "run", max_steps=2, save_steps=1, **{**HUB, "hub_strategy": "end"}).train()
    assert "the final model is not on the hub" in capsys.readouterr().err
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "alone"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_without_a_token_nothing_starts(world, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub needs a token"):
        trainer_for(world, tmp_path, **HUB)


def test_sft_uploads_an_adapter_with_its_card(hub, world, tmp_path):
    line = {"messages": [{"role": "user", "content": "page"}, {"role": "assistant", "content": " apple 1"}]}
    (tmp_path / "lessons.jsonl").write_text((json.dumps(line) + "\n") * 4)
    out = tmp_path / "out"
    train(
        SftConfig(
            model_name_or_path=str(world / "policy"), output_dir=str(out), use_peft=True, max_steps=4,
            data=[{"path": str(tmp_path / "lessons.jsonl"), "kind": "messages"}], save_steps=2,
            logging_steps=1, per_device_train_batch_size=2, torch_threads=1, **HUB, hub_strategy="end",
        )
    )  # fmt: skip
    ((repository, message, files),) = hub.commits
    assert (repository, message) == ("team/agent", "End of training")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= files.keys()
    assert not {"optimizer.pt", "training_args.bin", "run_config.json", "model.safetensors"} & files.keys()
    for folder in (out, out / "checkpoint-2"):
        card = ModelCard.load(folder / "README.md")
        assert (card.data.library_name, card.data.license) == ("peft", None)
        assert "- training data: lessons.jsonl" in card.text
        assert "training loss" in card.text
        assert str(tmp_path) not in card.content
