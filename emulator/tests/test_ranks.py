"""Kernels of several ranks: the order that words of symmetric memory give, and the reports where one is missing."""

import contextvars

import pytest
import torch

from cute_emulator import DeadlockError, EmulatorError, MemoryAccessError, RaceError, Ranks, active, emulate, sweep

from .ptx import module
from .ranks_ptx import exchange

# Each rank writes its data, raises the flag of the next one, waits for its own and reads the data of the next one.
INDEX = "  mul.wide.u32 %rd10, %r0, 4;\n  add.s64 %rd11, %rd0, %rd10;\n  add.s64 %rd12, %rd2, %rd10;\n"
INDEX += "  add.s64 %rd13, %rd4, %rd10;\n"
WRITE = "  mad.lo.s32 %r11, %r10, 100, %r0;\n  st.global.b32 [%rd11], %r11;\n"
RAISE = "  @%p0 st.release.sys.global.b32 [%rd3], 1;\n"
WAIT = """  @!%p0 bra WAITED;
SPIN:
  ld.acquire.sys.global.b32 %r12, [%rd1];
  setp.eq.s32 %p1, %r12, 0;
  @%p1 bra SPIN;
WAITED:
"""
MEET = "  bar.sync 0;\n"
READ = "  ld.global.b32 %r13, [%rd12];\n  st.global.b32 [%rd13], %r13;\n"
GOOD = INDEX + WRITE + MEET + RAISE + WAIT + MEET + READ


def expected(count):
    return [torch.arange(64, dtype=torch.int32) + 100 * ((rank + 1) % count) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_a_rank_reads_what_another_one_has_released(count):
    # A rank is signalled by the one before it, and reads from the one after it: with three that takes a whole round.
    body = GOOD
    for n in range(1, count - 1):
        body += (
            RAISE.replace("], 1", f"+{4 * n}], 1")
            + WAIT.replace("%rd1]", f"%rd1+{4 * n}]").replace("SPIN", f"SPIN{n}").replace("WAITED", f"WAITED{n}")
            + MEET
        )
    body = body.replace(READ, "", 1) + READ
    for seed in range(10):
        own, _, machine = exchange(body, count, warps=2, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(own, expected(count), strict=True))
        assert sorted(record.rank for record in machine.launches) == list(range(count))
        assert not any(record.warnings for record in machine.launches)


FAULTS = {
    "flag without release": GOOD.replace("st.release.sys", "st.relaxed.sys"),
    "weak flag": GOOD.replace("st.release.sys.global", "st.global"),
    "released to the GPU": GOOD.replace("st.release.sys", "st.release.gpu"),
    "flag without acquire": GOOD.replace("ld.acquire.sys", "ld.relaxed.sys"),
    "acquired from the GPU": GOOD.replace("ld.acquire.sys", "ld.acquire.gpu"),
    "a fence of the GPU": GOOD.replace("  @%p0 st.release", "  fence.acq_rel.gpu;\n  @%p0 st.relaxed"),
    "flag before the write": INDEX + RAISE + WRITE + MEET + WAIT + MEET + READ,
    "flag before the other warp's write": GOOD.replace(MEET, "", 1),
    "read before the flag": INDEX + WRITE + MEET + RAISE + READ + WAIT,
    "flag of the wrong rank": GOOD.replace("[%rd3], 1", "[%rd1], 1"),
    "result in the wrong buffer": GOOD.replace("st.global.b32 [%rd13], %r13", "st.global.b32 [%rd11], %r13"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_race_between_ranks_is_reported(fault):
    pattern = r"race: rank (\d), warp \d of CTA \(0, 0, 0\) (reads|writes) global memory, bytes \[\d+, \d+\) of "
    pattern += r"symmetric buffer \d of rank \d, at PTX line \d+, not ordered after the (read|write) by rank (?!\1)\d, "
    for seed in range(3):
        with pytest.raises(RaceError, match=pattern) as error:
            exchange(FAULTS[fault], warps=2, seed=seed)
        assert f"of rank {str(error.value).split()[2].strip(',')}, seed {seed}" in str(error.value)


ORDERED = {
    "fences of the system": GOOD.replace("  @%p0 st.release", "  fence.acq_rel.sys;\n  @%p0 st.relaxed").replace(
        "WAITED:\n", "  fence.acq_rel.sys;\nWAITED:\n"
    ),
    "red and an atomic load": GOOD.replace("st.release.sys.global.b32", "red.add.release.sys.global.u32").replace(
        "ld.acquire.sys.global.b32 %r12, [%rd1]", "atom.add.acquire.sys.global.u32 %r12, [%rd1], 0"
    ),
    "compare and swap": GOOD.replace(
        "ld.acquire.sys.global.b32 %r12, [%rd1]", "atom.cas.acquire.sys.global.b32 %r12, [%rd1], 1, 0"
    ),
}


@pytest.mark.parametrize("case", ORDERED)
def test_other_instructions_that_release_and_acquire(case):
    for seed in range(3):
        own, _, _ = exchange(ORDERED[case], warps=2, seed=seed)
        assert all(torch.equal(a, b) for a, b in zip(own, expected(2), strict=True))


@pytest.mark.parametrize("timing", ["adversarial", "in_order"])
def test_a_flag_that_is_never_raised(timing):
    """Rank 0 alone is signalled; the report names the line and the word at which rank 1 waits."""
    body = GOOD.replace("  @%p0 st.release", "  setp.eq.and.s32 %p2, %r10, 1, %p0;\n  @%p2 st.release")
    with pytest.raises(DeadlockError) as error:
        exchange(body, warps=2, timing=timing)
    text = str(error.value)
    assert "deadlock of ranks" in text
    assert "rank 0 has ended" in text
    assert "rank 1, warp 0 of CTA (0, 0, 0) at PTX line" in text
    assert "it last read the word at byte 0 of symmetric buffer 1 of rank 1, which is 0x0" in text
    assert "rank 1, warp 1 of CTA (0, 0, 0) at PTX line" in text
    assert "waits on bar.sync 0" in text


def test_a_deadlock_within_a_rank_names_it():
    with pytest.raises(DeadlockError, match=r"every warp is blocked\n  rank 0, warp 0 [\s\S]* of rank 0, seed 0"):
        exchange("  setp.ne.s32 %p3, %r10, 0;\n  @!%p3 bar.sync 0, 64;\n" + GOOD)


def test_launches_of_a_rank_come_one_after_the_other():
    """The first launch of each rank writes and waits, the second one reads: a race if the first acquires nothing."""
    first, second = INDEX + WRITE + MEET + RAISE + WAIT, INDEX + READ
    for seed in range(3):
        own, _, _ = exchange([first, second], seed=seed)
        assert all(torch.equal(a[:32], b[:32]) for a, b in zip(own, expected(2), strict=True))
        with pytest.raises(RaceError, match="reads global memory"):
            exchange([first.replace("ld.acquire", "ld.relaxed"), second], seed=seed)


def test_a_second_round_needs_a_second_barrier():
    """A rank that goes on after the first flag may overwrite memory that the other one still reads."""
    twice = GOOD + "  add.s32 %r11, %r11, 1;\n  st.global.b32 [%rd11], %r11;\n"
    for seed in range(3):
        with pytest.raises(RaceError, match=r"race: rank .* not ordered after the (read|write) by rank"):
            exchange(twice, warps=2, seed=seed)


def test_what_comes_before_a_run_is_ordered_before_it():
    ranks = Ranks(2)
    data = ranks.symmetric(32, dtype=torch.int32)
    text = module(
        "  mul.wide.u32 %rd2, %r0, 4;\n  add.s64 %rd0, %rd0, %rd2;\n  red.relaxed.gpu.global.add.u32 [%rd0], 1;\n", 1
    )
    with emulate("sm_90a") as machine:
        for shift in (0, 1):
            ranks.run(lambda rank: machine.launch_ptx(text, [data[(rank + shift) % 2]]))  # noqa: B023
    assert (torch.stack(data.tensors) == 2).all()


def test_a_run_depends_on_the_seed_alone():
    def steps(seed):
        return [(r.rank, r.steps, r.warp_instructions) for r in exchange(GOOD, warps=2, seed=seed)[2].launches]

    runs = [steps(seed) for seed in range(4)]
    assert runs == [steps(seed) for seed in range(4)]
    assert len(set(map(str, runs))) > 1


def test_sweep():
    ranks = Ranks(2)
    flags, out = ranks.symmetric(1, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
    text = module("  @%p0 atom.add.relaxed.sys.global.u32 %r3, [%rd0], 1;\n  @%p0 st.global.b32 [%rd1], %r3;\n", 2)
    good = module("  @%p0 red.add.relaxed.sys.global.u32 [%rd0], 1;\n  @%p0 st.global.b32 [%rd1], 7;\n", 2)

    def call(text):
        flags.fill_(0)
        ranks.run(lambda rank: active().launch_ptx(text, [flags[0], out[rank]]))

    with emulate("sm_90a"):
        assert [len(records) for records in sweep(lambda: call(good), [out], seeds=range(4))] == [2] * 4
        with pytest.raises(EmulatorError, match="output 0 depends on the schedule"):
            sweep(lambda: call(text), [out], seeds=range(10))


def test_strong_accesses_of_too_narrow_a_scope_are_a_warning():
    body = "  @%p0 red.add.relaxed.gpu.global.u32 [%rd1], 1;\n  @%p0 red.add.relaxed.gpu.global.u32 [%rd3], 1;\n"
    warnings = [w for record in exchange(body)[2].launches for w in record.warnings]
    assert warnings
    assert all("of another rank's memory at the same time, and not both with scope sys" in w for w in warnings)
    assert all("PTX line" in w and "{" not in w for w in warnings)
    assert not any(record.warnings for record in exchange(body.replace(".gpu", ".sys"))[2].launches)


def test_memory_that_is_not_symmetric_belongs_to_one_rank():
    ranks, both = Ranks(2), torch.zeros(4, dtype=torch.int32)
    flags = ranks.symmetric(1, dtype=torch.int32)
    spin = "SPIN:\n  ld.relaxed.sys.global.b32 %r3, [%rd0];\n  setp.ne.s32 %p1, %r3, 2;\n  @%p1 bra SPIN;\n"
    text = module("{}  @%p0 red.add.relaxed.sys.global.u32 [%rd0], 1;\n" + spin, 2)
    write, read = "  @%p0 st.global.b32 [%rd1+4], 1;\n", "  ld.global.b32 %r4, [%rd1+{}];\n"

    def run(bodies):
        flags.fill_(0)
        ranks.run(lambda rank: active().launch_ptx(text.replace("{}", bodies[rank]), [flags[0], both]))

    with emulate("sm_90a"):
        run([write, read.format(0)])
        run([read.format(4), read.format(4)])
        with pytest.raises(MemoryAccessError, match=r"access bytes \[4, 8\) of the memory at .* it is not symmetric"):
            run([write, read.format(4)])


def test_an_error_of_host_code_ends_the_run():
    ranks = Ranks(2)
    flags, ended = ranks.symmetric(1, dtype=torch.int32), []
    spin = module("SPIN:\n  ld.relaxed.sys.global.b32 %r3, [%rd0];\n  setp.eq.s32 %p1, %r3, 0;\n  @%p1 bra SPIN;\n", 1)

    def step(rank):
        if rank == 0:
            raise KeyError("of rank 0")
        try:
            active().launch_ptx(spin, [flags[rank]])
        finally:
            ended.append(rank)

    for seed in range(4):
        with emulate("sm_90a", seed=seed), pytest.raises(KeyError, match="of rank 0"):
            ranks.run(step)
    assert set(ended) <= {1}
    with emulate("sm_90a"):
        assert ranks.run(lambda rank: rank + 5) == [5, 6]


def test_host_code_may_handle_its_own_error():
    ranks, memory = Ranks(2), torch.zeros(1)
    outside = module("  ld.global.b32 %r3, [%rd0+64];\n", 1)

    def step(rank):
        with pytest.raises(MemoryAccessError, match=f"rank {rank}, warp 0 .* outside every tensor"):
            active().launch_ptx(outside, [memory])
        return rank

    with emulate("sm_90a"):
        assert ranks.run(step) == [0, 1]


def test_host_code_runs_in_the_context_of_the_caller():
    name = contextvars.ContextVar("name")
    name.set("of the caller")
    with emulate("sm_90a"), torch.no_grad():
        seen = Ranks(2).run(lambda rank: (name.get(), torch.is_grad_enabled()))
    assert seen == [("of the caller", False)] * 2


# ---- arguments ----
def test_arguments():
    with pytest.raises(ValueError, match="number of ranks must be positive, got 0"):
        Ranks(0)
    ranks = Ranks(2)
    with pytest.raises(ValueError, match="one for each of 2 ranks, got 1"):
        ranks.share([torch.zeros(4)])
    with pytest.raises(ValueError, match=r"one shape and dtype; that of rank 1 is \(5,\) torch.float32"):
        ranks.share([torch.zeros(4), torch.zeros(5)])
    with pytest.raises(ValueError, match="contiguous CPU tensors"):
        ranks.share([torch.zeros(4, 4).t(), torch.zeros(4, 4).t()])
    memory = torch.zeros(8)
    with pytest.raises(
        ValueError, match=r"must not overlap: symmetric buffer 0 of rank 0 and .* of rank 1 share memory"
    ):
        ranks.share([memory[:5], memory[3:]])
    shared = ranks.share([memory[:4], memory[4:]])
    with pytest.raises(ValueError, match="must not overlap"):
        ranks.share([memory[:1], torch.zeros(1)])
    assert len(ranks) == len(shared) == 2
    assert shared.addresses.tolist() == [memory.data_ptr(), memory.data_ptr() + 16]
    assert shared.multicast.shape == (4,)
    shared.fill_(3)
    assert (memory == 3).all()


def test_where_ranks_run():
    ranks = Ranks(2)
    with pytest.raises(EmulatorError, match="needs an open emulate"):
        ranks.run(lambda rank: None)
    with emulate("sm_90", timing="clocked"), pytest.raises(EmulatorError, match="no model of time"):
        ranks.run(lambda rank: None)
    with emulate("sm_90a"), pytest.raises(EmulatorError, match="called by the host code of rank 0"):
        Ranks(1).run(lambda rank: ranks.run(lambda rank: None))
    with emulate("sm_90a") as machine, pytest.raises(EmulatorError, match=r"machine\.patience must be None"):
        machine.patience = 1.0
        ranks.run(lambda rank: None)
