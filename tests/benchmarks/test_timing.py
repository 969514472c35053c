"""Interleaved arms, on clocks that the test moves itself: nothing here depends on how fast a machine is."""

import contextlib
import itertools
from collections import Counter

import pytest


@pytest.fixture(scope="module")
def timing(load):
    return load("harness.timing")


class Hand:
    """A clock that moves when work is done."""

    def __init__(self):
        self.time = 0.0
        self.log = []

    def __call__(self):
        return self.time

    def work(self, seconds, name="work"):
        self.log.append(name)
        self.time += seconds


class Cuda:
    """The part of ``torch.cuda`` that ``harness.timing`` uses, with a clock set by hand."""

    def __init__(self, hand):
        self.hand, self.where, self.recording = hand, "default", None
        outer = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                outer.hand.log.append("record")
                self.at = outer.hand.time

            def elapsed_time(self, end):
                return end.at - self.at

        class Stream:
            def wait_stream(self, other):
                outer.hand.log.append("wait")

        class CUDAGraph:
            def __init__(self):
                self.works = []

            def replay(self):
                for seconds in self.works:
                    outer.hand.work(seconds)

        self.Event, self.Stream, self.CUDAGraph = Event, Stream, CUDAGraph

    def launch(self, seconds):
        """A kernel of so many milliseconds."""
        if self.recording is not None:
            self.recording.works.append(seconds)
        else:
            self.hand.work(seconds, f"work on {self.where}")

    def current_stream(self):
        return self.Stream()

    @contextlib.contextmanager
    def stream(self, stream):
        self.where = "another"
        yield
        self.where = "default"

    @contextlib.contextmanager
    def graph(self, graph, pool=None):
        self.recording = graph
        try:
            yield
        finally:
            self.recording = None

    def synchronize(self):
        self.hand.log.append("synchronize")

    def _sleep(self, cycles):
        self.hand.work(100.0, "sleep")


class Flush:
    made = ()

    def __init__(self, clean=False, hand=None):
        Flush.made, self.hand = (*Flush.made, clean), hand

    def flush(self):
        self.hand.work(50.0, "flush")


@pytest.fixture
def cuda(timing, monkeypatch):
    fake = Cuda(Hand())
    monkeypatch.setattr(timing, "cuda", fake)
    monkeypatch.setattr(Flush, "made", ())
    monkeypatch.setattr(timing, "L2", lambda clean: Flush(clean, fake.hand))
    return fake


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c", "d"]])
def test_rotated_orders(timing, names):
    orders = list(itertools.islice(timing.rotated(names), 3 * len(names)))
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, 3)
    assert all(sorted(order) == names for order in orders)


def test_shuffled_orders_are_the_same_every_time(timing):
    one, other = (list(itertools.islice(timing.shuffled(["a", "b", "c"]), 60)) for _ in range(2))
    assert one == other
    assert len({tuple(order) for order in one}) == 6


def test_no_arms(timing):
    assert timing.interleaved({}, timing.HostClock(), range(3)) == {}


def test_a_slow_arm_is_seen(timing):
    hand = Hand()
    arms = {"fast": lambda: hand.work(2.0), "slow": lambda: hand.work(3.0)}
    found = timing.interleaved(arms, timing.HostClock(hand, calls=4), range(7), warm_up=2)
    assert found == {"fast": [2.0] * 5, "slow": [3.0] * 5}
    assert len(hand.log) == 7 * 4 * 2


def test_warm_up_turns_are_not_in_the_result(timing):
    hand = Hand()
    cost = iter((9.0, 8.0, 1.0, 1.0))
    assert timing.interleaved({"a": lambda: hand.work(next(cost))}, timing.HostClock(hand), range(4), warm_up=2) == {
        "a": [1.0, 1.0]
    }


def test_a_machine_that_slows_down_favours_no_arm(timing):
    """Turns alternate, so each of two equal arms is measured first half of the time."""
    hand = Hand()
    slower = itertools.count(1)
    arms = dict.fromkeys(("a", "b"), lambda: hand.work(float(next(slower))))
    found = timing.interleaved(arms, timing.HostClock(hand), range(40))
    assert sum(found["a"]) == sum(found["b"])


def test_turns_by_time(timing):
    hand = Hand()
    turns = []
    for turn in timing.for_seconds(10.0, 3, hand):
        turns.append(turn)
        hand.work(4.0)
    assert turns == [0, 1, 2]
    assert list(timing.for_seconds(0.0, 5, hand)) == [0, 1, 2, 3, 4]


def test_a_graph_is_captured_after_a_warm_up_on_another_stream(timing, cuda):
    calls = []

    def call():
        calls.append(cuda.where)
        cuda.launch(2.0)
        return "result"

    replay = timing.Replay(call)
    assert calls == ["another"] * 3 + ["default"]
    assert cuda.hand.log == ["wait", *["work on another"] * 3, "wait"]
    assert replay.result == "result"
    replay()
    replay()
    assert len(calls) == 4
    assert cuda.hand.log[-2:] == ["work", "work"]


def test_an_arm_that_fails_is_named(timing, cuda):
    def refuses():
        raise NotImplementedError("no kernel\nfor this")

    def silent():
        raise ValueError

    graphs, failed = timing.captured({"fine": lambda: cuda.launch(1.0), "refuses": refuses, "silent": silent})
    assert list(graphs) == ["fine"]
    assert failed == {"refuses": "NotImplementedError: no kernel", "silent": "ValueError: "}


def test_events_enclose_the_replay_alone(timing, cuda):
    clock = timing.DeviceClock(timing.L2(False))
    mark = clock.take(lambda: cuda.launch(2.0))
    assert cuda.hand.log == ["sleep", "flush", "record", "work on default", "record"]
    assert clock.read(mark) == 2.0


def test_the_host_arm_counts_the_time_to_issue_a_call(timing, cuda):
    """The device has nothing to do when the first event is recorded."""
    clock = timing.DeviceClock(timing.L2(False), host=True)
    assert clock.read(clock.take(lambda: cuda.launch(2.0))) == 2.0
    assert cuda.hand.log == ["flush", "synchronize", "record", "work on default", "record"]


@pytest.mark.parametrize("clean", [False, True])
def test_replays(timing, cuda, clean):
    graphs = {name: timing.Replay(lambda ms=ms: cuda.launch(ms)) for name, ms in (("fast", 3.0), ("slow", 6.0))}
    cuda.hand.log.clear()
    assert timing.replays(graphs, 5, clean) == {"fast": [3.0] * 5, "slow": [6.0] * 5}
    assert Flush.made == (clean,)
    assert Counter(cuda.hand.log) == {"sleep": 16, "flush": 16, "record": 32, "work": 16, "synchronize": 8}


def test_calls(timing, cuda):
    """Calls run in changing orders, and with nothing on the device before a reading."""
    arms = {"fast": lambda: cuda.launch(3.0), "slow": lambda: cuda.launch(6.0)}
    assert timing.calls(arms, 5) == {"fast": [3.0] * 5, "slow": [6.0] * 5}
    assert Counter(cuda.hand.log) == {"flush": 16, "record": 32, "work on default": 16, "synchronize": 24}


def test_the_flushed_memory_is_twice_the_l2(load):
    """Twice an L2 of today's largest, in bytes; the memory to read is as large."""
    timing = load("harness.timing")
    assert timing.L2_BYTES == 256 << 20
    l2 = timing.L2(True, "cpu", 64)
    l2.written.fill_(1)
    l2.flush()
    assert not l2.written.any()
    assert l2.written.nbytes == l2.read.nbytes == 64
    assert timing.L2(False, "cpu", 64).read is None


def test_a_busy_device_works_right_up_to_the_timed_call(timing, cuda):
    clock = timing.BusyClock(seconds=0.01)
    mark = clock.take(lambda: cuda.launch(2.0))
    assert cuda.hand.log == (
        ["record", "work on default", "record", "synchronize"]
        + ["work on default"] * 5
        + ["record"]
        + ["work on default"] * 5
        + ["record"]
    )
    assert clock.read(mark) == 2.0
    assert timing.BusyClock(0.001).take(lambda: cuda.launch(2.0))[2] == 1
    graphs = {"a": lambda: cuda.launch(2.0), "b": lambda: cuda.launch(3.0)}
    assert timing.replays(graphs, 3, busy=0.01) == {"a": [2.0] * 3, "b": [3.0] * 3}
