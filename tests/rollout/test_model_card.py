"""Model cards: metadata that the hub understands, and nothing of this machine."""

import json

import pytest
from huggingface_hub import ModelCard

from rollout.model_card import CardFacts, hub_ancestor, model_card, short_name, write_card


def facts(**values) -> CardFacts:
    known = {"name": "agent", "method": "Trained", "start": "Qwen/Qwen2.5-VL-7B-Instruct", "tags": ["grpo"]}
    return CardFacts(**{**known, **values})


def test_the_metadata_is_what_the_hub_reads():
    card = ModelCard(model_card(facts(), adapter=False))
    data = card.data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen2.5-VL-7B-Instruct", "base_model_relation": "finetune",
        "library_name": "transformers", "pipeline_tag": "image-text-to-text",
        "tags": ["visual-rag", "visor", "grpo"],
    }  # fmt: skip
    adapter = ModelCard(model_card(facts(), adapter=True))
    assert (adapter.data.library_name, adapter.data.base_model_relation) == ("peft", "adapter")
    assert adapter.data.tags[-1] == "lora"
    assert 'PeftModel.from_pretrained(base, "agent")' in adapter.text


def test_paths_of_the_machine_stay_out(tmp_path):
    start, corpus = tmp_path / "secret" / "sft", tmp_path / "secret" / "decks"
    start.mkdir(parents=True)
    datasets = {"corpus": [str(corpus)], "training data": ["/home/me/secret/t.jsonl", "lmms-lab/SlideVQA"]}
    text = model_card(facts(start=str(start), datasets=datasets), adapter=False)
    assert "secret" not in text
    assert "- corpus: decks" in text
    assert "- training data: t.jsonl, lmms-lab/SlideVQA" in text
    data = ModelCard(text).data
    assert (data.base_model, data.datasets) == (None, ["lmms-lab/SlideVQA"])
    assert short_name("Qwen/Qwen2.5-VL-7B-Instruct") == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_the_base_model_is_found_behind_local_stages(tmp_path):
    """GRPO from the adapter of an SFT run from a hub model."""
    sft, adapter = tmp_path / "sft", tmp_path / "adapter"
    for folder in (sft, adapter):
        folder.mkdir()
    write_card(sft, facts())
    assert hub_ancestor(sft) == "Qwen/Qwen2.5-VL-7B-Instruct"
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(sft)}))
    assert hub_ancestor(adapter) == "Qwen/Qwen2.5-VL-7B-Instruct"
    (sft / "README.md").write_text("no metadata")
    assert hub_ancestor(adapter) is None


@pytest.mark.parametrize("damaged", ["", "---\nlicense: [", "text"])
def test_an_earlier_card_keeps_its_licence_and_a_damaged_one_stops_nothing(tmp_path, damaged):
    (tmp_path / "README.md").write_text(damaged)
    write_card(tmp_path, facts())
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.license is None
    card.data.license = "apache-2.0"
    card.save(tmp_path / "README.md")
    write_card(tmp_path, facts(figures={"accuracy": 0.25, "kl": None}, figures_of="Of 4 episodes."))
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.license == "apache-2.0"
    assert "| accuracy | 0.25 |\n| kl | – |" in again.text
