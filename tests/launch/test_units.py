from __future__ import annotations

from lightning_bnn.launch.units import plan_units, unit_seed


def test_every_member_is_in_one_unit_and_the_last_may_be_smaller() -> None:
    units = plan_units(20, stack=6)
    assert [len(unit.members) for unit in units] == [6, 6, 6, 2]
    assert [number for unit in units for number in unit.members] == list(range(20))
    assert [unit.name for unit in units] == ["00000", "00006", "00012", "00018"]


def test_seeds_are_of_the_member_alone() -> None:
    seeds = {unit_seed(root, [member]) for root in range(20) for member in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert unit_seed(3, [7]) == unit_seed(3, [7, 8, 9])
