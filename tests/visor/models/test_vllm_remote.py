"""The HTTP layer of `visor vllm-serve` and its client, over an engine of a few lines; with the real engine in
test_vllm_server.py."""

import asyncio
import time
from pathlib import Path

import httpx2
import pytest
import torch
from engine_process import EngineProcess
from models_support import page_image, page_ref
from safetensors.torch import save

from visor.cli import main
from visor.models.loading import load_model, parse_model_spec
from visor.models.sampling_engine import EngineBusy, EngineFailed, EnginePrompt, EngineSampling
from visor.models.vllm_remote import RemoteEngine

STUB = str(Path(__file__).with_name("stub_server.py"))
PROMPT = EnginePrompt([1, 2, 3], [page_image(page_ref("a")), page_image(page_ref("b"))])
SAMPLING = EngineSampling(max_tokens=5, temperature=0.5, top_p=0.9, seed=7, stop_ids=[1], banned_ids=[2, 3])


def start(tiny_path, port="0"):
    return EngineProcess(STUB, str(tiny_path), "--port", port, seconds=200)


@pytest.fixture(scope="module")
def server(tiny_path):
    """For tests that do not end it."""
    process = start(tiny_path)
    yield process
    process.kill()


def connect(server, tiny_path):
    return RemoteEngine(server.url, str(tiny_path), waits=(0.05, 0.1), own_weights=False)


@pytest.fixture
def remote(server, tiny_path, state):
    """With the checkpoint's weights pushed, whatever a test before has left there."""
    engine = connect(server, tiny_path)
    engine.load_weights(state.items())
    yield engine
    engine.close()


@pytest.fixture
def state(tiny_path):
    return dict(load_model(tiny_path, dtype="float32").state_dict())


def generate(engine, prompt=PROMPT, sampling=SAMPLING):
    return asyncio.run(engine.generate(prompt, sampling))


def here(tiny_path, weights=None):
    """The same engine in this process."""
    from stub_server import StubEngine

    engine = StubEngine(str(tiny_path))
    if weights is not None:
        from visor.models.weight_files import written_weights

        with written_weights(weights.items()) as files:
            engine.load_weights(files)
    return engine


def test_what_arrives_is_what_was_sent_pixels_and_parameters(remote, tiny_path, state):
    local = here(tiny_path, state)
    assert generate(remote) == generate(local)
    other = EnginePrompt(PROMPT.token_ids, PROMPT.images[::-1])
    assert generate(remote, other) == generate(local, other)
    assert generate(remote, other) != generate(remote)
    assert (remote.max_context, remote.max_images, remote.vocab_size) == (500, 3, 700)
    assert remote.score(PROMPT, [4, 5]) == [-4.0, -5.0]
    remote.reset_caches()
    assert remote.score(PROMPT, [4, 5]) == [-5.0, -6.0]


def test_a_push_counts_as_a_whole(remote, server, tiny_path, state):
    before = generate(remote)
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        push = http.post("/v1/weights").json()["push"]
        names = list(state)
        halves = [{n: state[n].clone() for n in half} for half in (names[:10], names[10:])]
        assert http.put(f"/v1/weights/{push}/0", content=save(halves[0])).is_success
        assert generate(remote) == before
        late = http.post(f"/v1/weights/{push}/commit/2")
        assert (late.status_code, "1 of the 2 buckets" in late.json()["detail"]) == (409, True)
        short = http.post(f"/v1/weights/{push}/commit/1")
        assert (short.status_code, "weights missing" in short.json()["detail"]) == (422, True)
        assert generate(remote) == before
        assert http.put(f"/v1/weights/{push}/1", content=save(halves[1])).is_success
        done = http.post(f"/v1/weights/{push}/commit/2")
        assert done.json()["weights_version"] == remote.info().weights_version
        again = http.post(f"/v1/weights/{push}/commit/2")  # a client that did not hear the answer
        assert again.json() == done.json()
        assert http.put(f"/v1/weights/{push}/0", content=b"").status_code == 409
    with pytest.raises(EngineFailed, match="weights from elsewhere"):
        generate(remote)


def test_pushed_weights_are_those_of_this_process(remote, tiny_path, state):
    changed = {name: weight + 1 for name, weight in state.items()}
    version = remote.info().weights_version
    remote.load_weights(iter(changed.items()))
    assert generate(remote) == generate(here(tiny_path, changed))
    assert generate(remote) != generate(here(tiny_path, state))
    remote.load_weights(state.items())
    assert generate(remote) == generate(here(tiny_path, state))
    assert remote.info().weights_version == version + 2


def test_wrong_weights_and_what_is_no_safetensors_change_nothing(remote, server, state):
    before = generate(remote)
    norm = "model.language_model.norm.weight"
    with pytest.raises(ValueError, match=f"{norm} has the shape"):
        remote.load_weights((state | {norm: torch.ones(3)}).items())
    with pytest.raises(ValueError, match="unknown: x"):
        remote.load_weights((state | {"x": torch.ones(3)}).items())
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        push = http.post("/v1/weights").json()["push"]
        assert http.put(f"/v1/weights/{push}/0", content=b"\x80\x04pickle").is_success
        assert http.post(f"/v1/weights/{push}/commit/1").status_code == 422
    assert generate(remote) == before


def test_no_push_while_a_request_runs_and_a_client_that_goes_ends_its_request(remote, state):
    def refused_as_busy():
        try:
            remote.load_weights(state.items())
        except EngineBusy as error:
            return "requests run" in str(error)

    async def run():
        waiting = asyncio.create_task(remote.generate(PROMPT, EngineSampling(max_tokens=1, seed=15)))
        while not await asyncio.to_thread(refused_as_busy):
            await asyncio.sleep(0.05)
        waiting.cancel()
        while await asyncio.to_thread(refused_as_busy):
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_refused_prompt_harms_no_other(remote):
    async def run():
        seeds = (1, 14, 2)
        calls = [remote.generate(PROMPT, EngineSampling(max_tokens=1, seed=seed)) for seed in seeds]
        return await asyncio.gather(*calls, return_exceptions=True)

    good, refused, also_good = asyncio.run(run())
    assert isinstance(refused, ValueError)
    assert "this prompt is refused" in str(refused)
    assert good.token_ids
    assert also_good.token_ids


def test_requests_that_are_none_are_refused_in_words(server):
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        bodies = [
            "{",
            '{"prompt": {"token_ids": []}, "sampling": {"max_tokens": 1}}',
            '{"prompt": {"token_ids": [1], "images": ["xx"]}, "sampling": {"max_tokens": 1}}',
            '{"prompt": {"token_ids": [1]}, "sampling": {"max_tokens": 0}}',
            '{"prompt": {"token_ids": [1]}, "sampling": {"max_tokens": 1, "temprature": 1}}',
        ]
        for body in bodies:
            reply = http.post("/v1/generate", content=body)
            assert reply.status_code == 422
            assert reply.json()["detail"]
        assert http.get("/healthz").json() == {"status": "ok"}


@pytest.mark.slow
def test_an_engine_that_died_is_told_and_ends_the_server_with_1(tiny_path):
    server = start(tiny_path)
    with pytest.raises(EngineFailed, match="died: bad luck"):
        generate(connect(server, tiny_path), sampling=EngineSampling(max_tokens=1, seed=13))
    assert server.process.wait(60) == 1
    assert "died: bad luck" in server.errors()


@pytest.mark.slow
def test_a_server_that_is_killed_or_started_again_is_named_within_the_bound(tiny_path):
    server = start(tiny_path)
    remote = connect(server, tiny_path)

    async def run():
        waiting = asyncio.create_task(remote.generate(PROMPT, EngineSampling(max_tokens=1, seed=15)))
        await asyncio.sleep(0.5)
        server.kill()
        return await asyncio.gather(waiting, return_exceptions=True)

    started = time.monotonic()
    (error,) = asyncio.run(run())
    assert isinstance(error, EngineFailed)
    assert server.url in str(error)
    assert time.monotonic() - started < 20
    for call in (lambda: remote.score(PROMPT, [1]), remote.info, lambda: remote.load_weights([])):
        with pytest.raises(EngineFailed, match=f"at {server.url} does not answer after 3 tries"):
            call()
    again = start(tiny_path, server.url.rpartition(":")[2])
    assert again.url == server.url
    with pytest.raises(EngineFailed, match="started again"):
        generate(remote)
    assert again.stop() == 0
    assert again.errors().splitlines()[-1] == "stopped"
    assert "Traceback" not in again.errors()


def test_another_model_and_pushed_weights_are_refused(remote, server, tiny_path, slide_policy):
    with pytest.raises(ValueError, match=f"serves {tiny_path}, which is not the checkpoint {slide_policy}"):
        RemoteEngine(server.url, str(slide_policy))
    with pytest.raises(ValueError, match="weights were pushed into"):
        RemoteEngine(server.url, str(tiny_path))


def test_a_server_that_is_not_there_is_named(tiny_path):
    with pytest.raises(EngineFailed, match=r"http://127\.0\.0\.1:9 does not answer after 2 tries"):
        RemoteEngine("http://127.0.0.1:9", str(tiny_path), waits=(0.01,))


def test_the_command_says_what_it_cannot_do(capsys, tiny_path):
    for options, words in (
        (["--engine-arg", "x"], "give NAME=VALUE"),
        (["--port", "99999"], "a port is 0 to 65535"),
        (["--host", "256.0.0.1"], "cannot listen at 256.0.0.1"),
    ):
        assert main(["vllm-serve", str(tiny_path), *options]) == 2
        assert words in capsys.readouterr().err


def test_the_spec_of_a_server():
    spec = parse_model_spec("vllm:runs/a@b/policy@http://127.0.0.1:8770")
    assert (spec.kind, spec.target, spec.url) == ("vllm", "runs/a@b/policy", "http://127.0.0.1:8770")
    assert parse_model_spec("vllm:runs/a@b/policy").url == ""
