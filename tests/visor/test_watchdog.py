"""The watchdog: it names what hangs, and never ends a process that goes on."""

import subprocess
import sys
import threading
import time

import pytest

from visor.stage_clock import StageClock
from visor.watchdog import STATUS, Watchdog


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


def test_a_stage_without_progress_is_named_with_what_it_works_on(clock, hand):
    dog = Watchdog(10, name="process 1 of 2", whole=["rollout"], clock=clock)
    with clock.running("rollout", "step 3"), clock.running("judge", "question q7, sample 2"):
        hand.time = 10
        assert dog.report() is None
        hand.time = 10.5
        report = dog.report()
    assert report.startswith("watchdog: process 1 of 2: stage judge has shown no progress for 10.5 s")
    assert "stage_timeout 10" in report
    assert "judge: open for 10.5 s in thread MainThread, on question q7, sample 2" in report
    assert "rollout" not in report
    assert "last: question q7, sample 2" in report


def test_the_whole_is_named_when_nothing_in_it_is_open(clock, hand):
    dog = Watchdog(10, whole=["rollout"], clock=clock)
    with clock.running("rollout", "step 3"):
        hand.time = 11
        assert "stage rollout has shown" in dog.report()
    hand.time = 30
    assert "no stage is open, and the process has shown" in dog.report()


def test_beginning_ending_and_progress_are_signs_of_life(clock, hand):
    dog = Watchdog(10, clock=clock)
    with clock.running("update"):
        for _ in range(9):
            hand.time += 9
            clock.progress("a micro-batch")
            hand.time += 9
            assert dog.report() is None
            with clock.waiting("gather"):
                hand.time += 9
                assert dog.report() is None
        hand.time += 11
        assert "last: a micro-batch" in dog.report()


def test_many_of_a_stage_are_counted(clock, hand):
    dog = Watchdog(10, clock=clock)
    blocks = [clock.waiting("decode", f"reply {n}") for n in range(5)]
    for block in blocks:
        block.__enter__()
    hand.time = 11
    assert "on reply 0; reply 1; reply 2 and 2 more" in dog.report()


def test_a_stage_may_have_more_time(clock, hand):
    dog = Watchdog(10, limits={"judge": 100}, clock=clock)
    with clock.waiting("judge"):
        hand.time = 99
        assert dog.report() is None
        hand.time = 101
        assert "stage judge" in dog.report()


def test_who_waits_for_the_others_hangs_when_they_do(clock, hand):
    others = []
    dog = Watchdog(10, shared=["gather"], others_hang=lambda seconds: bool(others), clock=clock)
    with clock.running("gather"):
        hand.time = 1000
        assert dog.report() is None
        others.append(True)
        assert "stage gather" in dog.report()
        others.clear()
        with clock.running("judge"):
            hand.time = 2000
            assert "stage gather and judge" in dog.report()


def test_details_and_advice_come_with_it(clock, hand):
    dog = Watchdog(
        1, details=[lambda: "engine: ready", lambda: ""], advice=lambda: "go on from there", clock=clock
    )
    hand.time = 2
    assert dog.report().splitlines()[-2:] == ["  engine: ready", "  go on from there"]


def test_a_run_that_goes_on_is_left_alone_and_one_that_stops_is_ended():
    clock, ended = StageClock(), []
    with Watchdog(0.4, end=ended.append, clock=clock):
        for _ in range(10):
            with clock.running("decode"):
                time.sleep(0.1)
        assert not ended
        with clock.running("retrieve", "search 'apple'"):
            time.sleep(1.0)
        assert "search 'apple'" in ended[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


SCRIPT = """
import threading
from visor.stage_clock import CLOCK
from visor.watchdog import Watchdog
def stuck_in_the_judge():
    threading.Event().wait()
print("some output")
with Watchdog(0.5), CLOCK.running("judge", "question q1"):
    stuck_in_the_judge()
"""


def test_the_process_ends_with_the_stacks_of_its_threads():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == STATUS
    assert done.stdout == "some output\n"
    assert "stage judge has shown no progress" in done.stderr
    assert "question q1" in done.stderr
    assert "in stuck_in_the_judge" in done.stderr
