"""kill -9 at any moment of a build: the generation before serves, and encoded pages are not encoded again."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from store_helpers import MemoryCorpus, TextEncoder, check_store

from visor.retrieval.generations import open_vectors, verify_vectors
from visor.retrieval.shard_files import ShardFiles
from visor.retrieval.vector_writer import build_vectors

OLD = {"a": ["red fox", "blue hen", "old"], "b": ["one", "two"], "c": [f"page {n}" for n in range(4)]}
NEW = {"a": ["red fox", "blue hen", "changed"], "c": [f"page {n}" for n in range(4)]}
NEW |= {"d": [f"new {n}" for n in range(5)]}
OPTIONS = {"batch_size": 2, "shard_pages": 4}


def kill_before(step):
    """Make this process end itself right before its disk operation number `step` (from 1)."""
    done = 0

    def counted(operation):
        def call(*arguments, **options):
            nonlocal done
            done += 1
            if done == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    os.fsync, os.truncate, shutil.rmtree = counted(os.fsync), counted(os.truncate), counted(shutil.rmtree)
    Path.replace, Path.unlink, Path.mkdir = counted(Path.replace), counted(Path.unlink), counted(Path.mkdir)


def build_and_die(path, step):
    """True when the build was killed, False when it has fewer steps and ended."""
    child = os.fork()
    if child == 0:
        kill_before(step)
        build_vectors(MemoryCorpus(NEW), path, TextEncoder(), **OPTIONS)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def texts_on_disk(path, encoder, corpora):
    """Texts of the pages in any shard, finished or not."""
    names = {}
    for corpus in corpora:
        for page in corpus.pages():
            names.setdefault(page.page_id, set()).add(page.text)
    found = set()
    for folder in (path / "shards").iterdir():
        shard = ShardFiles.read(folder)
        for i, page in enumerate(shard.pages if shard else []):
            for text in names[page.page_id]:
                if np.array_equal(shard.vectors(i), encoder.vectors(text).astype(shard.dtype)):
                    found.add(text)
    return found


@pytest.mark.parametrize("fresh", [False, True])
def test_killed_before_some_disk_operations(tmp_path, fresh):
    check_kills(tmp_path, fresh, stride=8)


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, True])
def test_killed_before_every_disk_operation(tmp_path, fresh):
    steps, steps_that_encode_nothing = check_kills(tmp_path, fresh, stride=1)
    assert steps > 15
    assert steps_that_encode_nothing > 5


def check_kills(tmp_path, fresh, stride):
    """Kill a build before every `stride`-th step; returns the steps, and how many left nothing to encode."""
    old, new, encoder = MemoryCorpus(OLD), MemoryCorpus(NEW), TextEncoder()
    template = tmp_path / "template"
    template.mkdir()
    if not fresh:
        build_vectors(old, template, encoder, **OPTIONS)
    steps_that_encode_nothing = 0
    for step in itertools.count(1 + 2 * (stride > 1), stride):
        path = tmp_path / f"ix{step}"
        shutil.copytree(template, path)
        killed = build_and_die(path, step)
        serving = (path / "current").read_text() if (path / "current").exists() else None
        if serving is None:
            assert fresh
        else:  # one of the two, whole
            corpus = new if fresh or serving == "2\n" else old
            check_store(open_vectors(path, corpus, encoder.identity), corpus, encoder)
        journaled = texts_on_disk(path, encoder, [old, new]) if (path / "shards").is_dir() else set()
        encoder.asked.clear()
        build_vectors(new, path, encoder, **OPTIONS)
        assert journaled.isdisjoint(encoder.asked)
        steps_that_encode_nothing += not encoder.asked
        check_store(open_vectors(path, new, encoder.identity), new, encoder)
        assert verify_vectors(path) == []
        named = {shard.name for shard in open_vectors(path).manifest.shards}
        assert {folder.name for folder in (path / "shards").iterdir()} == named
        shutil.rmtree(path)
        if not killed:
            return step, steps_that_encode_nothing


SLOW_BUILD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from store_helpers import MemoryCorpus, TextEncoder
from visor.retrieval.vector_writer import build_vectors

class Slow(TextEncoder):
    def encode_pages(self, pages, store):
        time.sleep(0.02)
        return super().encode_pages(pages, store)

corpus = MemoryCorpus({"a": [f"text {n}" for n in range(400)]})
build_vectors(corpus, sys.argv[2], Slow(), batch_size=2, shard_pages=50,
              progress=lambda done, total: print(done, flush=True))
"""


def test_a_process_killed_from_outside_goes_on_where_it_was(tmp_path):
    corpus, encoder = MemoryCorpus({"a": [f"text {n}" for n in range(400)]}), TextEncoder()
    command = [sys.executable, "-c", SLOW_BUILD, str(Path(__file__).parent), str(tmp_path / "ix")]
    reported = 0
    for _ in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if int(line) >= 60:
                break
        process.send_signal(signal.SIGKILL)
        rest = [int(line) for line in process.stdout.read().split()]
        reported += max([60, *rest])
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(ValueError, match="holds no index of page vectors"):
            open_vectors(tmp_path / "ix", corpus)
        time.sleep(0.01)
    report = build_vectors(corpus, tmp_path / "ix", encoder, shard_pages=50)
    assert report.encoded <= 400 - reported
    assert report.encoded == len(encoder.asked)
    check_store(open_vectors(tmp_path / "ix", corpus), corpus, encoder)
