"""The stage clock, on a clock of its own that the tests move."""

import asyncio
import threading

import pytest

from visor.stage_clock import StageClock


class Hand:
    time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def clock(hand):
    return StageClock(hand)


def test_blocks_of_a_stage_add_up(clock, hand):
    for seconds in (1, 2):
        with clock.running("decode"):
            hand.time += seconds
        hand.time += 5
    assert clock.take() == {"decode": 3}
    assert clock.take() == {}


def test_an_inner_stage_is_taken_out_of_the_outer(clock, hand):
    with clock.running("encode"):
        hand.time += 1
        with clock.running("crop"):
            hand.time += 10
            with clock.running("encode"):
                hand.time += 100
        hand.time += 1000
    assert clock.take() == {"encode": 1101, "crop": 10}


def test_an_error_ends_its_stage(clock, hand):
    def fail():
        with clock.running("outer"), clock.running("inner"):
            hand.time += 1
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    with clock.running("outer"):
        hand.time += 2
    assert clock.take() == {"inner": 1, "outer": 2}


def test_threads_do_not_nest_into_each_other(clock, hand):
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with clock.running("retrieve"):
            inside.set()
            go_on.wait(10)

    thread = threading.Thread(target=work)
    with clock.running("decode"):
        thread.start()
        inside.wait(10)
        hand.time += 3
        go_on.set()
        thread.join()
    assert clock.take() == {"decode": 3, "retrieve": 3}


def test_those_who_wait_together_count_once(clock, hand):
    async def wait(seconds, last):
        with clock.waiting("judge"):
            await asyncio.sleep(0)
            hand.time += seconds
            await asyncio.sleep(0 if last else 0.001)

    async def run():
        await asyncio.gather(wait(1, False), wait(2, True))
        hand.time += 50  # nobody waits
        await wait(4, True)

    asyncio.run(run())
    assert clock.take() == {"judge": 7}


def test_taking_in_the_middle_splits_what_waits(clock, hand):
    with clock.waiting("judge"):
        hand.time += 2
        assert clock.take() == {"judge": 2}
        hand.time += 3
    assert clock.take() == {"judge": 3}
