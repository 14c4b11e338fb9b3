"""Uploads to a hub on this machine: what is sent, and what a failing hub does to a run (nothing)."""

import pytest
from fake_hub import serve_hub

from rollout.model_hub import HubOptions, ModelHub, model_files

NOT_UPLOADED = (
    "optimizer.pt", "scheduler.pt", "rng_state.pt", "trainer_state.json", "run_config.json", "metrics.jsonl",
    "training_args.bin", "validation.jsonl", "best.json",
)  # fmt: skip
UPLOADED = ("README.md", "config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json")


@pytest.fixture
def hub(monkeypatch):
    with serve_hub() as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        yield served


@pytest.fixture
def output(tmp_path):
    """An output folder with everything that a run may leave in it."""
    folder = tmp_path / "my-agent"
    for place in (folder, folder / "checkpoint-2", folder / "best", folder / "rollouts"):
        place.mkdir()
        for name in (*UPLOADED, *NOT_UPLOADED):
            (place / name).write_text(
                "---\nlibrary_name: transformers\n---\n" if name == "README.md" else "x"
            )
    return folder


def options(**values) -> HubOptions:
    return HubOptions(push_to_hub=True, **values)


def test_only_the_model_its_processor_and_its_card_are_uploaded(hub, output, capsys):
    client = ModelHub(options(hub_private_repo=True, hub_strategy="end"), output)
    assert hub.repositories == {"someone/my-agent": "private"}
    client.saved(output / "checkpoint-2", 2)
    client.finish()
    ((repository, message, files),) = hub.commits
    assert (repository, message) == ("someone/my-agent", "End of training")
    assert sorted(files) == sorted(UPLOADED)
    assert hub.tokens == {"Bearer hf_test"}
    assert f"the model is at {hub.url}/someone/my-agent" in capsys.readouterr().out
    assert not list((output / ".hub-upload").iterdir())


def test_every_save_uploads_checkpoints_even_if_they_are_deleted_meanwhile(hub, output):
    import shutil

    client = ModelHub(options(hub_model_id="team/agent"), output)
    (output / "checkpoint-2" / "model.safetensors").write_text("of step 2")
    client.saved(output / "checkpoint-2", 2)
    shutil.rmtree(output / "checkpoint-2")
    client.finish()
    assert [message for _, message, _ in hub.commits] == ["Training in progress, step 2", "End of training"]
    assert {repository for repository, _, _ in hub.commits} == {"team/agent"}
    first = hub.commits[0][2]
    assert sorted(first) == sorted(UPLOADED)
    assert first["model.safetensors"] == b"of step 2"


def test_no_token_is_said_before_training(monkeypatch, output):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match=r"needs a token of the hub: set HF_TOKEN or run `hf auth login`"):
        ModelHub(options(), output)


def test_a_refused_repository_is_said_before_training(hub, output):
    hub.refuse_creation = 403
    with pytest.raises(ValueError, match=r"the hub refuses the repository my-agent .*; set hub_model_id"):
        ModelHub(options(), output)


def test_a_failing_hub_is_a_warning_and_the_last_message_says_how_to_upload(hub, output, capsys):
    client = ModelHub(options(), output)
    hub.refuse_commits = 500
    client.saved(output / "checkpoint-2", 2)
    client.finish()
    shown = capsys.readouterr().err
    assert "warning: hub: upload failed (Training in progress, step 2)" in shown
    assert "the final model is not on the hub (HfHubHTTPError: " in shown
    assert (
        f"it is whole in {output}; upload it with: hf upload someone/my-agent {output} . --include" in shown
    )


def test_a_hub_that_comes_back_gets_the_repository_and_the_model(hub, output, capsys):
    hub.refuse_creation = 500
    client = ModelHub(options(), output)
    assert "cannot make the repository yet" in capsys.readouterr().err
    hub.refuse_creation = None
    client.finish()
    assert [repository for repository, _, _ in hub.commits] == ["someone/my-agent"]


def test_the_processors_and_adapters_files_are_model_files(tmp_path):
    names = (
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "tokenizer_config.json",
        "model-00001-of-00004.safetensors", "video_preprocessor_config.json", "processor_config.json",
        "model.safetensors.index.json", "generation_config.json", "vocab.json", "merges.txt",
    )  # fmt: skip
    for name in (*names, *NOT_UPLOADED):
        (tmp_path / name).write_text("x")
    assert sorted(path.name for path in model_files(tmp_path)) == sorted(names)
