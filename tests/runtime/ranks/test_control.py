"""Ranks agree by a store on rank 0, and say so where that is gone."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from harness.errors import PeerError
from harness.runtime.ranks.control import Control


def test_a_rank_whose_store_is_gone_names_rank_0_in_one_line():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))
    control = Control(store, 1, 2)
    control.report_failure("run", "(b) it broke")
    assert control.read_failure("run") == "1 (b) it broke"
    del server
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 1 lost rank 0, which has ended") as error:
            control.read_failure("run")
        assert "\n" not in str(error.value)
