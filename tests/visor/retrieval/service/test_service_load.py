"""The load of benchmarks/service.py: killed clients and malformed bodies between well-formed requests."""

import importlib.util
import sys
from pathlib import Path

import httpx2
import pytest

from visor.retrieval.index import default_index_path, open_index
from visor.retrieval.service.process import ServiceProcess

BENCHMARK = Path(__file__).parents[4] / "benchmarks" / "service.py"


@pytest.fixture(scope="module")
def benchmark():
    # By its path: the folder holds files with the names of packages.
    spec = importlib.util.spec_from_file_location("service_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_no_wrong_answer_under_load(benchmark, tmp_path, seconds):
    corpus = benchmark.make_corpus(tmp_path / "corpus", 300)
    retriever = open_index(default_index_path(corpus.path), corpus)
    queries = benchmark.make_queries(corpus, 200)
    expected = benchmark.in_process(retriever, queries)
    with ServiceProcess(corpus.path) as service:
        load = benchmark.put_under_load(service.port, queries, expected, seconds, concurrency=12)
        # The comparison is a real one: with a page struck from what is expected, it tells.
        struck = [hits[1:] for hits in expected]
        assert benchmark.put_under_load(service.port, queries, struck, 0.3, concurrency=4).wrong
        assert httpx2.get(service.url + "/readyz", trust_env=False).status_code == 200
        assert service.stop() == 0
        assert "Traceback" not in service.errors(), service.errors()
    assert load.wrong == []
    assert load.vanished > 0
    assert set(load.statuses) == {"200", "malformed 422", "malformed 413"}, load.statuses
    assert load.queries >= 20
