"""The ticket book: no prompt twice in an epoch, bounded staleness, nothing lost when a sampler goes."""

import random

from grpo.tickets import TicketBook


def book(**changes) -> TicketBook:
    settings = dict(num_prompts=10, groups_per_step=2, max_staleness=1, seed=0)
    return TicketBook(**settings | changes)


def test_each_epoch_covers_every_prompt_once():
    one = book(groups_per_step=30, max_staleness=0)
    tickets = one.grant("a", 30)
    for epoch in range(3):
        prompts = [ticket.prompt_index for ticket in tickets[10 * epoch : 10 * epoch + 10]]
        assert sorted(prompts) == list(range(10))
    assert [t.prompt_index for t in tickets[:10]] != [t.prompt_index for t in tickets[10:20]]


def test_the_same_seed_gives_the_same_tickets_whoever_asks():
    one, other = book(), book()
    first = one.grant("a", 4)
    second = [other.grant(name, 1)[0] for name in "abab"]
    assert first == second
    assert first != book(seed=1).grant("a", 4)
    assert len({ticket.seed for ticket in first}) == 4


def test_no_more_than_staleness_plus_one_steps_are_out():
    one = book(max_staleness=1)
    assert len(one.grant("a", 100)) == 4
    assert one.grant("b", 1) == []
    for ticket_id in (0, 1):
        one.arrive(ticket_id, version=0)
    assert one.grant("b", 1) == []  # arrived groups count
    assert one.start_step() == [0, 1]
    assert one.grant("b", 1) == []  # and so do those in training
    one.finish_step(version=1)
    granted = one.grant("b", 100)
    assert [ticket.ticket_id for ticket in granted] == [4, 5] and granted[0].version == 1


def test_strictly_on_policy_waits_for_the_new_version():
    one = book(max_staleness=0)
    assert [t.version for t in one.grant("a", 9)] == [0, 0]
    one.arrive(0, 0), one.arrive(1, 0)
    one.start_step()
    assert one.grant("a", 9) == []
    one.finish_step(version=1)
    assert [t.version for t in one.grant("a", 9)] == [1, 1]


def test_a_dead_samplers_tickets_go_to_the_next():
    one = book()
    one.grant("dead", 3)
    assert one.release("dead") == [0, 1, 2]
    assert [ticket.ticket_id for ticket in one.grant("b", 9)] == [0, 1, 2, 3]


def test_a_returning_sampler_keeps_what_it_still_holds():
    one = book()
    one.grant("a", 3)
    assert one.release("a", keep={1}) == [0, 2]
    assert one.held == {1: "a"}


def test_late_and_double_groups_are_recognised():
    one = book()
    one.grant("slow", 1)
    one.release("slow")
    one.grant("quick", 1)
    assert one.arrive(0, 0) == "accepted"
    assert one.arrive(0, 0) == "duplicate"
    one.grant("b", 1)
    one.release("b")
    assert one.arrive(1, 0) == "accepted"  # given up, yet it came before anybody else took it on
    assert [t.ticket_id for t in one.grant("c", 1)] == [2]
    assert not one.acceptable(99)


def test_stale_groups_are_dropped_with_the_reason_and_replaced():
    one = book(max_staleness=0, groups_per_step=1)
    one.grant("a", 1)
    one.steps_done = 1  # the policy moved on while the sampler used version 0
    one.version = 1
    one.arrive(0, version=0)
    assert one.drop_stale() == [0]
    assert one.dropped == {"stale": 1}
    assert [t.ticket_id for t in one.grant("a", 1)] == [1]


def test_oldest_policy_is_trained_first():
    one = book(max_staleness=1)
    one.grant("a", 4)
    one.arrive(0, version=1), one.arrive(3, version=0), one.arrive(1, version=0)
    assert one.start_step() == [1, 3]


def test_the_run_asks_for_no_more_than_max_steps_need():
    one = book(max_staleness=3, max_steps=2)
    assert len(one.grant("a", 100)) == 4


def test_random_histories_finish_each_ticket_exactly_once_within_the_bound():
    for seed in range(30):
        rng = random.Random(seed)
        staleness = rng.choice([0, 1, 2])
        one = book(max_staleness=staleness, groups_per_step=rng.choice([1, 2, 3]), seed=seed)
        holding, trained, dropped = {}, [], []
        for _ in range(400):
            event = rng.random()
            if event < 0.4:
                for ticket in one.grant(rng.choice("abc"), rng.randint(1, 3)):
                    assert ticket.version == one.version
                    holding[ticket.ticket_id] = max(one.version, rng.randint(ticket.version, one.version))
            elif event < 0.8 and holding:
                ticket_id = rng.choice(list(holding))
                one.arrive(ticket_id, holding.pop(ticket_id))
            elif event < 0.85:
                for ticket_id in one.release(rng.choice("abc")):
                    holding.pop(ticket_id, None)
            dropped += one.drop_stale()
            versions = dict(one.arrived)
            step = one.start_step()
            if step:
                assert all(one.steps_done - versions[t] <= staleness for t in step)
                trained += step
                one.finish_step(one.steps_done + 1)
        finished = trained + dropped
        assert len(finished) == len(set(finished))
        open_now = set(one.held) | set(one.arrived) | set(one.returned)
        assert sorted(set(finished) | open_now) == list(range(one.next_ticket))


def test_a_restored_book_trains_the_planned_steps_first_and_asks_again_for_what_is_missing():
    one = book(max_staleness=1)
    # steps 1 and 2 are done (tickets 0 to 3), step 3 was on its way, 7 is here, 5 was dropped, 6 is with a sampler
    one.restore(2, version=3, planned=[[9, 4]], arrived={7: 3}, finished={0, 1, 2, 3, 5})
    assert one.next_ticket == 10 and sorted(one.returned) == [6, 8]
    one.claim("a", {6, 0, 10**12})  # what a sampler says it works on is granted to others last, to itself never
    assert one.held == {} and one.next_ticket == 10
    assert one.start_step() == [9, 4] and [t.ticket_id for t in one.grant("b", 1)] == [8]
    assert [t.ticket_id for t in one.grant("a", 9)] == []
    assert one.start_step() is None  # one at a time
    one.finish_step(3)
    assert one.arrive(6, 3) == "accepted"
    assert one.start_step() == [6, 7] and one.steps_done == 3


def test_a_sampler_may_work_on_tickets_that_a_restarted_learner_does_not_remember():
    one = book(max_staleness=1)
    one.restore(0, version=0, planned=[], arrived={}, finished=set())
    one.claim("a", {2})
    assert one.acceptable(2) and one.open(2) and not one.acceptable(4)
    assert one.arrive(2, 0) == "accepted" and sorted(one.returned) == [0, 1] and one.next_ticket == 3


def test_invented_claims_stop_nobody():
    one = book(max_staleness=1)
    one.claim("liar", set(range(50_000)))
    assert [t.ticket_id for t in one.grant("good", 9)] == [0, 1, 2, 3]


def test_tickets_are_shared_among_those_who_are_there():
    for samplers, expected in ((1, [16]), (4, [4, 4, 4, 4]), (64, [1] * 16 + [0] * 48)):
        one = book(num_prompts=1000, groups_per_step=8, max_staleness=1)
        names = {f"s{i}" for i in range(samplers)}
        assert [len(one.grant(f"s{i}", 1000, asking=names)) for i in range(samplers)] == expected
    one = book(num_prompts=1000, groups_per_step=8, max_staleness=1)
    assert len(one.grant("first", 4, asking={"first"})) == 4
    # others hold what they hold; who comes later gets the same share of the whole, as far as there is something left
    assert [len(one.grant(name, 100, asking={"b", "c"})) for name in "bc"] == [6, 6]


def test_strictly_on_policy_those_who_wait_share_a_step():
    one = book(groups_per_step=8, max_staleness=0, num_prompts=100)
    assert [len(one.grant(name, 100, asking=set("abcd"))) for name in "abcd"] == [2, 2, 2, 2]
    alone = book(groups_per_step=8, max_staleness=0, num_prompts=100)
    assert len(alone.grant("a", 3, asking={"a"})) == 3 and len(alone.grant("a", 100, asking={"a"})) == 5


def test_a_late_ticket_goes_to_another_twice_and_is_then_dropped():
    one = book(patience=100)
    one.grant("a", 1, now=0)
    assert one.deadline() == 50 and one.overdue("b", now=50) == [] and one.overdue("b", now=51) == [0]
    assert one.overdue("a", now=10**6) == []  # not from itself: there may be nobody else
    for holder, asks in (("a", "b"), ("b", "c")):
        assert one.held == {0: holder}
        one.fail(0, "late")
        assert [t.ticket_id for t in one.grant(asks, 1, now=100)] == [0]
    one.fail(0, "late")
    assert one.dropped == {"late": 1} and one.fresh_drops == [(0, "late")] and one.held == {}
    assert one.arrive(0, 0) == "duplicate"  # it came too late for the run, and no error


def test_a_handed_over_ticket_counts_once_whoever_is_first():
    one = book()
    one.grant("hung", 1, now=0)
    one.fail(0, "late")
    one.grant("quick", 1, now=200)
    assert one.arrive(0, 0, now=201) == "accepted" and one.arrive(0, 0, now=202) == "duplicate"


def test_the_deadline_follows_the_pace():
    one = book(num_prompts=1000, groups_per_step=40, patience=300)
    assert one.deadline() == 150  # nothing is known yet
    for seconds, expected in ((2, 30), (20, 60), (60, 150), (200, 300)):
        (ticket,) = one.grant("a", 1, now=0)
        one.arrive(ticket.ticket_id, 0, now=seconds)
        assert one.deadline() == expected, seconds


def test_a_sampler_that_vanishes_counts_half_and_one_that_leaves_not_at_all():
    one = book()
    for _ in range(20):
        one.grant("a", 1)
        one.release("a")
    for _ in range(4):
        one.grant("a", 1)
        one.release("a", reason="silent", weight=0.5)
    assert one.returned == [0] and not one.dropped
    one.grant("a", 1)
    one.release("a", reason="silent", weight=0.5)
    assert one.returned == [] and one.dropped == {"silent": 1}


def test_a_refused_claim_is_granted_again():
    one = book()
    one.restore(0, version=0, planned=[], arrived={1: 0}, finished=set())
    one.claim("a", {0})
    assert one.belongs_to(0, "a") and not one.belongs_to(0, "b")
    one.fail(0, "malformed")
    assert [t.ticket_id for t in one.grant("a", 1)] == [0]


def test_strictly_on_policy_a_lost_ticket_comes_back_with_those_it_was_granted_with():
    one = book(groups_per_step=5, max_staleness=0)
    assert [[t.ticket_id for t in one.grant(name, 2)] for name in "abc"] == [[0, 1], [2, 3], [4]]
    one.arrive(2, 0)
    one.release("b")  # it had sent 2, but not 3
    assert [t.ticket_id for t in one.grant("a", 2)] == [2, 3] and one.held[3] == "a" and 2 not in one.held
    assert one.arrive(2, 0) == "duplicate"
    one.release("c")
    assert [t.ticket_id for t in one.grant("a", 2)] == [4]


def test_strictly_on_policy_a_restored_book_keeps_the_batches():
    one = book(groups_per_step=4, max_staleness=0)
    one.restore(1, version=1, planned=[], arrived={4: 1, 6: 1}, finished={0, 1, 2, 3})
    assert [t.ticket_id for t in one.grant("a", 2)] == [4, 5]
    assert [t.ticket_id for t in one.grant("b", 2)] == [6, 7]
    assert one.grant("c", 2) == []


def test_one_slow_sampler_does_not_stop_the_rest():
    one = book(groups_per_step=4, max_staleness=1, num_prompts=100)
    slow = one.grant("slow", 2)
    for step in range(20):
        while len(one.arrived) < 4:
            for ticket in one.grant("quick", 2):
                one.arrive(ticket.ticket_id, one.version)
        assert not set(one.start_step()) & {ticket.ticket_id for ticket in slow}
        one.finish_step(step + 1)
    assert one.arrive(slow[0].ticket_id, 0) == "accepted" and one.drop_stale() == [0]


def test_claims_of_tickets_that_a_restarted_learner_never_issued_are_respected():
    one = book(max_staleness=1)
    one.restore(0, version=0, planned=[], arrived={}, finished=set())
    one.claim("a", {0, 1, 10**12})
    assert [t.ticket_id for t in one.grant("a", 9)] == [2, 3]  # it works on the others already
    assert one.drop(0, "no gold") and one.next_ticket == 4
    one.fail(1, "malformed")
    assert [t.ticket_id for t in one.grant("a", 9)] == [1, 4]
    for _ in range(5):  # a liar issues no more than can be out
        one.claim("liar", set(range(50_000)))
    assert one.next_ticket == 5
