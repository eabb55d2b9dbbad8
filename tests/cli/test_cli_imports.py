"""Long imports: nothing is collected meanwhile, and what they made is left alone afterwards."""

from __future__ import annotations

import gc

import pytest

from penstock.cli.imports import lasting_imports


def test_nothing_is_collected_inside_and_what_was_made_is_never_looked_through():
    made = []
    try:
        with lasting_imports():
            assert not gc.isenabled()
            made.append([made])
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_as_it_was():
    with pytest.raises(ImportError), lasting_imports():
        import penstock.no_such_module  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
