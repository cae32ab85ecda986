"""The clock's queue, which alarms and events of SimPy's own are in together."""

from sim.engine.time.events import ARRIVALS, CONTROL, MACHINES, Alarm, Clock


def test_alarms_and_simpys_own_events_happen_in_the_order_of_their_instants():
    clock, seen = Clock(), []
    alarm = Alarm(clock, MACHINES, lambda _: seen.append(("alarm", clock.now_ns)))
    alarm.set(7)
    for at_ns in (5, 9):
        clock.timeout(at_ns).callbacks.append(lambda _: seen.append(("event", clock.now_ns)))
    clock.run()
    assert seen == [("event", 5), ("alarm", 7), ("event", 9)]


def test_an_alarm_rings_once_for_the_instant_that_it_was_last_set_to():
    clock, seen = Clock(), []
    alarm = Alarm(clock, MACHINES, lambda _: seen.append(clock.now_ns))
    for at_ns in (3, 8, 5):
        alarm.set(at_ns)
    clock.run()
    assert seen == [5]
    alarm.set(12)
    alarm.cancel()
    clock.run()
    assert seen == [5]


def test_what_is_expected_counts_neither_cancelled_alarms_nor_lower_ranks():
    clock = Clock()
    assert not clock.expects(CONTROL)
    alarm = Alarm(clock, MACHINES, lambda _: None)
    alarm.set(3)
    assert clock.expects(ARRIVALS)
    assert not clock.expects(MACHINES)
    alarm.cancel()
    assert not clock.expects(CONTROL)
    clock.timeout(5)  # SimPy's own, of rank 1
    assert clock.expects(0)
