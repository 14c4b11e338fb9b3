"""Image tokens of the fullest page and crop, against trying every picture."""

import random

import numpy as np
import pytest

from grpo.planning.pictures import Budget, _tokens, fullest_page, fullest_picture

BUDGETS = [
    Budget(256 * 784, 512 * 784, 28),
    Budget(256 * 784, 1024 * 784, 28),
    Budget(12544, 12544, 28),
    Budget(3136, 3136, 28),
    Budget(50176, 100352, 28),
    Budget(4 * 400, 20 * 400, 20),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget.token_range}-{budget.factor}")
def test_arrays_are_resized_as_single_pictures_are(budget):
    draw = random.Random(0)
    sizes = [(draw.randint(28, 3000), draw.randint(28, 3000)) for _ in range(2000)]
    sizes += [(draw.randint(28, 60), draw.randint(28, 60)) for _ in range(500)]
    sizes = [size for size in sizes if max(size) <= 200 * min(size)]
    widths, heights = np.array(sizes, dtype=np.float64).T
    assert _tokens(widths, heights, budget).tolist() == [budget.tokens(size) for size in sizes]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget.token_range}-{budget.factor}")
@pytest.mark.parametrize("sides", [(56, 56), (40, 300), (181, 90)])
def test_the_fullest_picture_is_that_of_trying_all(budget, sides):
    every = (
        budget.tokens((width, height))
        for width in range(28, sides[0] + 1)
        for height in range(28, sides[1] + 1)
    )
    assert budget.tokens(fullest_picture(budget, sides)) == max(every)


def test_the_default_budgets_hold_for_every_picture():
    for budget in BUDGETS[:2]:
        assert budget.tokens(fullest_picture(budget)) == budget.token_range[1]


def test_a_narrow_budget_is_exceeded_by_long_pictures():
    budget = Budget(12544, 12544, 28)
    assert budget.tokens(fullest_picture(budget)) > budget.token_range[1]
    assert budget.tokens(fullest_picture(budget, (112, 112))) >= budget.token_range[1]


def test_the_fullest_page_of_a_corpus_can_be_shown():
    budget = BUDGETS[0]
    assert fullest_page([(300, 300), (28, 28 * 201), (448, 896)], budget) == (448, 896)
