"""Checkpoints load without torchvision, freeze by part, and say what is missing; model names parse."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from models_support import chat, page_image, page_ref, user

from visor.models.base import Request, Sampling
from visor.models.loading import (
    MODEL_PARTS,
    ModelSpec,
    freeze_parts,
    load_model,
    load_processor,
    make_client,
    parse_model_spec,
    unwrap,
)
from visor.models.lora import add_lora
from visor.models.tensors import collate, forward_logprobs


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_parts_are_frozen_by_name(tiny_path):
    everything = trained(load_model(tiny_path))
    merger = {name for name in everything if ".visual.merger." in name}
    vision = {name for name in everything if ".visual." in name} - merger
    language = everything - merger - vision
    assert all((merger, vision, language))
    for part, names in zip(MODEL_PARTS, (vision, merger, language)):
        assert trained(load_model(tiny_path, freeze=[part])) == everything - names
    table_5 = load_model(tiny_path, freeze=["vision_tower", "projector"])
    assert trained(table_5) == language
    with pytest.raises(ValueError, match="no part 'vision'"):
        freeze_parts(table_5, ["vision"])


def test_dtype_and_mode(tiny_path):
    assert load_model(tiny_path, dtype="bfloat16").dtype == torch.bfloat16
    model = load_model(tiny_path, dtype="float32", attn_implementation="eager")
    assert model.dtype == torch.float32
    assert not model.training


def test_processor_round_trip(tiny_path, processor, renderer, tmp_path):
    processor.save_pretrained(tmp_path)
    again = load_processor(tmp_path).renderer()
    messages = chat(user("hello <think>", page_ref("b")))
    assert again.encode(messages, page_image) == renderer.encode(messages, page_image)
    assert (again.pixels(page_ref("b"), page_image) == renderer.pixels(page_ref("b"), page_image)).all()


def test_missing_things_are_named(tiny_path, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_model(tmp_path / "nowhere" / "deep")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model(empty)
    with pytest.raises(ValueError, match="tokenizer"):
        load_processor(empty)
    partial = tmp_path / "partial"
    shutil.copytree(tiny_path, partial)
    (partial / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"image processor \(preprocessor_config\.json\)"):
        load_processor(partial)
    (partial / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"safetensors"):
        load_model(partial)
    config = json.loads((partial / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match=r"type 'llama'"):
        load_model(partial)


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_name_without_a_connection_is_one_sentence(tmp_path, offline):
    code = (
        "from visor.models.loading import load_model, load_processor\n"
        "for load in (load_processor, load_model):\n"
        "    try:\n"
        "        load('owner/name')\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | closed, capture_output=True, text=True, timeout=100
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("owner/name: there is no such folder, and the hub cannot be reached")
        assert "give the path of a model folder" in line
    assert "Retrying" not in done.stderr


def test_a_cached_hub_model_is_not_looked_for(tiny_path, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from rollout.fingerprints import checkpoint_fingerprint
    from visor.models.hub import cached_folder, check_reachable

    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_path, snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", None)  # asking would be a TypeError
    assert cached_folder("owner/name") == snapshot
    check_reachable("owner/name")
    assert checkpoint_fingerprint("owner/name") == checkpoint_fingerprint(tiny_path)


def test_specs():
    assert parse_model_spec("hf:runs/a") == ModelSpec("hf", "runs/a")
    assert parse_model_spec("vllm:Qwen/Qwen2.5-VL-7B-Instruct").target == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert parse_model_spec("script:C:/x.jsonl") == ModelSpec("script", "C:/x.jsonl")
    spec = parse_model_spec("openai:team@org/model@http://host:8000/v1")
    assert spec == ModelSpec("openai", "team@org/model", "http://host:8000/v1")
    for bad in ("runs/a", "hf:", "gpt:4", "openai:name", "openai:@http://x", "openai:name@host/v1"):
        with pytest.raises(ValueError, match="does not name"):
            parse_model_spec(bad)


def test_make_client_for_a_checkpoint(tiny_path):
    client = make_client(f"hf:{tiny_path}", images=page_image, dtype="float32", max_images=1)
    request = Request(chat(user(page_ref("a"))), seed=1, sampling=Sampling(max_tokens=4))
    completion = asyncio.run(client.complete(request))
    assert completion.model == tiny_path.name
    blind = make_client(f"hf:{tiny_path}", dtype="float32")
    with pytest.raises(ValueError, match="without an image source"):
        asyncio.run(blind.complete(request))


def test_lora_starts_as_the_base_model_and_comes_back_from_disk(tiny_path, renderer, tmp_path):
    model = add_lora(load_model(tiny_path, dtype="float32"), rank=2, alpha=4)
    names = trained(model)
    assert names
    assert all("language_model" in name and "lora" in name for name in names)
    batch = collate([renderer.encode(chat(user("hello", page_ref("a"))), page_image)], renderer, page_image)
    batch["loss_mask"] = batch["attention_mask"].bool().clone()
    batch["loss_mask"][:, 0] = False
    with torch.no_grad():
        bare = forward_logprobs(load_model(tiny_path, dtype="float32"), batch)
        torch.testing.assert_close(forward_logprobs(model, batch), bare)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
        changed = forward_logprobs(model, batch)
    assert not torch.allclose(changed, bare)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype="float32")
    assert trained(again) == names
    assert type(unwrap(again)).__name__ == "Qwen2_5_VLForConditionalGeneration"
    with torch.no_grad():
        torch.testing.assert_close(forward_logprobs(again, batch), changed)


def test_light_modules_import_without_heavy_libraries():
    code = (
        "import sys\n"
        "import visor.models.loading, visor.models.rendering, visor.models.scripted, visor.models.batching\n"
        "import visor.models.openai, visor.models.vllm, visor.models.lora, rollout.rows\n"
        "heavy = {'torch', 'transformers', 'vllm', 'openai', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
