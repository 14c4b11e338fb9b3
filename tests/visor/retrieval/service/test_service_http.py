"""The endpoints of a real server process: answers, refusals, odd input, pages."""

import json
import shutil
import socket
import unicodedata
from urllib.parse import quote

import httpx2
import pytest
from fastapi.testclient import TestClient

from data.corpus import Corpus, ingest
from visor.retrieval.base import Query
from visor.retrieval.index import build_index, default_index_path
from visor.retrieval.service.app import create_app
from visor.retrieval.service.process import ServiceProcess
from visor.retrieval.service.scoring import Scorer
from visor.types import split_page_id


@pytest.fixture(scope="module")
def http(service):
    with httpx2.Client(base_url=service.url, trust_env=False, timeout=10) as client:
        yield client


def ask(http, **query):
    response = http.post("/v1/search", json={"queries": [{"id": "q", **query}]})
    assert response.status_code == 200, response.text
    return response.json()["results"][0]


def pairs(hits):
    return [(hit["page_id"], hit["score"]) for hit in hits]


def refusal(response, status):
    assert response.status_code == status, response.text
    detail = response.json()["detail"]
    assert len(detail.split()) > 2
    return detail


def test_health_and_version(http, service, corpus):
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    version = http.get("/v1/version").json()
    assert version["fingerprint"] == service.fingerprint
    assert version["fingerprint"].endswith(f"-{version['index_id']}")
    assert (version["page_count"], version["corpus"]) == (8, "corpus")
    assert version["retriever"]["name"] == "bm25"
    assert set(version["retriever"]) >= {"model", "revision", "weights_hash", "processor_hash", "dtype"}
    assert version["retriever"]["max_visual_tokens"] is None
    assert version["scorer"]["method"] == "lucene"
    assert "bm25s" in version["libraries"]
    manifest = json.loads((default_index_path(corpus.path) / "manifest.json").read_text())
    assert version["generation"] == manifest["files"]
    assert http.get("/openapi.json").json()["paths"]["/v1/search"]["post"]["requestBody"]
    assert http.get("/docs").status_code == 404


@pytest.mark.parametrize("text", ["red", "sweet banana", "red small", "chart", "营业收入", "nothing zzz"])
@pytest.mark.parametrize("top_k", [0, 1, 2, 10])
def test_the_answers_are_those_in_process(http, retriever, text, top_k):
    result = ask(http, text=text, top_k=top_k)
    expected = retriever.search(text, top_k)
    assert pairs(result["hits"]) == [(hit.page_id, hit.score) for hit in expected]
    assert result["exhausted"] is (len(expected) < top_k)


def test_exclusions_and_documents(http, retriever):
    excluded = ["fruit.pdf#page=1", "unknown.pdf#page=9"]
    query = {"text": "red", "exclude_page_ids": excluded, "filter": {"doc_ids": ["fruit.pdf"]}}
    local = retriever.search_batch([Query("red", 10, frozenset(excluded), frozenset(["fruit.pdf"]))])[0]
    result = ask(http, **query)
    assert pairs(result["hits"]) == [(hit.page_id, hit.score) for hit in local]
    assert [hit.page_id for hit in local] == ["fruit.pdf#page=3"]
    assert "unknown_doc_ids" not in result
    result = ask(http, text="red", filter={"doc_ids": ["nowhere.pdf", "animals.pdf"]})
    assert [hit["page_id"] for hit in result["hits"]] == ["animals.pdf#page=1"]
    assert result["unknown_doc_ids"] == ["nowhere.pdf"]
    assert ask(http, text="red", filter={"doc_ids": []})["hits"] == []
    assert len(ask(http, text="red", filter={"doc_ids": None})["hits"]) == 3


def test_many_queries_keep_their_ids_and_one_generation(http, retriever):
    texts = ["red", "blue", "", "sweet", "chart"]
    queries = [{"id": f"{n}!", "text": text, "top_k": 3} for n, text in enumerate(texts)]
    reply = http.post("/v1/search", json={"queries": queries}).json()
    assert [result["id"] for result in reply["results"]] == ["0!", "1!", "2!", "3!", "4!"]
    for text, result in zip(texts, reply["results"]):
        assert [hit["page_id"] for hit in result["hits"]] == [h.page_id for h in retriever.search(text, 3)]
    assert set(reply) == {"generation", "fingerprint", "results"}
    assert http.post("/v1/search", json={"queries": []}).json()["results"] == []


def test_an_expected_fingerprint(http, service):
    def status(expected):
        body = {"queries": [{"id": "q", "text": "red"}], "expect_fingerprint": expected}
        return http.post("/v1/search", json=body)

    assert status(service.fingerprint).status_code == 200
    assert status(service.fingerprint[:16]).status_code == 200
    assert status(None).status_code == 200
    assert service.fingerprint in refusal(status("0123456789abcdef"), 409)


def test_case_f1_odd_queries(http, retriever, cases):
    """q1, q2: an empty result. q3–q6: the ranking of the process. The server answers the next one."""
    lines = (cases / "queries_odd.jsonl").read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, lines):
        result = ask(http, text=line["query"], top_k=10)
        expected = [(hit.page_id, hit.score) for hit in retriever.search(line["query"], 10)]
        assert pairs(result["hits"]) == expected, line["id"]
        if line["id"] in ("q1", "q2"):
            assert result["hits"] == []
            assert result["exhausted"] is True
        if line["id"] in ("q3", "q4", "q6"):
            assert expected, "the corpus has pages for it"


QUERY = '{"queries":[{"id":"q","text":"red"%s}]%s}'


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"", 422, "not JSON"),
        (b"\x00\x00", 422, "not JSON"),
        (b'{"queries":[{"id":"q","text":"a\x00b"}]}', 422, "not JSON"),
        (b"\xff\xfe{}", 422, "not UTF-8"),
        (b"[" * 100_000, 422, "nested too deeply"),
        (b'{"queries":' + b'{"a":' * 50_000, 422, "nested too deeply"),
        (b"[]", 422, "dictionary"),
        (b"null", 422, "body"),
        (b"{}", 422, "queries is missing"),
        (b'{"queries":5}', 422, "queries"),
        (b'{"queries":[5]}', 422, "queries[0]"),
        (b'{"queries":[{"id":"q"}]}', 422, "queries[0].text is missing"),
        (b'{"queries":[{"text":"q"}]}', 422, "queries[0].id is missing"),
        (b'{"queries":[{"id":"q","text":""},{"id":"q","text":""}]}', 422, "id 'q'"),
        (b'{"queries":[{"id":"q","text":"red","text":"blue"}]}', 422, "'text' is there twice"),
        (b'{"queries":[{"id":"q","text":"\\ud83d"}]}', 422, "surrogate"),
        (b'{"queries":[{"id":"\\udc00","text":"x"}]}', 422, "surrogate"),
        ((QUERY % (',"top_k":NaN', "")).encode(), 422, "NaN"),
        ((QUERY % (',"top_k":-Infinity', "")).encode(), 422, "Infinity"),
        ((QUERY % (',"top_k":1e999', "")).encode(), 422, "top_k"),
        ((QUERY % (',"top_k":' + "9" * 5000, "")).encode(), 422, "not JSON"),
        ((QUERY % (',"top_k":99999999999999999999', "")).encode(), 422, "top_k"),
        ((QUERY % (',"top_k":1001', "")).encode(), 422, "more than 1000"),
        ((QUERY % (',"top_k":-1', "")).encode(), 422, "top_k"),
        ((QUERY % (',"top_k":2.5', "")).encode(), 422, "top_k"),
        ((QUERY % (',"top_k":"5"', "")).encode(), 422, "top_k"),
        ((QUERY % (',"top_k":true', "")).encode(), 422, "top_k"),
        ((QUERY % (',"topk":5', "")).encode(), 422, "did you mean top_k?"),
        ((QUERY % (',"filter":{"docs":[]}', "")).encode(), 422, "queries[0].filter.docs is an unknown field"),
        ((QUERY % (',"exclude_page_ids":"x"', "")).encode(), 422, "exclude_page_ids"),
        ((QUERY % (',"exclude_page_ids":[1]', "")).encode(), 422, "exclude_page_ids[0]"),
        ((QUERY % ("", ',"generation":1')).encode(), 422, "generation is an unknown field"),
        ((QUERY % ("", ',"expect_fingerprint":1')).encode(), 422, "expect_fingerprint"),
        (
            json.dumps({"queries": [{"id": str(n), "text": "x"} for n in range(21)]}).encode(),
            413,
            "21 queries",
        ),
        (json.dumps({"queries": [{"id": "q", "text": "x" * 20_001}]}).encode(), 413, "20001 characters"),
        (b" " * (1 << 20) + b"{}", 413, "bytes"),
    ],
    ids=lambda value: None if isinstance(value, int | str) else repr(value[:40]),
)
def test_odd_bodies_are_refused_in_words(http, body, status, word):
    assert word in refusal(http.post("/v1/search", content=body), status)
    assert ask(http, text="hen")["hits"], "the next one is answered"


def test_a_nul_in_a_query_is_searched_as_in_process(http, retriever):
    expected = [(hit.page_id, hit.score) for hit in retriever.search("red\x00fox", 5)]
    assert pairs(ask(http, text="red\x00fox", top_k=5)["hits"]) == expected
    assert expected


def test_a_body_without_its_length_is_cut_off_too(http):
    def endless():
        for _ in range(40):
            yield b" " * (1 << 16)

    refusal(http.post("/v1/search", content=endless()), 413)


def test_other_paths_and_methods(http):
    assert http.get("/").status_code == 404
    for address in ("/v1/search/", "/healthz/", "/search/"):
        response = http.get(address)
        assert (response.status_code, response.json()) == (404, {"detail": "Not Found"}), "no redirection"
    nothing = http.post("/v1/search", json={"queries": [{"id": "a", "text": "red", "top_k": 0}]})
    assert nothing.status_code == 200
    assert nothing.json()["results"] == [{"id": "a", "hits": [], "exhausted": False}]
    assert http.get("/v1/search").status_code == 405
    assert http.request("DELETE", "/v1/pages/fruit.pdf%23page=1").status_code == 405
    assert http.put("/v1/search", content=b"{}").status_code == 405


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00garbage\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"GET /" + b"a" * (2 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/search HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["garbage", "negative", "huge", "long url", "half a body", "bad chunk"],
)
def test_broken_http_and_vanished_clients_do_no_harm(http, service, raw):
    with socket.create_connection(("127.0.0.1", service.port), timeout=5) as connection:
        try:
            connection.sendall(raw)
            connection.settimeout(0.3)
            connection.recv(100)
        except OSError:
            pass
    assert ask(http, text="hen")["hits"]


# ---------------------------------------------------------------- pages


def test_page_text_and_image(http, corpus):
    page = corpus.page("animals.pdf#page=2")
    got = http.get("/v1/pages/" + quote(page.page_id, safe="")).json()
    assert (got["text"].strip(), got["page_number"], got["width"]) == ("blue hen", 2, page.width)
    image = http.get("/v1/pages/" + quote(page.page_id, safe="") + "/image")
    assert image.content == (corpus.path / page.image).read_bytes()
    assert image.headers["content-type"] in ("image/jpeg", "image/png")
    refusal(http.get("/v1/pages/animals.pdf%23page=99"), 404)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/pages/../../../../etc/passwd",
        "/v1/pages/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/pages//etc/passwd",
        "/v1/pages/%2fetc%2fpasswd/image",
        "/v1/pages/corpus.json",
        "/v1/pages/..%2fcorpus.json/image",
        "/v1/pages/fruit.pdf%23page=1%00",
        "/v1/pages/%ff%fe",
        "/v1/pages/%ed%a0%80/image",
        "/v1/pages/fruit.pdf%23page=1/image/../../../../corpus.json",
    ],
)
def test_paths_outside_the_corpus_are_refused(service, http, path):
    """Sent as they are: a client would take the dots out."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 404"), reply[:200]
    assert b"root:" not in reply
    assert http.get("/healthz").status_code == 200


def test_links_out_of_the_corpus_and_files_that_are_no_image_are_refused(corpus, tmp_path):
    copy = tmp_path / "corpus"
    shutil.copytree(corpus.path, copy)
    pages = Corpus.open(copy).pages()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (copy / pages[0].image).unlink()
    (copy / pages[0].image).symlink_to(tmp_path / "secret.png")
    (copy / pages[1].image).unlink()
    (copy / pages[1].image).symlink_to(copy / "corpus.json")
    (copy / pages[2].image).unlink()
    with ServiceProcess(copy, "--with-pages") as service, httpx2.Client(trust_env=False) as client:
        url = service.url + "/v1/pages/"
        for page, word in zip(pages, ["not inside", "not inside", "build the index again"]):
            assert word in refusal(client.get(url + quote(page.page_id, safe="") + "/image"), 404)
        assert client.get(url + quote(pages[3].page_id, safe="") + "/image").status_code == 200


def test_pages_and_the_peers_protocol_only_when_asked_for(corpus):
    """The app itself, without a process: a scorer that was never started is not ready either."""
    app = create_app(Scorer(lambda: None), corpus)
    with TestClient(app) as client:
        for end in ("", "/image"):
            response = client.get("/v1/pages/fruit.pdf%23page=1" + end)
            assert "--with-pages" in refusal(response, 404)
        assert client.get("/search?queries=red").status_code == 404
        assert client.get("/healthz").status_code == 200
        for address in ("/readyz", "/v1/version"):
            assert "being opened" in refusal(client.get(address), 503)
        response = client.post("/v1/search", json={"queries": []})
        assert "being opened" in refusal(response, 503)
        assert response.headers["retry-after"] == "1"


def test_case_a8_names_over_http(cases, tmp_path):
    """Spaces, #, %, capitals and both spellings of an umlaut find their page."""
    assert ingest([cases / "names"], tmp_path / "corpus", dpi=20, workers=1).ok
    corpus = Corpus.open(tmp_path / "corpus")
    build_index(corpus, default_index_path(corpus.path))
    with ServiceProcess(corpus.path, "--with-pages") as service:
        client = httpx2.Client(base_url=service.url, trust_env=False)
        pages = corpus.pages()
        assert len({page.page_id for page in pages}) == 11
        for page in pages:
            for form in ("NFC", "NFD"):
                address = "/v1/pages/" + quote(unicodedata.normalize(form, page.page_id), safe="/")
                assert client.get(address).json()["page_id"] == page.page_id
                assert client.get(address + "/image").status_code == 200
        doc_id, _ = split_page_id(next(page.page_id for page in pages if "bersicht" in page.page_id))
        for form in ("NFC", "NFD"):
            spelt = unicodedata.normalize(form, doc_id)
            result = ask(client, text="bersicht Übersicht pdf 1", filter={"doc_ids": [spelt]})
            assert [hit["page_id"] for hit in result["hits"]] == [f"{doc_id}#page=1"]
            excluded = [f"{spelt}#page=1"]
            result = ask(client, text="pdf", exclude_page_ids=excluded, filter={"doc_ids": [spelt]})
            assert result["hits"] == []
            assert "unknown_doc_ids" not in result
        client.close()
