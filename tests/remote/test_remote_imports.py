"""Long imports: no garbage is collected meanwhile, and the collector skips what they made afterwards."""

from __future__ import annotations

import gc

import pytest

from penstock.imports import lasting_imports


def test_nothing_is_collected_inside_and_what_was_made_is_never_looked_through():
    made, before = [], gc.get_freeze_count()
    gc.collect()  # garbage would be kept as well
    with lasting_imports():
        assert not gc.isenabled()
        made.append([made])
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(each is made for each in gc.get_objects())


def test_a_failed_import_leaves_the_collector_as_it_was(monkeypatch):
    kept = []
    monkeypatch.setattr(gc, "freeze", lambda: kept.append(True))
    with pytest.raises(ImportError), lasting_imports():
        import penstock.no_such_module  # noqa: F401
    assert gc.isenabled()
    assert not kept
