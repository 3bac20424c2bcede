from saf.records.quantities import highest_first


def test_a_zero_stands_between_its_neighbours_and_what_has_no_number_last():
    assert sorted([0.0, None, -0.5, 0.7], key=highest_first) == [0.7, 0.0, -0.5, None]
