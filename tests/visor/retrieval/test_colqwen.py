"""ColQwen2.5 with the real colpali-engine and a tiny random model; docs/late_interaction.md says how."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from store_helpers import MemoryCorpus

from visor.retrieval.base import Query
from visor.retrieval.encoders import load_encoder
from visor.retrieval.index import build_index, open_index

pytestmark = pytest.mark.colqwen
pytest.importorskip("colpali_engine", reason="colpali-engine is not installed")

TEXTS = ["the revenue of the year", "Describe the image.", "a table of numbers 0 1 2 3", "user assistant"] * 4


class PictureCorpus(MemoryCorpus):
    """Pages with pictures of several sizes, drawn from their texts."""

    def image(self, page_id):
        page = self.page(page_id)
        rng = np.random.default_rng(list(page.text.encode()))
        height = 56 + 28 * (len(page.text) % 5)
        return Image.fromarray(rng.integers(0, 255, (height, 112, 3), np.uint8))


def tiny(path, seed=0):
    """A ColQwen2.5 of a few thousand weights with its processor."""
    import torch
    from colpali_engine.models import ColQwen2_5, ColQwen2_5_Processor
    from transformers import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl import Qwen2VLVideoProcessor

    from visor.models.tiny import build_tokenizer, tiny_config

    tokenizer = build_tokenizer(TEXTS, 400)
    torch.manual_seed(seed)
    model = ColQwen2_5(tiny_config(tokenizer)).float().eval()
    model.save_pretrained(path)
    processor = ColQwen2_5_Processor(
        image_processor=Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=64 * 784),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
    )
    processor.save_pretrained(path)
    return model, processor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-colqwen"
    model, processor = tiny(path)
    return SimpleNamespace(path=path, model=model, processor=processor)


@pytest.fixture(scope="module")
def corpus():
    return PictureCorpus({"fox": ["grapes", "a crow", "the stork came"], "hen": ["gold", "an egg a day"]})


def rewrite(source, target, change):
    """Copy a model folder with other weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    save_file(change(weights), target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_vectors_are_those_of_colpali_engine(checkpoint, corpus):
    import torch

    encoder = load_encoder(f"colqwen:{checkpoint.path}")
    pages = corpus.pages()
    ours = encoder.encode_pages(pages, corpus)
    assert len({len(page.vectors_TD) for page in ours}) > 1, "pages of several lengths"
    for page, vectors in zip(pages, ours):
        batch = checkpoint.processor.process_images([corpus.image(page.page_id)])
        with torch.no_grad():
            [alone] = checkpoint.model(**batch)
        assert vectors.vectors_TD.shape == alone.shape
        np.testing.assert_allclose(vectors.vectors_TD, alone.numpy(), atol=2e-4)
    [query] = encoder.encode_queries(["gold"])
    with torch.no_grad():
        [expected] = checkpoint.model(**checkpoint.processor.process_queries(["gold"]))
    np.testing.assert_allclose(query.vectors_TD, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("coarse", [None, "int8", "pooled"])
def test_scores_are_those_of_colpali_engine_on_unpadded_pages(checkpoint, corpus, tmp_path, coarse):
    import torch

    report = build_index(corpus, tmp_path / "index", "colqwen", encoder=str(checkpoint.path), coarse=coarse)
    assert report.encoded == 5
    assert report.pages_per_second > 0
    retriever = open_index(tmp_path / "index", corpus)
    texts = ["gold", "the stork and the fox"]
    hits = retriever.search_batch([Query(text, 9) for text in texts])
    queries = [torch.from_numpy(q.vectors_TD) for q in retriever.encoder.encode_queries(texts)]
    for query, found in zip(queries, hits):
        expected = {
            page.page_id: float(
                checkpoint.processor.score_multi_vector(
                    [query],
                    [torch.from_numpy(retriever.store.page_vectors(page.page_id)).float()],
                    device="cpu",
                )
            )
            for page in corpus.pages()
        }
        assert {hit.page_id: hit.score for hit in found} == pytest.approx(expected, abs=1e-4)
        assert [hit.score for hit in found] == sorted(expected.values(), reverse=True) or [
            hit.page_id for hit in found
        ] == sorted(expected, key=lambda page_id: -expected[page_id])
    assert [retriever.search(text, 9) for text in texts] == hits


def test_a_randomly_initialised_projection_is_refused(checkpoint, tmp_path):
    bare = rewrite(
        checkpoint.path,
        tmp_path / "bare",
        lambda weights: {name: w for name, w in weights.items() if "custom_text_proj" not in name},
    )
    with pytest.raises(
        ValueError, match=r"bare lacks custom_text_proj\.weight in its \*\.safetensors.*random"
    ):
        load_encoder(f"colqwen:{bare}")


def test_other_missing_weights_are_refused(checkpoint, tmp_path):
    holed = rewrite(
        checkpoint.path,
        tmp_path / "holed",
        lambda weights: {name: w for name, w in weights.items() if "layers.1.mlp.up_proj" not in name},
    )
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights \(.*layers\.1\.mlp\.up_proj"):
        load_encoder(f"colqwen:{holed}")


def adapter(base, path, seed=1, **options):
    """A LoRA adapter over a checkpoint, with weights that change its output."""
    import torch
    from colpali_engine.models import ColQwen2_5
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = ColQwen2_5.from_pretrained(base)
    config = LoraConfig(
        r=4, target_modules=options.pop("targets", r".*(q_proj|custom_text_proj)$"), **options
    )
    model = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(path)
    return model


def test_an_adapter_is_loaded_onto_its_base(checkpoint, tmp_path):
    import torch

    model = adapter(checkpoint.path, tmp_path / "adapter")
    encoder = load_encoder(f"colqwen:{tmp_path / 'adapter'}")
    [query] = encoder.encode_queries(["gold"])
    batch = checkpoint.processor.process_queries(["gold"])
    with torch.no_grad():
        expected, plain = model(**batch)[0].numpy(), checkpoint.model(**batch)[0].numpy()
    np.testing.assert_allclose(query.vectors_TD, expected, atol=2e-4)
    assert np.abs(query.vectors_TD - plain).max() > 0.01
    assert encoder.identity.name == "adapter on tiny-colqwen"
    adapter(checkpoint.path, tmp_path / "other" / "adapter", seed=2)
    other = load_encoder(f"colqwen:{tmp_path / 'other' / 'adapter'}")
    assert other.identity.weights_hash != encoder.identity.weights_hash


def test_an_adapter_with_the_names_of_older_transformers_is_loaded(checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    model = adapter(checkpoint.path, tmp_path / "adapter", targets=r".*language_model.*q_proj$")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    old = {name.replace(".language_model.layers", ".model.layers"): w for name, w in weights.items()}
    assert set(old) != set(weights)
    save_file(old, file, metadata={"format": "pt"})
    [query] = load_encoder(f"colqwen:{tmp_path / 'adapter'}").encode_queries(["gold"])
    with torch.no_grad():
        expected = model(**checkpoint.processor.process_queries(["gold"]))[0].numpy()
    np.testing.assert_allclose(query.vectors_TD, expected, atol=2e-4)
    save_file(dict(list(old.items())[1:]), file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 of the model's weights"):
        load_encoder(f"colqwen:{tmp_path / 'adapter'}")


def test_an_adapter_needs_the_projection_from_itself_or_its_base(checkpoint, tmp_path):
    bare = rewrite(
        checkpoint.path,
        tmp_path / "bare",
        lambda weights: {name: w for name, w in weights.items() if "custom_text_proj" not in name},
    )
    adapter(bare, tmp_path / "lora")
    with pytest.raises(
        ValueError, match=r"neither the adapter .*lora nor its base .*bare holds custom_text_proj"
    ):
        load_encoder(f"colqwen:{tmp_path / 'lora'}")
    saved = adapter(bare, tmp_path / "saved", targets=r".*q_proj$", modules_to_save=["custom_text_proj"])
    encoder = load_encoder(f"colqwen:{tmp_path / 'saved'}")
    import torch

    with torch.no_grad():
        expected = saved(**checkpoint.processor.process_queries(["gold"]))[0].numpy()
    [query] = encoder.encode_queries(["gold"])
    np.testing.assert_allclose(query.vectors_TD, expected, atol=2e-4)


def test_an_index_of_another_model_is_refused(checkpoint, corpus, tmp_path):
    build_index(corpus, tmp_path / "index", "colqwen", encoder=str(checkpoint.path))
    tiny(tmp_path / "second", seed=3)
    with pytest.raises(ValueError, match=r"made with encoder 'tiny-colqwen', not 'second'.*rebuild"):
        open_index(tmp_path / "index", corpus, encoder=str(tmp_path / "second"))


def test_the_cap_of_visual_tokens_is_kept_and_remembered(checkpoint, corpus, tmp_path):
    options = {"encoder": str(checkpoint.path), "max_visual_tokens": 6, "dtype": "bfloat16"}
    build_index(corpus, tmp_path / "index", "colqwen", **options)
    retriever = open_index(tmp_path / "index", corpus)
    assert retriever.store.identity.max_visual_tokens == 6
    assert retriever.store.identity.dtype == "bfloat16"
    prompt = len(retriever.encoder.encode_queries([""])[0].vectors_TD)
    whole = load_encoder(f"colqwen:{checkpoint.path}").encode_pages(corpus.pages(), corpus)
    for page, uncapped in zip(corpus.pages(), whole):
        capped = retriever.store.page_vectors(page.page_id)
        assert len(uncapped.vectors_TD) - len(capped) >= 0
        assert len(capped) <= 6 + prompt + 20
    with pytest.raises(ValueError, match="max_visual_tokens is 1"):
        load_encoder(f"colqwen:{checkpoint.path}", max_visual_tokens=1)


def test_a_special_token_in_a_query_is_text(checkpoint):
    encoder = load_encoder(f"colqwen:{checkpoint.path}")
    [odd] = encoder.encode_queries(["gold <|image_pad|> egg"])
    assert np.isfinite(odd.vectors_TD).all()


def test_a_model_of_another_kind_is_named(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        load_encoder(f"colqwen:{tmp_path / 'nowhere'}")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"type 'bert'; ColQwen2\.5 is of type 'qwen2_5_vl'"):
        load_encoder(f"colqwen:{tmp_path / 'bert'}")
