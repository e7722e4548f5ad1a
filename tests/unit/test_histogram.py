from hypothesis import given, settings
from hypothesis import strategies as st

from everystop.histogram import Histogram

BOUNDS = (0.1, 1.0, 2.5)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(0, 4) | st.sampled_from(BOUNDS), st.integers(1, 5))))
def test_it_counts_as_one_that_keeps_everything(observations: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    values: list[float] = []
    for value, num_times in observations:
        histogram.observe(value, num_times)
        values += [value] * num_times
    expected = [(str(bound), sum(value <= bound for value in values)) for bound in BOUNDS]
    assert histogram.cumulative() == [*expected, ("+Inf", len(values))]
    assert histogram.num_observations == len(values)
    assert abs(histogram.total - sum(values)) < 1e-6
