"""Eq. 4: its value, its plain rule, its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visor.taec.allocation import (
    RetainedImage,
    allocate,
    detail_demand,
    fit_to_limits,
    pressure,
    shares,
    visual_budget,
)
from visor.taec.config import AllocationConfig

unit = st.floats(0, 1)
rows = st.lists(st.tuples(st.floats(0, 20), unit, unit), min_size=1, max_size=6)


def slow_shares(budget, r, d, c, kappa, tau):
    exponentials = [math.exp(tau * r[i] * d[i] * c[i]) for i in range(len(r))]
    return [
        budget * (kappa * r[i] / sum(r) + (1 - kappa) * exponentials[i] / sum(exponentials))
        for i in range(len(r))
    ]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(rows=rows, kappa=unit, tau=st.floats(0, 5))
def test_equals_the_formula_and_spends_the_budget(rows, kappa, tau):
    r, d, c = (list(column) for column in zip(*rows))
    r[0] += 0.1  # the formula as printed has no value when all relevance is 0
    got = shares(600_000, r, d, c, kappa=kappa, tau=tau)
    assert got == pytest.approx(slow_shares(600_000, r, d, c, kappa, tau))
    assert sum(got) == pytest.approx(600_000)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(rows=rows)
def test_kappa_one_is_the_plain_rule_exactly(rows):
    r, d, c = (list(column) for column in zip(*rows))
    r[0] += 0.1
    total = sum(r)
    assert shares(600_000, r, d, c, kappa=1, tau=2.0) == [600_000 * (value / total) for value in r]


def test_by_hand():
    # κ/2 each side: 0.5 · 3/4 + 0.5 · e/(e + 1) of 1000.
    got = shares(1000, [3, 1], [1 / 3, 0], [1, 1], kappa=0.5, tau=1.0)
    assert got == pytest.approx([375 + 500 * math.e / (math.e + 1), 125 + 500 / (math.e + 1)])
    assert shares(1000, [0, 0], [1, 1], [1, 1], kappa=1, tau=2.0) == [500, 500]
    assert shares(1000, [5000.0, 1.0], [1, 1], [1, 1], kappa=0, tau=2.0) == [1000, 0]
    assert shares(1000, [], [], [], kappa=0.5, tau=2.0) == []


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    pixels=st.lists(st.just(0.0) | st.floats(1e-3, 500_000), min_size=1, max_size=6),
    budget=st.integers(1_000, 900_000),
)
def test_limits_hold_and_nothing_is_lost_that_an_image_could_use(pixels, budget):
    low, high = 3_136, 300_000
    got = fit_to_limits(pixels, budget, low, high)
    assert sum(got) <= budget
    if budget < low * len(pixels):
        assert sorted(set(got) - {0, low}) == []
        assert sum(got) == budget // low * low
        return
    assert all(low <= value <= high for value in got)
    within = all(low <= value <= high for value in pixels) and sum(pixels) <= budget
    free = any(value < high for value, share in zip(got, pixels) if share > 0)
    if not within and free:
        assert sum(got) > budget - len(pixels) - 1


def test_limits_by_hand():
    assert fit_to_limits([500.0, 300.0, 200.0], 1000, 10, 400) == [400, 360, 240]
    assert fit_to_limits([990.0, 10.0], 1000, 100, 1000) == [900, 100]
    assert fit_to_limits([500.0, 500.0], 1000, 10, 300) == [300, 300]
    assert fit_to_limits([1.0, 5.0, 3.0], 25, 10, 300) == [0, 10, 10]
    assert fit_to_limits([400.4, 599.6], 1000, 10, 700) == [400, 599]
    assert fit_to_limits([1000.0, 1e-40], 1000, 10, 700) == [700, 10]
    assert fit_to_limits([], 1000, 10, 700) == []


def test_pressure_and_budget():
    assert [pressure(n, 2000) for n in (0, 2000, 3000, 4000, 9000)] == [0, 0, 0.5, 1, 1]
    assert visual_budget(3000, AllocationConfig()) == pytest.approx(645_000)
    assert visual_budget(9000, AllocationConfig(pressure_factor=-0.5)) == 300_000
    assert visual_budget(9000, AllocationConfig(pressure=False)) == 600_000


def test_detail_demand():
    assert detail_demand(50, 200, 0.5) == pytest.approx(0.375)
    assert detail_demand(0, 0, 1.0) == 0.5
    assert detail_demand(900, 200, 1.0) == 1.0


def test_pages_and_crops_share_the_budget():
    config = AllocationConfig(kappa=1, pressure=False, budget_pixels=500_000)
    images = [RetainedImage(1.0), RetainedImage(2.0, is_crop=True), RetainedImage(3.0)]
    assert allocate(images, 0, config) == [50_000, 300_000, 150_000]
    assert allocate(images[:1], 0, config) == [300_000]  # a page's limit; the rest is not used
    assert allocate(images[1:2], 0, config) == [500_000]
    assert allocate([], 0, config) == []


def test_the_detail_switch_is_d_equal_to_one():
    images = [RetainedImage(1.0, detail=0.9), RetainedImage(1.0, detail=0.1)]
    configs = [AllocationConfig(detail=on, budget_pixels=400_000) for on in (False, True)]
    plain, detailed = (allocate(images, 0, config) for config in configs)
    assert plain[0] == plain[1]
    assert detailed[0] > detailed[1]
