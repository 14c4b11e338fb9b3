"""The peers' protocol, both ways: their requests on our server, our client on servers like theirs."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from PIL import Image

from visor.retrieval.base import Query
from visor.retrieval.client import RetrievalClient, RetrievalError
from visor.retrieval.index import open_index
from visor.retrieval.peer_names import PeerImages, PeerNames
from visor.types import Page, make_page_id


def page(doc_id, number=1):
    return Page(
        page_id=make_page_id(doc_id, number), doc_id=doc_id, page_number=number, image="i", width=1, height=1
    )


# ---------------------------------------------------------------- names


def test_names_of_pages():
    names = PeerNames(
        [page("sub/na me.PDF", 3), page("deck", 2), page("slide_7.png"), page("Ü#1 100%.pdf", 12)]
    )
    assert names.name("sub/na me.PDF#page=3") == "na me_3.jpg"
    assert names.name("slide_7.png#page=1") == "slide_7.jpg"
    for image, page_id in [
        ("/mnt/data/img/na me_3.jpg", "sub/na me.PDF#page=3"),
        ("./search_engine/corpus/img/deck_2.png", "deck#page=2"),
        (r"C:\img\slide_7.JPG", "slide_7.png#page=1"),
        ("U\u0308#1 100%_12.jpeg", "Ü#1 100%.pdf#page=12"),
        ("deck_2", "deck#page=2"),
    ]:
        assert names.page_id(image) == page_id
    assert names.page_id("deck_3.jpg") is None


@pytest.mark.parametrize(
    ("pages", "name"),
    [
        ([page("a.pdf"), page("sub/a.pdf")], "'a_1' (a.pdf#page=1, sub/a.pdf#page=1)"),
        (
            [page("report.pdf", 1), page("report_1.png")],
            "'report_1' (report.pdf#page=1, report_1.png#page=1)",
        ),
        # The peers cut at the first .pdf and overwrite one file with the other.
        ([page("a.pdf"), page("a.pdf.v2.pdf")], "'a_1' (a.pdf#page=1, a.pdf.v2.pdf#page=1)"),
    ],
)
def test_ambiguous_names_are_refused_by_name(pages, name):
    with pytest.raises(ValueError, match="means more than one page") as error:
        PeerNames(pages)
    assert name in str(error.value)


def test_near_names_are_kept_apart():
    names = PeerNames([page("report.pdf", 1), page("report_1.pdf", 1), page("report.pdf", 11)])
    assert names.page_id("report_1.jpg") == "report.pdf#page=1"
    assert names.page_id("report_1_1.jpg") == "report_1.pdf#page=1"


def test_links_replace_links_and_nothing_else(corpus, tmp_path):
    images = PeerImages(corpus, tmp_path / "img")
    path = Path(images.path("fruit.pdf#page=3"))
    assert path.name == "fruit_3.jpg"
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    assert Path(PeerImages(corpus, tmp_path / "img").path("fruit.pdf#page=3")).resolve().is_file()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"fruit_3.jpg is a file and not a link"):
        PeerImages(corpus, tmp_path / "img")
    assert path.read_text() == "mine"


# ---------------------------------------------------------------- their requests on our server


def test_a_get_as_their_agents_send_it(service, retriever):
    """The request of VRAG-RL's and VISOR's agents, and what they do with the reply."""
    queries = ["red", "sweet banana", "a&b=c?d#e%20f +g"]
    reply = httpx2.get(service.url + "/search", params={"queries": queries}, trust_env=False).json()
    for query, images in zip(queries, reply):
        expected = retriever.search(query, 10)
        assert [image["page_id"] for image in images] == [hit.page_id for hit in expected]
        assert [image["idx"] for image in images] == list(range(len(expected)))
    first = reply[1][0]["image_file"]
    assert Path(first).is_absolute()
    assert Path(first).name.split(".jpg")[0] == "fruit_2"
    with Image.open(first) as image:
        assert image.size[0] > 50
    one = httpx2.get(service.url + "/search", params={"queries": "red", "top_k": 1}, trust_env=False).json()
    assert [len(images) for images in one] == [1]


def test_a_post_as_their_later_servers_take_it(service, retriever):
    def post(**body):
        return httpx2.post(service.url + "/search", json=body, trust_env=False).json()

    results = post(queries=["red", "chart"], top_k=2)["results"]
    for query, result in zip(["red", "chart"], results):
        expected = retriever.search(query, 2)
        assert [item["page_id"] for item in result["data"]] == [hit.page_id for hit in expected]
        assert result["score"] == [hit.score for hit in expected]
        assert all(item["type"] == "image" and Path(item["file_path"]).is_file() for item in result["data"])
    assert len(post(queries="red")["results"][0]["data"]) == 3
    listed = post(queries=["red"], vrag_ret=True)
    assert Path(listed[0][0]["image_file"]).name.endswith(".jpg")


@pytest.mark.parametrize(
    ("method", "address", "body", "status"),
    [
        ("GET", "/search", None, 422),
        ("GET", "/search?queries=x&top_k=-1", None, 422),
        ("GET", "/search?queries=x&top_k=1001", None, 422),
        ("GET", "/search?" + "&".join(["queries=x"] * 21), None, 413),
        ("GET", "/search?queries=" + "x" * 20_001, None, 413),
        ("POST", "/search", b"{}", 422),
        ("POST", "/search", b"[]", 422),
        ("POST", "/search", b'{"queries": [1]}', 422),
        ("POST", "/search", b'{"queries": ["\\ud800"]}', 422),
        ("POST", "/search", b'{"queries": ["x"], "top_k": true}', 422),
        ("POST", "/search", b'{"queries": ["x"], "search_corpus": "squad"}', 422),
    ],
)
def test_odd_peer_requests_are_refused_in_words(service, method, address, body, status):
    response = httpx2.request(method, service.url + address, content=body, trust_env=False)
    assert response.status_code == status, response.text
    assert len(response.json()["detail"].split()) > 3
    assert httpx2.get(service.url + "/search?queries=", trust_env=False).json() == [[]]


# ---------------------------------------------------------------- our client on their servers


class Peer(ThreadingHTTPServer):
    """Names images as the peers' servers do, for whatever it is asked; `shape` is how it answers."""

    daemon_threads = True

    def __init__(self, shape, names):
        super().__init__(("127.0.0.1", 0), PeerHandler)
        self.shape, self.names, self.asked = shape, names, []
        self.url = f"peer+http://127.0.0.1:{self.server_address[1]}"


PER_IMAGE = {
    "scored": [0.75, 0.5, 0.5, -2],
    "distances": [0.1, 0.2, 0.3, 0.4],
    "partly scored": [0.75, 0.5, None, 0.1],
    "not finite": [0.75, 0.5, float("nan"), 0.1],
}


class PeerHandler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.shape in ("results", "vrag_ret"):
            return self.reply(405, {"detail": "Method Not Allowed"})
        parts = urlsplit(self.path)
        assert parts.path == "/search"
        self.answer(parse_qs(parts.query)["queries"])

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"])

    def answer(self, queries):
        self.server.asked.append(queries)
        files = [f"/data/img/{name}" for name in self.server.names]
        if self.server.shape == "lists":
            return self.reply(
                200, [[{"idx": i, "image_file": f} for i, f in enumerate(files)] for _ in queries]
            )
        if self.server.shape in PER_IMAGE:
            scores = PER_IMAGE[self.server.shape]
            items = [{"image_file": file, "score": score} for file, score in zip(files, scores)]
            return self.reply(200, [items for _ in queries])
        if self.server.shape == "names":
            return self.reply(200, [files for _ in queries])
        data = [{"type": "image", "file_path": file} for file in files] + [{"type": "text", "content": "x"}]
        scores = [9.0 - i for i in range(len(data))]
        self.reply(200, {"results": [{"score": scores, "data": data} for _ in queries]})

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def peer():
    servers = []

    def start(shape, names=("fruit_2.jpg", "animals_1.jpg", "fruit_2.jpg", "fruit_4.jpg")):
        server = Peer(shape, names)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


RANKS = [1.0, 1 / 2, 1 / 4]
PAGES = ["fruit.pdf#page=2", "animals.pdf#page=1", "fruit.pdf#page=4"]


@pytest.mark.parametrize(
    ("shape", "scores"),
    [
        ("lists", RANKS),
        ("names", RANKS),
        ("results", [9.0, 8.0, 6.0]),
        ("scored", [0.75, 0.5, -2.0]),
        ("distances", RANKS),
        ("partly scored", RANKS),
        ("not finite", RANKS),
    ],
)
def test_every_shape_of_reply_gives_pages(peer, corpus, shape, scores):
    server = peer(shape)
    with RetrievalClient(server.url, pages=corpus.pages()) as client:
        hits = client.search("red", 5)
        assert [hit.page_id for hit in hits] == PAGES, "each page once"
        assert [hit.score for hit in hits] == scores
        assert (client.name, client.fingerprint) == ("peer", None)
        found = client.search_batch(
            [
                Query("a", 2),
                Query("", 2),
                Query("b", 5, frozenset(PAGES[:1])),
                Query("c", 5, doc_ids=frozenset(["fruit.pdf"])),
            ]
        )
    assert [[hit.page_id for hit in hits] for hits in found] == [
        PAGES[:2],
        [],
        PAGES[1:],
        [PAGES[0], PAGES[2]],
    ]
    assert server.asked[-1] == ["a", "b", "c"], "their servers fail at an empty query"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_our_own_server_gives_its_scores(service, retriever, corpus, method):
    with RetrievalClient(f"peer+{service.url}", pages=corpus.pages()) as client:
        client._protocol._method = method
        for query in ("red", "sweet small chart"):
            assert client.search(query, 3) == retriever.search(query, 3)


def test_many_queries_go_in_several_requests(peer, corpus):
    server = peer("lists")
    with RetrievalClient(server.url + "/search", pages=corpus.pages()) as client:
        texts = [f"{n} " + "图" * 200 for n in range(230)]
        assert len(client.search_batch([Query(text, 3) for text in texts])) == 230
    chunks = server.asked[1:]
    assert [text for chunk in chunks for text in chunk] == texts
    assert all(len(chunk) <= 100 for chunk in chunks)
    assert len(chunks) > 10


def test_images_of_another_corpus_and_other_replies_are_errors(peer, corpus):
    server = peer("lists", ["fruit_2.jpg", "strange_7.jpg"])
    with (
        RetrievalClient(server.url, pages=corpus.pages()) as client,
        pytest.raises(
            RetrievalError, match=r"returned the image '/data/img/strange_7.jpg', which is no page"
        ),
    ):
        client.search("x", 5)
    with pytest.raises(ValueError, match="knowing them takes the corpus"):
        RetrievalClient(server.url)
    with pytest.raises(ValueError, match="means more than one page"):
        RetrievalClient(server.url, pages=[page("a.pdf"), page("b/a.pdf")])


def test_our_client_on_our_server_by_their_protocol(service, corpus, retriever):
    peer_url = "peer+" + service.url
    with RetrievalClient(peer_url, pages=corpus.pages()) as client:
        for text in ("red", "sweet", "营业收入", "a&b=c?d#e%20f +g"):
            ids = [hit.page_id for hit in client.search(text, 3)]
            assert ids == [hit.page_id for hit in retriever.search(text, 3)]


def test_an_episode_on_a_peers_server(peer, corpus):
    from visor.env.config import EpisodeConfig
    from visor.env.prompts import load_prompts
    from visor.models.base import Sampling
    from visor.systems.visor import VisorSystem
    from visor.types import Completion, Question

    class Client:
        name = "scripted"
        replies = ["<think>look</think><search>red</search>", "<think>seen</think><answer>red</answer>"]

        async def complete(self, request):
            return Completion(text=self.replies[sum(m.role == "assistant" for m in request.messages)])

    retriever = open_index(peer("lists").url, corpus)
    config = EpisodeConfig(prompts="tiny")
    system = VisorSystem(Client(), retriever, corpus, config, load_prompts("tiny"), Sampling())
    trajectory = asyncio.run(system.solve(Question(question_id="q", text="colour ?")))
    assert trajectory.shown_page_ids == ["fruit.pdf#page=2"]
    assert trajectory.answer == "red"
