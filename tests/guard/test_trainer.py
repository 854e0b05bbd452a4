from __future__ import annotations

from mmdet_nanfix.guard import Configured, Host


def test_a_host_that_says_nothing_is_plain():
    host = Host()
    assert host.train_step is host.retries is host.broadcast is None
    assert host.place() == 0 and not host.half
    with host.forward(), host.backward(), host.precision(['heads']):
        pass
    assert host.config == Configured(False, False, None)
    # Each has its own.
    assert Host().config is not host.config
