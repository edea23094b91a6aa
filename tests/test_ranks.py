"""Ranks as threads over a store in memory: every way in which a save can go wrong, and what is said of it."""

import threading

import pytest

from ckptfs.errors import CkptError, MismatchError, NotFoundError, SaveError, StorageError
from ckptfs.ranks import (
    Beat,
    Ended,
    Group,
    MemoryKV,
    Now,
    PeerWatch,
    Round,
    Timeouts,
    blame,
    bytes_text,
    joining,
    typical,
)
from ckptfs.ranks.kv import PART_BYTES, drop_value, put_value, take_value
from ckptfs.ranks.watch import TRANSITIONS, moved, slow_ranks

# Others must not be late by as much only because the machine is busy.
QUICK = Timeouts(enter_timeout_s=2, progress_timeout_s=2, silence_timeout_s=2, grace_s=1, beat_s=0.02)
PATIENT = Timeouts(enter_timeout_s=20, progress_timeout_s=20, silence_timeout_s=20, grace_s=1, beat_s=0.02)


def each(groups, *programs):
    """Run one program per rank in threads; returns what each returned or raised."""
    results = [None] * len(groups)

    def run(rank, program):
        try:
            results[rank] = program(groups[rank])
        except Exception as error:
            results[rank] = error

    programs = programs * len(groups) if len(programs) == 1 else programs
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(programs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def no_work(round_):
    pass


def saving(step=1, timeouts=PATIENT, work=no_work, deadline_s=None):
    """A rank that takes part as it should; `work` is its part, and may raise."""

    def save(group):
        hello = bytes([group.rank]) * 32
        with Round.enter(
            group, "/run", hello, step=step, info=b"info", timeouts=timeouts, deadline_s=deadline_s
        ) as round_:
            try:
                work(round_)
                round_.report(b"report %d" % group.rank)
            except CkptError as error:
                round_.fail(error)
            if group.rank == 0:
                lead(round_)
            return round_.verdict()

    return save


def lead(round_):
    try:
        reports = round_.gather()
    except CkptError as error:
        round_.publish(error)
    else:
        round_.publish(None, b" ".join(reports))


def absent(group):
    return "absent"


def assert_same_error(results, kind=SaveError):
    errors = [result for result in results if not isinstance(result, str)]
    assert all(type(error) is kind for error in errors), results
    assert len({str(error) for error in errors}) == 1, results
    return errors[0]


def leftovers(groups):
    keys = groups[0].kv.keys()
    return [key for key in keys if key.split("/")[1] not in {"now", "seq"}]


# --- rounds that end well --------------------------------------------------------------------------------------------


def test_all_ranks_get_the_same_verdict_and_leave_nothing():
    groups = Group.threads(4)
    for _ in range(3):
        assert each(groups, saving()) == [b"report 0 report 1 report 2 report 3"] * 4
        assert leftovers(groups) == []


def test_every_rank_knows_the_same_round():
    seen = {}

    def note(round_):
        seen[round_.group.rank] = (round_.seq, round_.save_id, tuple(round_.hellos), round_.opening)

    each(Group.threads(3), saving(work=note))
    assert len(seen) == 3
    assert len(set(seen.values())) == 1
    assert seen[0][0] == 1
    assert seen[0][2:] == ((b"\0" * 32, b"\1" * 32, b"\2" * 32), b"info")


def test_shared_data_of_any_size_reaches_everybody():
    data = bytes(range(256)) * (2 * PART_BYTES // 256) + b"end"
    got = []

    def work(round_):
        if round_.group.rank == 2:
            round_.share("digest", data)
        got.append(round_.fetch("digest"))

    groups = Group.threads(3)
    each(groups, saving(work=work))
    assert got == [data] * 3
    assert leftovers(groups) == []


def test_the_leader_sees_reports_as_they_come():
    others_may_report, seen = threading.Event(), []

    def leader(group):
        with Round.enter(group, "/run", b"", step=1, timeouts=PATIENT) as round_:
            round_.report(b"a")

            def on_report(rank, payload):
                seen.append((rank, payload))
                if rank == 1:
                    others_may_report.set()

            round_.gather(on_report)
            round_.publish()

    def late(round_):
        assert others_may_report.wait(60)

    each(Group.threads(3), leader, saving(), saving(work=late))
    assert seen == [(0, b"a"), (1, b"report 1"), (2, b"report 2")]


# --- rounds that fail ------------------------------------------------------------------------------------------------


def test_a_rank_that_never_enters_is_named_and_told_when_it_comes_late():
    groups = Group.threads(3)
    error = assert_same_error(each(groups, saving(timeouts=QUICK), saving(timeouts=QUICK), absent))
    assert error.by_rank.keys() == {2}
    assert "never entered" in error.by_rank[2]
    with pytest.raises(SaveError, match=r"gave up on step 1 .* before rank 2 entered") as late:
        saving(timeouts=QUICK)(groups[2])
    assert late.value.by_rank == error.by_rank
    assert each(groups, saving(2)) == [b"report 0 report 1 report 2"] * 3
    assert leftovers(groups) == []


def test_a_rank_that_missed_a_round_still_learns_of_it_when_the_leader_has_gone_on():
    groups = Group.threads(2)
    each(groups, saving(1, QUICK), absent)
    each(groups, saving(2, QUICK), absent)
    with pytest.raises(SaveError, match="gave up on step 1"):
        saving(1, QUICK)(groups[1])
    assert each(groups, saving(3)) == [b"report 0 report 1"] * 2
    assert leftovers(groups) == []


def test_one_failure_ends_the_round_early_with_the_same_error_everywhere():
    def work(round_):
        if round_.group.rank == 1:
            raise StorageError("no space left")

    groups = Group.threads(3)
    error = assert_same_error(each(groups, saving(work=work)))
    assert error.by_rank == {1: "failed in phase 'enter': StorageError: no space left"}
    assert each(groups, saving()) == [b"report 0 report 1 report 2"] * 3
    assert leftovers(groups) == []


def test_a_failing_leader_is_named_too():
    def work(round_):
        if round_.group.rank == 0:
            raise CkptError("cannot describe lr_scheduler")

    error = assert_same_error(each(Group.threads(2), saving(work=work)))
    assert error.by_rank == {0: "failed in phase 'enter': cannot describe lr_scheduler"}


def test_an_exception_in_the_body_fails_the_round():
    def raising(group):
        with Round.enter(group, "/run", b"", step=1, timeouts=PATIENT):
            raise ValueError("odd tree")

    results = each(Group.threads(2), saving(), raising)
    assert results[0].by_rank == {1: "failed in phase 'enter': ValueError: odd tree"}
    assert str(results[1]) == "odd tree"


def test_who_waits_for_data_hears_of_the_failure_of_who_should_have_shared_it():
    def work(round_):
        if round_.group.rank == 1:
            raise MismatchError("bad shape")
        round_.fetch("never shared")

    error = assert_same_error(each(Group.threads(3), saving(work=work)))
    assert error.by_rank == {1: "failed in phase 'enter': MismatchError: bad shape"}


def test_an_error_of_the_commit_keeps_its_kind():
    def leader(group):
        with Round.enter(group, "/run", b"", step=1, timeouts=PATIENT) as round_:
            round_.report()
            round_.gather()
            round_.publish(NotFoundError("the folder is gone"))
            return round_.verdict()

    error = assert_same_error(each(Group.threads(2), leader, saving()), NotFoundError)
    assert str(error) == "the folder is gone"


def test_ranks_that_want_different_steps_are_told_both():
    groups = Group.threads(3)
    results = each(groups, saving(200), saving(100), absent)
    error = assert_same_error(results, MismatchError)
    assert "rank 0 saves step 200, but rank 1 wants step 100" in str(error)
    assert each(groups, saving(300)) == [b"report 0 report 1 report 2"] * 3
    assert leftovers(groups) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_stuck_rank_is_told_from_a_silent_one(silent):
    leader_done = threading.Event()

    def leader(group):
        try:
            return saving(timeouts=QUICK)(group)
        finally:
            leader_done.set()

    def hang(round_):
        round_.heartbeat("write", 3 << 30, 8 << 30)
        if silent:
            round_._beats.stop()
        leader_done.wait(60)

    error = assert_same_error(each(Group.threads(2), leader, saving(timeouts=QUICK, work=hang)))
    assert error.by_rank.keys() == {1}
    assert error.by_rank[1].startswith("no sign of life for" if silent else "stuck in phase 'write' at 3.0 GiB of 8.0")


def test_a_leader_in_the_middle_of_its_part_names_who_is_silent_not_who_waits_for_it():
    """As when bytes are handed over: rank 1 gets nothing done because rank 2 has stopped."""
    over = threading.Event()
    quick = Timeouts(enter_timeout_s=5, progress_timeout_s=0.3, silence_timeout_s=3.0, grace_s=1, beat_s=0.02)

    def leader(group):
        round_ = Round.enter(group, "/run", b"h" * 32, step=1, timeouts=quick)
        try:
            while True:
                round_.look_around()
                over.wait(0.02)
        except SaveError as error:
            round_.publish(error)
            return sorted(error.by_rank), error.by_rank[2]
        finally:
            over.set()

    def other(group):
        round_ = Round.enter(group, "/run", b"h" * 32, step=1, timeouts=quick)
        if group.rank == 2:
            round_._beats.stop()
        assert over.wait(60)
        round_.close()

    found = each(Group.threads(3), leader, other, other)[0]
    assert found[0] == [2], found
    assert "no sign of life" in found[1]


def test_a_deadline_ends_a_round_in_which_somebody_does_not_get_ready():
    over = threading.Event()

    def leader(group):
        try:
            return saving(deadline_s=2)(group)
        finally:
            over.set()

    def crawl(round_):
        round_.heartbeat("write", 1, 100)
        over.wait(60)

    error = assert_same_error(each(Group.threads(2), leader, saving(work=crawl, deadline_s=2)))
    assert error.by_rank.keys() == {1}


def test_a_leader_that_never_comes_is_named():
    results = each(Group.threads(3), absent, saving(timeouts=QUICK), saving(timeouts=QUICK))
    for error in results[1:]:
        assert isinstance(error, SaveError)
        assert error.by_rank.keys() == {0}
        assert "never entered" in error.by_rank[0]


@pytest.mark.parametrize("after", ["enter", "report"])
def test_a_leader_that_dies_is_named(after):
    def dying(group):
        round_ = Round.enter(group, "/run", b"", step=1, timeouts=QUICK)
        round_.heartbeat("commit")
        if after == "report":
            round_.report()
            round_.gather()
        round_._beats.stop()
        return "died"

    results = each(Group.threads(3), dying, saving(timeouts=QUICK), saving(timeouts=QUICK))
    for error in results[1:]:
        assert isinstance(error, SaveError)
        assert "no sign of life" in error.by_rank[0]


def test_a_new_leader_process_takes_over_from_one_that_died_in_a_round():
    groups = Group.threads(2)

    def dying(group):
        Round.enter(group, "/run", b"", step=1, timeouts=QUICK)._beats.stop()

    each(groups, dying, saving(timeouts=QUICK))
    groups[0] = Group(0, 2, lambda: groups[1].kv)
    assert each(groups, saving(2)) == [b"report 0 report 1"] * 2
    assert leftovers(groups) == []


def test_leaving_without_a_report_is_a_failure():
    def leaving(group):
        Round.enter(group, "/run", b"", step=1, timeouts=PATIENT).close()

    results = each(Group.threads(2), saving(), leaving)
    assert results[0].by_rank == {1: "failed in phase 'enter': left the save without a report"}


# --- one process -----------------------------------------------------------------------------------------------------


def test_alone_nothing_is_sent_and_no_thread_runs():
    before = set(threading.enumerate())
    with Round.enter(Group.solo(), "/run", b"hello", info=b"i", step=3) as round_:
        round_.share("key", b"data")
        assert round_.fetch("key") == b"data"
        round_.heartbeat("write", 1, 2)
        round_.report(b"mine")
        assert round_.gather() == [b"mine"]
        round_.publish(None, b"fine")
        assert round_.verdict() == b"fine"
        assert (round_.hellos, round_.opening, len(round_.save_id)) == ([b"hello"], b"i", 16)
        assert set(threading.enumerate()) <= before


def test_alone_a_failure_raises_too():
    with Round.enter(Group.solo(), "/run", b"") as round_:
        round_.fail(StorageError("no space"))
        lead(round_)
        with pytest.raises(SaveError, match="no space"):
            round_.verdict()


# --- decisions -------------------------------------------------------------------------------------------------------


def test_what_is_not_in_the_table_raises():
    states = {state for state, _ in TRANSITIONS}
    events = {event for _, event in TRANSITIONS}
    for state, event in [(state, event) for state in states for event in events]:
        if (state, event) in TRANSITIONS:
            assert moved(state, event, "step 1") == TRANSITIONS[state, event]
        else:
            with pytest.raises(CkptError, match="out of order"):
                moved(state, event, "step 1")


def test_reporting_twice_raises():
    round_ = Round.enter(Group.solo(), "/run", b"")
    round_.report()
    with pytest.raises(CkptError, match="out of order"):
        round_.report()
    round_.close()
    round_.close()


FAILED = {"kind": "SaveError", "message": "m", "by_rank": {}}
GAVE_UP_100 = Ended(1, 100, FAILED)


@pytest.mark.parametrize(
    ("now", "last_seq", "then"),
    [
        (None, 0, "wait"),
        (Now(1, 100, "", True), 0, "join"),
        (Now(1, 100, "", True), 1, "wait"),
        (Now(1, 200, "", True), 0, "join"),
        (Now(2, 200, "", True, (GAVE_UP_100,)), 0, GAVE_UP_100),
        (Now(2, 200, "", True, (GAVE_UP_100,)), 1, "join"),
        (Now(2, 100, "", True, (GAVE_UP_100,)), 0, "join"),
        (Now(1, 50, "", False, (Ended(1, 50, None),)), 0, "wait"),
        (Now(1, 100, "", False, (GAVE_UP_100,)), 0, GAVE_UP_100),
        (Now(1, 100, "", False, (GAVE_UP_100,)), 1, "wait"),
    ],
)
def test_joining(now, last_seq, then):
    assert joining(now, 100, last_seq) == then
    if now is not None:
        assert Now.unpack(now.pack(b"info")) == (now, b"info")


def test_a_watcher_that_was_stopped_blames_nobody():
    watch = PeerWatch([1], 0.0, max_gap_s=2.0)
    beat = Beat(1, "write", 5, 10, 1.0)
    watch.look({1: beat}, 1.0)
    watch.look({1: beat}, 1000.0)  # not the rank slept: we did
    assert watch.judge(1, Timeouts()) is None
    for second in range(1001, 1030):
        watch.look({1: beat}, float(second))
    assert watch.judge(1, Timeouts()) == "no sign of life for 31 s in phase 'write' at 5 B of 10 B"


def test_slow_is_told_against_the_median_of_the_others():
    watch = PeerWatch([1, 2], 0.0, max_gap_s=2.0)
    watch.look({1: Beat(1, "write", 4 * 10**8, None, 1.0), 2: None}, 1.0)
    rates = {0: {"write": 1.9e9}, 3: {"write": 1.9e9}}
    assert watch.judge_late(1, rates).startswith("slow: 0.4 GB/s against a median of 1.9, in phase 'write'")
    assert watch.judge_late(2, rates).startswith("no sign of life")
    assert slow_ranks(rates | {1: {"write": 4e8}}, 4.0) == {1: "0.4 GB/s in phase 'write' against a median of 1.9"}


def test_host_and_store_are_told_apart():
    fast = {"memory": 4e9, "store": 4e8}
    hosts = dict.fromkeys(range(5), "a") | {4: "b"}
    good = dict.fromkeys(range(4), fast)
    assert blame(good | {4: {"memory": 2e9, "store": 2e8}}, hosts, fast) == ""
    one_host = blame(good | {4: {"memory": 4e8, "store": 4e7}}, hosts, fast)
    assert one_host.splitlines() == [
        "rank 4 on b is slow against every target",
        "          GB/s   memory    store",
        "        rank 0        4      0.4",
        "        rank 1        4      0.4",
        "        rank 2        4      0.4",
        "        rank 3        4      0.4",
        "        rank 4      0.4     0.04",
    ]
    assert blame(good | {4: {"memory": 4e9, "store": 4e7}}, hosts, fast).startswith(
        "rank 4 on b is slow against store only\n"
    )
    slow_store = {rank: {"memory": 4e9, "store": 4e7} for rank in range(4)}
    assert blame(slow_store, hosts, fast).startswith("store is slow for all ranks: 0.04 GB/s, 0.4 before\n")
    assert blame(slow_store, hosts, {}) == ""  # nothing to compare with
    assert blame({0: {"store": 1e8}}, hosts, fast) == ""  # ranks that hold nothing say nothing


def test_what_is_usual_is_the_best_that_was_seen_slowly_forgotten():
    usual = typical([{"store": 1e8}, {"store": 3e8}, {"store": 2e8, "memory": 1e9}], {})
    assert usual == {"store": 2e8, "memory": 1e9}
    assert typical([{"store": 1e7}], usual) == {"store": 1.96e8, "memory": 9.8e8}


def test_bytes_for_people():
    texts = [bytes_text(count) for count in (0, 1023, 1536, 3 << 30, 5 << 40)]
    assert texts == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]


def test_values_leave_no_parts_behind():
    kv = MemoryKV()
    value = b"x" * (2 * PART_BYTES + 1)
    put_value(kv, "k", value)
    assert len(kv.keys()) == 4
    assert take_value(kv, "k") == value
    drop_value(kv, "k")
    assert kv.keys() == []
    with pytest.raises(TimeoutError):
        kv.get("k", 0)
