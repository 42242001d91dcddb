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
    assert not one.issued(99)


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
    one.claim("a", {6, 0, 10**12})  # done and impossible tickets are not taken up
    assert one.held == {6: "a"} and one.next_ticket == 10
    assert one.start_step() == [9, 4] and one.grant("b", 9)[0].ticket_id == 8
    assert one.start_step() is None  # one at a time
    one.finish_step(3)
    assert one.arrive(6, 3) == "accepted"
    assert one.start_step() == [6, 7] and one.steps_done == 3


def test_a_sampler_may_hold_tickets_that_a_restarted_learner_does_not_remember():
    one = book(max_staleness=1)
    one.restore(0, version=0, planned=[], arrived={}, finished=set())
    one.claim("a", {2})
    assert one.held == {2: "a"} and sorted(one.returned) == [0, 1] and one.next_ticket == 3
    assert one.arrive(2, 0) == "accepted"


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
