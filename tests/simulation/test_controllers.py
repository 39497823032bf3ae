"""Controllers: they end seeds as if these had run alone, choose the cohorts of their rules, and survive a stop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.simulation.control import ClientLosses, Decision, Observed, with_chosen
from personax.simulation.controllers import EarlyStopping, Oort, PowerOfChoice, RunBudget, Target, Together
from personax.simulation.oort import Explored, scores_of
from personax.values import CONTROLLERS, to_dict

KEY = jax.random.key(4)
KEYS = jax.random.split(KEY, 3)
FED = px.datasets.synthetic(1.0, 1.0, num_clients=12, num_features=6, num_samples=30, key=KEY)
TRAINING, VALIDATION = px.split_validation(FED, 0.25, key=KEY)
TASK = px.classification(px.logistic_regression(10))
FEDAVG = px.fedavg(lr=0.1, num_steps=3, batch_size=8)
DELAYS = px.delays.Delays(px.delays.Exponential(1.0), px.delays.Gamma(2.0))


def rounds(key, num=12, size=3):
    return px.rounds(12, num, size, key=key, delays=DELAYS)


def control(controller, algorithm=FEDAVG, key=KEYS, every=2):
    return px.controlled(
        controller, algorithm, TASK, VALIDATION, metric="loss", training=TRAINING, every=every, key=key
    )


def run(controller, key=KEYS, algorithm=FEDAVG, schedules=None, every=3, start=None, **options):
    """Run with a controller, and keep all snapshots."""
    schedules = schedules or ([rounds(one) for one in key] if key.ndim else rounds(key))
    monitor = px.Monitor(lambda snapshot: snapshot, every, control=control(controller, algorithm, key))
    return px.simulate(algorithm, TASK, TRAINING, schedules, key=key, monitor=monitor, start=start, **options)


def assert_same(one, other, seed=None):
    pick = lambda leaf: leaf if seed is None else leaf[seed]
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(pick(a)), np.asarray(b))


def seen(**given):
    facts = {
        "event": 6,
        "round": 2,
        "time": 5.0,
        "bytes": 100.0,
        "score": 0.5,
        "higher_is_better": True,
        "samples": np.ones(8, int),
        "cohort_size": 3,
        "members": np.arange(3),
        "durations": np.ones(3),
        "stopped": np.zeros(0, int),
        "losses": lambda at: ClientLosses(np.asarray(at, float), np.asarray(at, float)),
        "waits": lambda at: np.zeros(len(at)),
        "expected": lambda at: np.ones(len(at)),
        "rng": np.random.default_rng(0),
    }
    return Observed(**{**facts, **given})


# ends


def test_each_seed_ends_as_if_it_had_run_alone():
    together = run(EarlyStopping(patience=1, least_gain=0.05))
    ended = [one.wave for one in together.snapshot.control]
    assert all(one.ended.startswith("the validation score") for one in together.snapshot.control)
    assert len(set(ended)) > 1 and max(ended) < 12
    assert together.snapshot.num_events.tolist() == [3 * wave for wave in ended]
    for seed, wave in enumerate(ended):
        alone = run(EarlyStopping(patience=1, least_gain=0.05), KEYS[seed])
        assert_same(together.params, alone.params, seed)
        assert together.snapshot.time[seed] == alone.snapshot.time
        assert together.bytes_down[seed].sum() == alone.bytes_down.sum() > 0
        short = px.simulate(FEDAVG, TASK, TRAINING, rounds(KEYS[seed], wave), key=KEYS[seed])
        assert_same(alone.params, short.params)
    assert [history.num_events.max() for history in together.history][-1] == 3 * max(ended)


def test_early_stopping_waits_for_its_patience():
    state, rule, ends = EarlyStopping(patience=2).begin(), EarlyStopping(patience=2), []
    for score in (0.1, 0.3, 0.3, 0.4, 0.2, 0.4):
        decision = rule.decide(state, seen(score=score))
        state, ends = decision.state, [*ends, bool(decision.end)]
    assert ends == [False, False, False, False, False, True] and state == {"best": 0.4, "waited": 2}
    falls = rule.decide({"best": -0.5, "waited": 1}, seen(score=0.4, higher_is_better=False))
    assert falls.state == {"best": -0.4, "waited": 0}
    small = EarlyStopping(patience=1, least_gain=0.2).decide({"best": 0.3, "waited": 0}, seen(score=0.45))
    assert small.end


def test_targets_and_budgets_end_at_the_first_decision_that_meets_them():
    assert Target(0.5).decide({}, seen()).end and not Target(0.6).decide({}, seen()).end
    assert Target(0.6).decide({}, seen(higher_is_better=False)).end
    assert RunBudget(time=5.0).decide({}, seen()).end == "the budget of 5 virtual time is spent"
    assert not RunBudget(time=5.1, bytes=101.0).decide({}, seen()).end
    assert RunBudget(time=6.0, bytes=100.0).decide({}, seen()).end == "the budget of 100 bytes is spent"
    result = run(RunBudget(time=20.0), KEYS[0])
    times = rounds(KEYS[0]).time.reshape(12, 3).max(axis=1)
    spent = np.r_[0.0, times][::2]  # decisions are made every second round
    assert result.snapshot.time == spent[np.argmax(spent >= 20.0)] and result.snapshot.time < times[-1]


def test_an_asynchronous_run_ends_by_its_budget():
    algorithm = px.fedasync(lr=0.1, num_steps=2, batch_size=8)
    schedules = [px.arrivals(12, 60, delays=DELAYS, key=key) for key in KEYS]
    result = run(RunBudget(bytes=20_000.0), algorithm=algorithm, schedules=schedules, every=10)
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(result.params)) // 3
    moved = (result.bytes_up + result.bytes_down).sum(axis=1)
    assert (
        np.all(moved >= 20_000) and np.all(moved < 20_000 + 2 * size * 30) and np.all(result.snapshot.num_events < 60)
    )
    for seed, num in enumerate(result.snapshot.num_events):
        schedule = px.arrivals(12, int(num), delays=DELAYS, key=KEYS[seed])
        short = px.simulate(algorithm, TASK, TRAINING, schedule, key=KEYS[seed])
        for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(short.params), strict=True):
            np.testing.assert_allclose(a[seed], b, rtol=1e-9, atol=1e-12)


# selection


def test_power_of_choice_takes_the_highest_losses_of_its_candidates():
    result = run(PowerOfChoice(num_candidates=12), KEYS[0], every=2)
    for before, after in zip(result.history[:-1], result.history[1:], strict=True):
        losses = []
        for client in range(12):
            part = slice(TRAINING.offsets[client], TRAINING.offsets[client + 1])
            x, y = jnp.asarray(TRAINING.x[part], float), jnp.asarray(TRAINING.y[part])
            batch = px.Batch(x, y, jnp.ones(len(y)), KEY)
            losses.append(float(TASK.loss(before.params, batch)))
        highest = set(np.argsort(losses)[-3:].tolist())
        assert set(after.cohort.tolist()) == highest
    fewer = PowerOfChoice(num_candidates=5).decide({}, seen(samples=np.array([0, 0, 0, 1, 1, 1, 1, 1])))
    assert fewer.cohort.tolist() == [7, 6, 5]
    offline = lambda at: np.where(np.asarray(at) < 5, 0.0, 60.0 - np.asarray(at))
    assert PowerOfChoice(8).decide({}, seen(waits=offline)).cohort.tolist() == [4, 3, 2]  # 5, 6, 7 are offline
    few = PowerOfChoice(8).decide({}, seen(waits=offline, cohort_size=6))
    assert sorted(few.cohort.tolist()) == [0, 1, 2, 3, 4, 7]  # the sixth is the next one to come online


def test_losses_are_those_of_each_sample():
    found = control(Oort()).losses(run(RunBudget(time=1e9), KEYS).history[1], 1, np.array([7, 2, 7]))
    params = jax.tree.map(lambda leaf: leaf[1], run(RunBudget(time=1e9), KEYS).history[1].params)
    for mean, rms, client in zip(*found, (7, 2, 7), strict=True):
        rows = range(TRAINING.offsets[client], TRAINING.offsets[client + 1])
        each = [
            TASK.loss(params, px.Batch(TRAINING.x[None, r].astype(float), TRAINING.y[None, r], jnp.ones(1), KEY))
            for r in rows
        ]
        np.testing.assert_allclose([mean, rms], [np.mean(each), np.sqrt(np.mean(np.square(each)))], rtol=1e-6)


def explored(utility, round, duration, num=4):
    return {"client": list(range(num)), "utility": utility, "round": round, "duration": duration}


NEWCOMERS = {"members": np.zeros(0, int), "durations": np.zeros(0)}  # no round has been played


def test_the_scores_of_oort_are_those_of_its_formula():
    utility, last, duration = [1.0, 4.0, 7.0, 20.0], [1.0, 2.0, 5.0, 9.0], [3.0, 8.0, 4.0, 16.0]
    of = Explored(np.arange(4), *map(np.asarray, (utility, last, duration)))
    found = scores_of(of, round=10, preferred=4.0, clip=0.5, penalty=2.0)
    clipped = [1.0, 4.0, 7.0, 7.0]  # the third of four is the median's upper neighbor
    expected = [
        ((u - 1) / 19 + math.sqrt(0.1 * math.log(10) / at)) * (4 / t if t > 4 else 1) ** 2
        for u, at, t in zip(clipped, last, duration, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_oort_takes_the_losses_of_the_downloaded_model_and_the_times_of_visits():
    rule, samples = Oort(), np.arange(1, 9)
    first = rule.decide(rule.begin(), seen(round=0, **NEWCOMERS, samples=samples, cohort_size=4))
    assert len(set(first.cohort.tolist())) == 4 and first.state["client"] == []
    reported, stopped = first.cohort[:3], first.cohort[3:]
    at = seen(
        round=1, members=reported, stopped=stopped, durations=np.array([2.0, 3.0, 4.0]), samples=samples,
        cohort_size=4, losses=lambda at: ClientLosses(-np.ones(len(at)), -np.ones(len(at))),
        expected=lambda at: np.full(len(at), 9.0),
    )  # fmt: skip
    state = rule.decide(first.state, at).state
    assert state["client"] == first.cohort.tolist() and state["round"] == [1] * 4
    utility = [float(samples[one] * one) for one in reported.tolist()]  # the losses of `seen` are the positions
    np.testing.assert_allclose(state["utility"], [*utility, np.mean(utility)])
    assert state["duration"] == [2.0, 3.0, 4.0, 9.0]


def test_oort_explores_by_speed_until_all_clients_are_explored():
    fast = lambda at: np.where(np.asarray(at) == 6, 1.0, 1e6)
    for seed in range(5):
        at = seen(round=0, **NEWCOMERS, cohort_size=1, expected=fast, rng=np.random.default_rng(seed))
        assert Oort().decide(Oort().begin(), at).cohort.tolist() == [6]
    state, chosen = Oort(decay=1.0).begin(), np.zeros(0, int)
    for number in range(6):
        at = seen(
            round=number, members=chosen, durations=np.ones(len(chosen)), cohort_size=3,
            rng=np.random.default_rng(number),
        )  # fmt: skip
        decision = Oort(decay=1.0).decide(state, at)
        state, chosen = decision.state, decision.cohort
        assert len(set(chosen.tolist())) == 3
    assert sorted(state["client"]) == list(range(8))
    assert state["explore"] == 0.0 and state["exploited"] == chosen.tolist()


def test_oort_exploits_high_scores_among_clients_online():
    state = Oort().begin() | explored([9.0, 9.0, 1.0, 8.9], [5] * 4, [1.0, 50.0, 1.0, 1.0]) | {"explore": 0.0}
    greedy, slow = Oort(least_explore=0.0, preferred=0.3), lambda at: np.full(len(at), 60.0)
    pick = lambda **more: {
        int(greedy.decide(state, seen(**NEWCOMERS, cohort_size=1, expected=slow, round=6, **more)).cohort[0])
        for more["rng"] in map(np.random.default_rng, range(12))
    }
    assert pick() == {0, 3}  # client 1 is slow, client 2 below the cutoff
    assert pick(waits=lambda at: 10.0 * (np.asarray(at) == 0)) == {3}


def test_the_pacer_of_oort_follows_the_utility():
    rule, chosen = Oort(pace=2, preferred=0.5, pace_gain=0.1), np.array([0])
    known = {"asked": [0], "exploited": [0], "preferred": 0.5}
    for losses, expected in (([1.0, 1.0, 1.0, 1.05], 0.6), ([1.0, 1.0, 9.0, 9.0], 0.4), ([1.0, 1.0, 2.0, 1.0], 0.5)):
        state = rule.begin() | known
        for loss in losses:
            decision = rule.decide(state | {"losses": [loss]} | known | {"preferred": state["preferred"]}, seen(
                members=chosen, durations=np.ones(1), cohort_size=1))  # fmt: skip
            state = decision.state
        assert state["preferred"] == pytest.approx(expected)


def test_a_run_of_oort_is_deterministic_and_its_cohorts_are_in_the_schedule():
    one, other = (run(Oort(), KEYS[0]) for _ in range(2))
    assert_same(one.params, other.params)
    assert one.snapshot.control == other.snapshot.control
    cohorts = one.snapshot.schedules[0].client.reshape(12, 3)
    for (first, members), (end, _) in zip(
        one.snapshot.control[0].chosen, one.snapshot.control[0].chosen[1:], strict=False
    ):
        assert np.all(np.sort(cohorts[first:end]) == np.sort(members))
    assert one.snapshot.schedules[0].client.tolist() != rounds(KEYS[0]).client.tolist()


def test_candidates_that_do_not_train_count_as_downloads():
    result = run(PowerOfChoice(num_candidates=7), KEYS[0], every=2)
    size = result.bytes_up.max()  # one model
    decisions = result.bytes_down.reshape(6, 2, 3)  # each before two rounds of three
    assert np.all(decisions[:, 0, 0] == (1 + 4) * size) and np.all(decisions[:, 0, 1:] == size)
    assert np.all(decisions[:, 1] == size)
    spent = run(RunBudget(bytes=result.bytes_down[:6].sum() + 6 * size), KEYS[0])
    assert spent.snapshot.num_events == 12  # without candidates, the budget lasts longer
    both = run(Together((PowerOfChoice(7), RunBudget(bytes=result.bytes_down[:6].sum() + 6 * size))), KEYS[0])
    assert both.snapshot.num_events == 6 and both.bytes_down.sum() == result.bytes_down[:6].sum() + 4 * size


def test_oort_asks_only_clients_that_train():
    result = run(Oort(), KEYS[0])
    assert len(set(result.bytes_down.tolist())) == 1


def test_chosen_clients_are_online():
    devices = px.traces.generate(40, unavailability=0.6, mean_speed=0.05, key=KEY)
    delays = devices.delays(px.work_of(FEDAVG, TASK, TRAINING), key=KEY)
    for controller in (PowerOfChoice(6), Oort()):
        schedule = px.rounds(12, 20, 2, key=KEY, delays=delays)
        schedule = run(controller, KEYS[0], schedules=schedule, every=1).snapshot.schedules[0]
        begins = np.r_[0.0, schedule.time.reshape(20, 2).max(axis=1)[:-1]]
        for requested, begin in zip(schedule.requested.reshape(20, 2)[::2], begins[::2], strict=True):  # the decisions
            online = np.sum(delays.online.online_from(delays.device, np.full(12, begin)) == begin)
            assert np.sum(requested == begin) == min(online, 2)


def test_a_decision_costs_as_much_after_many_rounds_as_after_few():
    class Counted:
        """Delays that count how many rounds are computed."""

        def __init__(self, num):
            self.plan, self.num = DELAYS.plan_rounds(12, num, 3, KEY), 0

        def plan_rounds(self, *given):
            return self.plan._replace(times=self.times)

        def times(self, *given):
            self.num += 1
            return self.plan.times(*given)

    counted = Counted(40)
    schedule = px.rounds(12, 40, 3, key=KEY, delays=counted)
    result = run(PowerOfChoice(6), KEYS[0], schedules=schedule, every=40)
    assert counted.num == 40 + 40  # each round once for the schedule, and once for the decision before it
    again = with_chosen(schedule, result.snapshot.control[0])
    final = result.snapshot.schedules[0]
    assert again.begins_with(final) and final.begins_with(again)


# stops and variants


@pytest.mark.parametrize(
    "controller",
    [EarlyStopping(patience=1, least_gain=0.05), Oort(explore=0.5), Together((PowerOfChoice(6), RunBudget(time=25.0)))],
    ids=lambda one: type(one).__name__,
)
def test_a_controlled_run_continues_from_any_snapshot(controller):
    whole = run(controller)
    for middle in whole.history[:3]:
        rest = run(controller, start=middle)
        assert_same(whole.params, rest.params)
        assert rest.snapshot.control == whole.snapshot.control
        assert rest.snapshot.num_events.tolist() == whole.snapshot.num_events.tolist()


def test_a_streamed_controlled_run_is_the_same():
    algorithm = px.apfl(lr=0.1, num_steps=2, batch_size=8)
    for controller in (PowerOfChoice(8), EarlyStopping(patience=1, least_gain=0.05)):
        plain = run(controller, algorithm=algorithm)
        streamed = run(controller, algorithm=algorithm, execution=px.Execution(stream=px.Stream()))
        assert plain.snapshot.control == streamed.snapshot.control
        for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(streamed.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
        for a, b in zip(jax.tree.leaves(plain.personal), jax.tree.leaves(streamed.personal), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_controllers_are_values_of_an_axis():
    made = CONTROLLERS.make(
        {
            "kind": "Together",
            "controllers": [{"kind": "EarlyStopping", "patience": 3}, {"kind": "RunBudget", "time": 5.0}],
        },
        "controller",
    )
    assert made == Together((EarlyStopping(3), RunBudget(time=5.0))) and hash(made)
    assert CONTROLLERS.make(to_dict(made), "controller") == made
    assert made.needs_score and not made.selects and not made.needs_losses


def test_one_of_several_ends_and_the_last_selects():
    both = Together((PowerOfChoice(8), Oort(), Target(0.4)))
    decision = both.decide(both.begin(), seen(round=0, **NEWCOMERS))
    assert decision.end == "the validation score has reached 0.4" and len(decision.cohort) == 3
    assert isinstance(decision, Decision) and len(decision.state["states"]) == 3


# errors


@pytest.mark.parametrize(
    "make, match",
    [
        (
            lambda: px.controlled(EarlyStopping(), FEDAVG, TASK, FED, key=KEY),
            "may use only validation data, got Federation",
        ),
        (lambda: px.controlled(Target(0.5), FEDAVG, TASK, key=KEY), "may use only validation data, got none"),
        (lambda: px.controlled(Oort(), FEDAVG, TASK, key=KEY), "training losses. Give the federation"),
        (lambda: px.Control(EarlyStopping()), "needs a `score`"),
        (lambda: px.Control(Oort()), "needs a `losses`"),
        (lambda: RunBudget(), "needs `time` or `bytes`"),
        (lambda: Together(()), "at least one controller"),
        (lambda: run(PowerOfChoice(2)), "must be between the cohort size, 3, and the number of clients, 12, got 2"),
        (lambda: run(Together((PowerOfChoice(13), Oort()))), "number of clients, 12, got 13"),
        (
            lambda: px.simulate(
                FEDAVG, TASK, TRAINING, rounds(KEY), key=KEY, start=run(PowerOfChoice(6), KEY).history[1]
            ),
            "Continue it with the same controller",
        ),
        (lambda: Oort(explore=1.5), r"`explore` must lie in \[0, 1\]"),
        (
            lambda: run(
                Oort(),
                KEYS[0],
                px.fedasync(lr=0.1, num_steps=1),
                px.arrivals(12, 9, delays=DELAYS, key=KEY),
            ),
            "a schedule of arrivals has none",
        ),
    ],
)
def test_errors_name_the_remedy(make, match):
    with pytest.raises(ValueError, match=match):
        make()
