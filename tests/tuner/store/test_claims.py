"""Claims on both databases: one holder at a time, a lease by the database's clock, nothing written by a late worker."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from datetime import datetime
from datetime import timedelta

import pytest
from sqlalchemy import Engine
from sqlalchemy import select
from sqlalchemy import update

from kdatune_kernels.errors import StoreError
from kdatune_kernels.spec import shape_of
from kdatune_tuner.store import claims
from kdatune_tuner.store import writes
from kdatune_tuner.store.claims import Claim
from kdatune_tuner.store.claims import ClaimLostError
from kdatune_tuner.store.claims import ClaimModel
from kdatune_tuner.store.claims import ClaimState
from kdatune_tuner.store.claims import Keys
from kdatune_tuner.store.engine import reading
from kdatune_tuner.store.engine import writing

LEASE_SECONDS = 60.0
Take = Callable[..., Claim | None]


@pytest.fixture
def keys(engine: Engine, world) -> Keys:
    with writing(engine) as s:
        ids = tuple(writes.put_problem(s, "kda", shape_of(1, 96, tokens)) for tokens in (8192, 4096, 1024))
    return Keys(world.gpu_id, world.build_id, ids, "plan")


@pytest.fixture
def now(engine: Engine) -> datetime:
    with reading(engine) as s:
        return claims.database_now(s)


@pytest.fixture
def take(engine: Engine, keys: Keys, now: datetime) -> Take:
    def call(owner: str, *, of: Keys = keys, since: datetime = now, lease: float = LEASE_SECONDS) -> Claim | None:
        with writing(engine) as s:
            return claims.take(s, of, owner, lease, since)

    return call


def states(engine: Engine, keys: Keys, since: datetime) -> list[tuple[str, bool]]:
    with reading(engine) as s:
        return [(str(key.state), key.free) for key in claims.standing(s, keys, since)]


def end_lease(engine: Engine, claim: Claim) -> None:
    """As if the holder had been silent for its whole lease."""
    with writing(engine) as s:
        past = claims.database_now(s) - timedelta(seconds=1)
        s.execute(update(ClaimModel).where(ClaimModel.id == claim.id).values(lease_ends_at=past))


def after(engine: Engine) -> datetime:
    """A moment after all that was done, also by SQLite's clock, which counts milliseconds."""
    time.sleep(0.002)
    with reading(engine) as s:
        return claims.database_now(s)


def test_the_clock_is_the_databases(engine: Engine) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    with reading(engine) as s:
        first = claims.database_now(s)
        time.sleep(0.01)
        assert claims.database_now(s) > first  # also inside one transaction
    assert before < first < datetime.now(UTC) + timedelta(seconds=5)


def test_every_key_is_held_once_in_order(take: Take, keys: Keys, engine: Engine, now: datetime) -> None:
    assert states(engine, keys, now) == [("open", True)] * 3
    taken = [take(owner) for owner in ("a", "b", "c", "d")]
    assert [claim.problem_id for claim in taken[:3]] == list(keys.problem_ids)
    assert taken[3] is None
    assert states(engine, keys, now) == [("held", False)] * 3


def test_what_is_done_is_done_for_the_round_and_with_its_run(take, keys, engine, now, world) -> None:
    claim = take("a")
    with writing(engine) as s:
        run_id = world.run(s)
        claims.finish(s, claim, run_id)
    with reading(engine) as s:
        assert s.scalars(select(ClaimModel.run_id).where(ClaimModel.id == claim.id)).one() == run_id
    assert states(engine, keys, now)[0] == ("done", False)
    assert take("b").problem_id == keys.problem_ids[1]
    # the next round takes it again
    later = after(engine)
    again = take("c", since=later)
    assert (again.problem_id, again.attempts) == (keys.problem_ids[0], 1)


def test_a_command_joins_the_round_that_is_going_on(take, keys, engine, now) -> None:
    done = take("a")
    with writing(engine) as s:
        claims.finish(s, done, None)
    take("a")
    with writing(engine) as s:
        joined = claims.round_of(s, keys, claims.database_now(s))
        assert joined == now
        # with other options it is another work
        apart = claims.database_now(s)
        assert claims.round_of(s, replace(keys, plan="another"), apart) == apart
    assert take("b", since=joined).problem_id == keys.problem_ids[2]
    assert take("b", since=joined) is None


def test_a_round_is_not_joined_when_nobody_is_at_it(take, keys, engine) -> None:
    end_lease(engine, take("a"))
    with writing(engine) as s:
        started = claims.database_now(s)
        assert claims.round_of(s, keys, started) == started


def test_a_silent_worker_is_taken_over_and_writes_nothing_more(take, keys, engine) -> None:
    silent = take("silent")
    assert take("b").problem_id == keys.problem_ids[1]
    end_lease(engine, silent)
    heir = take("heir")
    assert (heir.problem_id, heir.attempts) == (silent.problem_id, 2)
    for late in (
        lambda s: claims.check_held(s, silent),
        lambda s: claims.beat(s, silent, LEASE_SECONDS),
        lambda s: claims.finish(s, silent, None),
        lambda s: claims.fail(s, silent, "late"),
    ):
        with (
            pytest.raises(ClaimLostError, match="another worker has taken over what silent held"),
            writing(engine) as s,
        ):
            late(s)
    with writing(engine) as s:
        assert claims.release(s, "silent") == []
        claims.check_held(s, heir)


def test_a_heartbeat_keeps_the_lease(take, keys, engine, now) -> None:
    claim = take("a", lease=0.3)
    for _ in range(3):
        time.sleep(0.2)
        with writing(engine) as s:
            claims.beat(s, claim, 30.0)
    assert states(engine, keys, now)[0] == ("held", False)
    with writing(engine) as s:
        claims.beat(s, claim, 0.001)
    time.sleep(0.01)
    assert states(engine, keys, now)[0] == ("held", True)
    # nobody came: it is still the holder's
    with writing(engine) as s:
        claims.beat(s, claim, 30.0)
    assert take("b").problem_id == keys.problem_ids[1]


def test_what_an_ended_worker_held_is_free_at_once(take, keys, engine) -> None:
    take("a")
    take("a")
    with writing(engine) as s:
        assert claims.release(s, "a") == list(keys.problem_ids[:2])
    assert (take("b").attempts, take("b").problem_id) == (1, keys.problem_ids[1])


def test_a_key_that_kills_its_workers_is_failed(take, keys, engine, now) -> None:
    for number in range(claims.MAX_ATTEMPTS):
        claim = take(f"worker {number}")
        assert (claim.problem_id, claim.attempts) == (keys.problem_ids[0], number + 1)
        with writing(engine) as s:
            claims.release(s, claim.owner, detail="ended with signal SIGKILL")
    assert take("next").problem_id == keys.problem_ids[1]
    with reading(engine) as s:
        first = claims.standing(s, keys, now)[0]
    assert (first.state, first.free, first.detail) == (ClaimState.FAILED, False, "ended with signal SIGKILL")
    # tomorrow it may be tried again
    later = after(engine)
    assert take("tomorrow", since=later).attempts == 1


def test_commands_that_start_together_count_the_same_deaths(take, engine) -> None:
    """The second began before the first held a key: there was no round to join, yet it is one."""
    second = after(engine)
    end_lease(engine, take("first"))
    assert take("second", since=second).attempts == 2
    # what died before a command began is not counted
    end_lease(engine, take("third"))
    assert take("fourth", since=after(engine)).attempts == 1


def test_a_key_is_held_once_whatever_the_plan(take, keys, engine, now) -> None:
    other = replace(keys, plan="another")
    first = take("a")
    assert take("b", of=other).problem_id == keys.problem_ids[1]
    assert states(engine, keys, now)[1] == ("held", False)
    with writing(engine) as s:
        claims.finish(s, first, None)
    # done with one plan is not done with another
    assert take("b", of=other).problem_id == keys.problem_ids[0]
    assert states(engine, keys, now)[0] == ("done", False)


def test_cards_of_another_model_or_build_have_keys_of_their_own(take, keys, engine, make_world, world) -> None:
    other = make_world(gpu=replace(world.gpu, name="NVIDIA H20", sm_count=78))
    take("a")
    assert take("b", of=replace(keys, gpu_id=other.gpu_id)).problem_id == keys.problem_ids[0]


def test_a_holder_without_a_lease_cannot_be_stored(engine, take, keys) -> None:
    claim = take("a")
    with pytest.raises(StoreError, match="ck_claim_held"), writing(engine) as s:
        s.execute(update(ClaimModel).where(ClaimModel.id == claim.id).values(lease_ends_at=None))
