import json
import math
import random
from pathlib import Path

import pytest

from visor.retrieval.quality import Mean, mean, ndcg, recall

CASES = Path(__file__).resolve().parents[3].parent / "shared" / "cases" / "files" / "ndcg_cases.json"


def slow_dcg(pages, gold):
    total, seen, rank = 0.0, [], 0
    for page in pages:
        if page in seen:
            continue
        seen.append(page)
        rank += 1
        if page in gold:
            total += 1 / math.log2(rank + 1)
    return total


def test_the_shared_cases():
    if not CASES.is_file():
        pytest.skip("the shared cases are not beside this checkout")
    cases = json.loads(CASES.read_text(encoding="utf-8"))
    values = [ndcg(case["retrieved"], case["gold"], 5) for case in cases]
    for value, case in zip(values, cases):
        if case["gold"]:
            assert value == pytest.approx(case["right"], abs=5e-5)
        else:
            assert value is None
    assert mean(values) == Mean(pytest.approx((1 + 0 + 0.6309) / 3, abs=5e-5), n=3, undefined=1)


def test_against_the_definition_written_out():
    draw = random.Random(3)
    for _ in range(300):
        ranked = [f"p{draw.randrange(9)}" for _ in range(draw.randrange(12))]
        gold = [f"p{draw.randrange(9)}" for _ in range(draw.randrange(1, 5))]
        k = draw.randrange(1, 8)
        first = [page for position, page in enumerate(ranked) if page not in ranked[:position]][:k]
        ideal = slow_dcg(sorted(set(gold))[:k], gold)
        assert ndcg(ranked, gold, k) == pytest.approx(slow_dcg(first, gold) / ideal)
        assert recall(ranked, gold, k) == pytest.approx(len(set(first) & set(gold)) / len(set(gold)))
        assert 0 <= ndcg(ranked, gold, k) <= 1 + 1e-12


def test_more_gold_pages_than_ranks():
    ranked, gold = ["a", "b", "c"], ["a", "b", "c", "d"]
    assert ndcg(ranked, gold, 2) == pytest.approx(1.0)
    assert recall(ranked, gold, 2) == 0.5


def test_nothing_to_average():
    assert mean([]) == Mean(None, n=0, undefined=0)
    assert mean([None]) == Mean(None, n=0, undefined=1)


@pytest.mark.parametrize("measure", [ndcg, recall])
def test_k_below_one_is_refused(measure):
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        measure(["a"], ["a"], 0)
