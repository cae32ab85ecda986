"""Routers, by literals."""

from __future__ import annotations

import numpy as np
import pytest

from policies.routers import LeastKv, LeastOutstanding, Load, PowerOfTwo, Random, RoundRobin, RoutedRequest

BUSY, CALM, IDLE = Load(waiting=5, running=3), Load(running=2), Load()


def test_round_robin_takes_turns_by_the_number_of_the_request_among_those_for_its_model() -> None:
    loads = (BUSY, CALM, IDLE)
    assert [RoundRobin().route(RoutedRequest(2 * i, turn=i), loads) for i in range(5)] == [0, 1, 2, 0, 1]


def test_least_outstanding_counts_waiting_and_running_and_prefers_the_first_of_equals() -> None:
    assert LeastOutstanding().route(RoutedRequest(0), (BUSY, CALM, IDLE)) == 2
    assert LeastOutstanding().route(RoutedRequest(0), (BUSY, CALM, CALM)) == 1
    assert LeastOutstanding().route(RoutedRequest(0), (Load(waiting=2), Load(running=1), Load(running=1))) == 1


@pytest.mark.parametrize(("luck", "expected"), [(0.0, 0), (0.34, 1), (0.99, 2)])
def test_random_takes_its_request_s_own_luck(luck: float, expected: int) -> None:
    assert Random().route(RoutedRequest(0, luck=(luck, 0.0)), (BUSY, CALM, IDLE)) == expected


def test_power_of_two_takes_the_less_loaded_of_two_different_replicas() -> None:
    loads = (BUSY, CALM, IDLE)
    assert PowerOfTwo().route(RoutedRequest(0, luck=(0.0, 0.0)), loads) == 1  # BUSY against CALM
    assert PowerOfTwo().route(RoutedRequest(0, luck=(0.5, 0.0)), loads) == 1  # CALM against BUSY
    assert PowerOfTwo().route(RoutedRequest(0, luck=(0.5, 0.9)), loads) == 2  # CALM against IDLE
    assert PowerOfTwo().route(RoutedRequest(0, luck=(0.9, 0.9)), (IDLE,)) == 0


def test_power_of_two_draws_every_pair_alike() -> None:
    # Of three equal replicas each is drawn first a third of the time, and equals stay with the first drawn.
    luck = np.random.default_rng(0).random((3000, 2)).tolist()
    chosen = [PowerOfTwo().route(RoutedRequest(0, luck=tuple(pair)), (IDLE, IDLE, IDLE)) for pair in luck]
    # 5 standard deviations of a binomial count.
    assert np.abs(np.bincount(chosen, minlength=3) - 1000).max() < 5 * np.sqrt(3000 * 2 / 9)


def test_least_kv_looks_at_memory_first() -> None:
    loads = (Load(waiting=9, kv_blocks_used=10), Load(kv_blocks_used=20), Load(waiting=1, kv_blocks_used=10))
    assert LeastKv().route(RoutedRequest(0), loads) == 2
