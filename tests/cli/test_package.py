import doctest

import sim


def test_all_is_honest():
    for name in sim.__all__:
        assert getattr(sim, name).__name__ == name
    assert set(sim.__all__) <= set(dir(sim))
    assert sorted(sim.__all__) == list(sim.__all__)


def test_the_three_lines_of_the_docstring_run():
    outcome = doctest.testmod(sim)
    assert (outcome.attempted, outcome.failed) == (3, 0)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(sim, "simulat")
