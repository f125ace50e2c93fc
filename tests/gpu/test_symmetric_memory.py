"""``use_symm_mem=True`` trains as ever where torch, NCCL and device have it, or says what lacks."""

from __future__ import annotations

import pytest

from tests.gpu.support import ROUNDING, drive, floats, shard, stack
from tests.training import assert_close, train, train_reference

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("driver", ["eager", "aot_eager"])
def test_it_works_or_says_why_not(driver: str) -> None:
    batches = floats(3)
    try:
        model = shard(stack(), use_symm_mem=True)
    except (ValueError, NotImplementedError) as error:
        assert "use_symm_mem=True" in str(error) and "use_symm_mem=False" in str(error)
        model = shard(stack(), use_symm_mem=False)
    run = train(model, batches, call=drive(model, driver))
    assert_close(run, train_reference(stack(), batches), **ROUNDING)
