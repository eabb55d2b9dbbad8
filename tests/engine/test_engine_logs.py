"""What is logged of a failure: where, and of whose request; never what it said."""

from __future__ import annotations

import engine_harness as harness

from penstock.contract.events import RequestFailed
from penstock.engine.choice import Choice

SECRET = "what somebody said"


def test_a_failure_outside_the_model_is_logged_without_its_message(monkeypatch, caplog):
    def push(self, *_):
        raise ValueError(SECRET)

    bench = harness.build()
    one = bench.submit()
    monkeypatch.setattr(Choice, "push", push)
    bench.run()
    assert isinstance(bench.outputs[one][-1], RequestFailed)
    assert SECRET not in caplog.text
    assert one in caplog.text
    assert "ValueError" in caplog.text
    assert "in push" in caplog.text
