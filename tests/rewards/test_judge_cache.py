"""The file of verdicts: its key, torn lines, several processes."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from rewards.judge import ModelJudge
from rewards.judge_cache import CachedVerdict, JudgeCache, cache_key
from visor.types import Completion


class Client:
    name = "m"

    def __init__(self, *replies):
        self.replies = list(replies)

    async def complete(self, request):
        return Completion(text=self.replies.pop(0))


def entry(key: str, value: bool = True) -> CachedVerdict:
    return CachedVerdict(
        key=key, judge="j", prompt="p", question="Q?", reference=["12"], answer="12", value=value, raw="r"
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_of_the_five_is_part_of_the_key():
    parts = [("j", "k"), ("p", "o"), ("Q?", "R?"), (["12"], ["1", "2"]), ("a", "b")]
    keys = {cache_key(*combination) for combination in product(*parts)}
    assert len(keys) == 2**5
    assert cache_key("j", "p", "Q?", ["12"], "a") == cache_key("j", "p", "Q?", ["12"], "a")
    assert cache_key("a", "b", "", [], "") != cache_key("", "ab", "", [], "")


def test_a_verdict_is_kept_over_runs_and_readable(tmp_path):
    path = tmp_path / "deep" / "judge.jsonl"
    judge = ModelJudge(Client("no word", "<judge>False</judge>"), cache=JudgeCache(path))
    assert judge.verdict("Q {of}?", ["12", "zwölf"], "⅓ 13").value is False
    (kept,) = lines(path)
    assert (kept["judge"], kept["question"], kept["reference"]) == ("model:m", "Q {of}?", ["12", "zwölf"])
    assert (kept["value"], kept["raw"]) == (False, "<judge>False</judge>")
    later = ModelJudge(Client(), cache=JudgeCache(path))
    assert later.verdict("Q {of}?", ["12", "zwölf"], "⅓ 13").value is False
    assert (later.counts.calls, later.counts.cached) == (0, 1)


def test_another_wording_or_model_is_another_judge(tmp_path):
    path = tmp_path / "judge.jsonl"
    ModelJudge(Client("<judge>True</judge>"), cache=JudgeCache(path)).verdict("Q?", ["12"], "12")
    prompts = tmp_path / "prompts.yaml"
    shipped = Path(__file__).parents[2] / "rewards" / "judge_prompts.yaml"
    prompts.write_text(shipped.read_text().replace("Reason briefly", "Reason at length"))
    other = ModelJudge(Client("<judge>False</judge>"), cache=JudgeCache(path), prompts=prompts)
    assert other.verdict("Q?", ["12"], "12").value is False
    other = ModelJudge(Client("<judge>False</judge>"), cache=JudgeCache(path), identity="hf:abc")
    assert other.verdict("Q?", ["12"], "12").value is False
    assert len(lines(path)) == 3


def test_no_verdict_is_not_kept(tmp_path):
    path = tmp_path / "judge.jsonl"
    judge = ModelJudge(Client("?", "!", "<judge>True</judge>"), attempts=2, cache=JudgeCache(path))
    assert judge.verdict("Q?", ["12"], "12").value is None
    assert not path.exists()
    assert judge.verdict("Q?", ["12"], "12").value is True
    assert (judge.counts.calls, judge.counts.failures) == (3, 1)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_dropped(tmp_path, cut):
    path = tmp_path / "judge.jsonl"
    cache = JudgeCache(path)
    cache.put(entry("a"))
    cache.put(entry("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    reader = JudgeCache(path)
    assert reader.get("a") is not None
    assert reader.get("b") is None
    reader.put(entry("c", False))
    assert [line["key"] for line in lines(path)] == ["a", "c"]
    assert JudgeCache(path).get("c").value is False
    assert JudgeCache(path).damaged == 0


def test_a_file_of_one_torn_line_begins_anew(tmp_path):
    path = tmp_path / "judge.jsonl"
    path.write_bytes(b'{"key": "' + b"x" * 200_000)
    cache = JudgeCache(path)
    assert cache.get("a") is None
    cache.put(entry("a"))
    assert [line["key"] for line in lines(path)] == ["a"]


def test_other_damage_is_skipped_and_counted(tmp_path):
    path = tmp_path / "judge.jsonl"
    cache = JudgeCache(path)
    cache.put(entry("a"))
    with path.open("ab") as file:
        file.write(b"\xff\xfe not json\n[1]\n" + json.dumps({"key": "b"}).encode() + b"\n")
    cache.put(entry("c"))
    reader = JudgeCache(path)
    assert reader.get("a")
    assert reader.get("c")
    assert reader.damaged == 3


def test_what_another_process_writes_is_seen(tmp_path):
    path = tmp_path / "judge.jsonl"
    mine, other = JudgeCache(path), JudgeCache(path)
    assert mine.get("a") is None
    other.put(entry("a"))
    assert mine.get("a").value is True


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        JudgeCache(tmp_path)


WRITER = """
import sys
from rewards.judge_cache import CachedVerdict, JudgeCache
name, path = sys.argv[1:]
cache = JudgeCache(path)
for n in range(40):
    text = name * 2000
    cache.put(CachedVerdict(key=f"{name}{n}", judge="j", prompt="p", question=text, reference=[], answer="",
                            value=True, raw=text))
"""


def test_several_processes_write_whole_lines(tmp_path):
    path = tmp_path / "judge.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, name, str(path)], env=environment) for name in "abc"
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    keys = [line["key"] for line in lines(path)]
    assert sorted(keys) == sorted(f"{name}{n}" for name in "abc" for n in range(40))
