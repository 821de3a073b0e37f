"""A few seconds of the C++ fuzzer of planners and plans, with a fixed seed."""

import pytest
from fuzz import plans


@pytest.mark.parametrize("part", plans.PARTS)
def test_some_cases(part, tmp_path):
    if plans.find_binary() is None:
        pytest.skip("no fuzz_plan: an installed package without the C++ tests")
    print(plans.run(part, seed=15, cases=2000, seconds=None, folder=tmp_path))
