"""Recurrent state in places: which rows read which, what is copied, and how memory is shared."""

from __future__ import annotations

import pytest
import torch

from penstock.contract.errors import ConfigError
from penstock.contract.model import StateSpec
from penstock.contract.plan import Admit, Checkpoint, Row
from penstock.contract.sampling import SamplingSpec
from penstock.exec.state_store import StateStore, share_memory, state_bytes
from penstock.kernels.short_convolution import ConvolutionCall, short_convolution_reference
from penstock.kernels.state_runs import FROM_ZERO, StateRuns

CPU = torch.device("cpu")
SPECS = (StateSpec((2, 3)), StateSpec((4,)))


def store(slots=2, checkpoints=3, spares=0):
    return StateStore(SPECS, slots, checkpoints, CPU, spares)


def admit(slot, computed=0, checkpoint=-1):
    return Admit(slot, "s", (1,) * 40, (0,), computed, SamplingSpec(), 0, checkpoint=checkpoint)


def runs_of(states, *rows):
    found = states.runs(rows)
    return [(end - first, source, target) for first, end, source, target in found.each()]


def test_each_state_has_a_place_for_each_slot_and_each_checkpoint():
    states = store()
    assert [tuple(each.shape) for each in states.states] == [(5, 2, 3), (5, 4)]
    assert {each.dtype for each in states.states} == {torch.float32}
    assert state_bytes(SPECS) == 4 * (6 + 4)


def test_a_sequence_begins_from_zero_or_a_checkpoint_and_goes_on_in_its_own_place():
    states = store()
    states.admit(admit(1))
    states.admit(admit(0, 16, checkpoint=2))
    first = runs_of(states, Row(0, 16, 5, (), False), Row(1, 0, 7, (), False))
    assert first == [(5, 4, 0), (7, FROM_ZERO, 1)]
    assert runs_of(states, Row(0, 21, 1, (), True), Row(1, 7, 1, (), True)) == [(1, 0, 0), (1, 1, 1)]


def test_a_checkpoint_on_the_way_is_written_by_one_run_and_read_by_the_next():
    states = store()
    states.admit(admit(0, 16, checkpoint=0))
    kept = (Checkpoint(32, 1), Checkpoint(40, 2))
    assert runs_of(states, Row(0, 16, 24, (), True, checkpoints=kept)) == [(16, 2, 3), (8, 3, 4), (0, 4, 0)]


def test_the_state_before_each_draft_is_written_to_its_spare_place():
    states = store(spares=4)
    states.admit(admit(1, 16, checkpoint=0))
    drafted = Row(1, 16, 4, (), True, drafts=(7, 8), spares=(3, 0))
    assert runs_of(states, drafted) == [(2, 2, 8), (1, 8, 5), (1, 5, 1)], "spare places are behind the checkpoints"
    assert runs_of(states, Row(1, 19, 1, (), True, resume=0)) == [(1, 5, 1)], "one draft was right"
    assert runs_of(states, Row(1, 20, 1, (), True)) == [(1, 1, 1)]


def test_checkpoints_among_drafts_are_written_in_order_of_position():
    states = store(spares=3)
    row = Row(0, 30, 4, (), True, drafts=(7, 8, 9), spares=(0, 1, 2), checkpoints=(Checkpoint(32, 1),), resume=2)
    assert runs_of(states, row) == [(1, 7, 5), (1, 5, 3), (0, 3, 6), (1, 6, 7), (1, 7, 0)]


def test_a_row_that_computes_nothing_brings_its_state_home():
    """It draws where an earlier row waited, which had drafts: some of them were right."""
    states = store(spares=2)
    for state in states.states:
        state.copy_(torch.arange(state.numel()).reshape(state.shape))
    spare = [state[2 + 3 + 1].clone() for state in states.states]
    states.keep(Row(1, 15, 1, (), True, resume=1, checkpoints=(Checkpoint(16, 2),)))
    for state, wanted in zip(states.states, spare, strict=True):
        assert torch.equal(state[1], wanted)
        assert torch.equal(state[2 + 2], wanted)
    assert runs_of(states, Row(1, 16, 1, (), True)) == [(1, 1, 1)]


def test_a_reset_forgets_where_sequences_would_have_begun():
    states = store()
    states.admit(admit(0, 16, checkpoint=0))
    states.reset()
    states.admit(admit(0))
    assert runs_of(states, Row(0, 0, 2, (), False)) == [(2, FROM_ZERO, 0)]


def test_a_run_without_tokens_copies():
    states, weight = torch.randn(3, 2, 4), torch.randn(3, 4)
    before = states.clone()
    call = ConvolutionCall(torch.randn(0, 4), weight, None, states, StateRuns.of([(0, 1, 2)]))
    out = short_convolution_reference(call)
    assert out.shape == (0, 4)
    assert torch.equal(states, torch.stack([before[0], before[1], before[1]]))


@pytest.mark.parametrize("cuts", [[30], [1] * 30, [1, 2, 0, 7, 20], [29, 1]])
def test_a_convolution_has_the_same_bits_however_it_is_cut(cuts):
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((30, 5), (4, 5), (5,)))
    states, whole = torch.full((2, 3, 5), float("nan")), torch.zeros(1, 3, 5)
    expected = short_convolution_reference(ConvolutionCall(x, weight, bias, whole, StateRuns.of([(30, FROM_ZERO, 0)])))
    runs = [(count, 1 if at else FROM_ZERO, 1) for at, count in enumerate(cuts)]
    call = ConvolutionCall(x, weight, bias, states, StateRuns.of(runs))
    assert torch.equal(short_convolution_reference(call), expected)
    assert torch.equal(states[1], whole[0])
    theirs = torch.nn.functional.conv1d(x.T[None], weight.T[:, None], bias, padding=3, groups=5)[0, :, :30].T
    torch.testing.assert_close(expected, theirs)
    activated = short_convolution_reference(call._replace(silu=True))
    torch.testing.assert_close(activated, torch.nn.functional.silu(theirs))


def test_memory_is_shared_among_sequences_checkpoints_and_kv():
    shared = share_memory(1_000_000, each=1000, position_bytes=100, max_num_seqs=8, interval=512)
    assert shared == (8, 16 + 952_000 // 100 // 512, 40, 952_000 - 1000 * (16 + 18))
    shared = share_memory(1_000_000, 1000, 100, 8, 512, drafts=False)
    assert shared == (8, 16 + 992_000 // 100 // 512, 0, 992_000 - 1000 * (16 + 19))
    assert share_memory(1_000_000, 1000, 100, 8, 0).checkpoints == 16, "ends of sequences alone"
    least = share_memory(100_000, 10_000, 1, 64, 512)
    assert least == (2, 4, 0, 40_000), "a quarter for who runs, a tenth of the rest for drafts, half of what is left"
    assert share_memory(1000, 10_000, 1, 64, 512) == (1, 0, 0, 0)


def test_memory_that_the_system_does_not_give_is_an_error_of_the_options():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        StateStore((StateSpec((2**40,)),), 2**10, 2**10, CPU)


def test_a_state_that_is_read_is_in_its_sequences_place_and_in_a_checkpoint():
    one, two = store(), store()
    for state in one.states:
        state.copy_(torch.arange(state.numel()).reshape(state.shape))
    assert one.checkpoint_bytes == state_bytes(SPECS) == len(one.content(1))
    two.fill_with_nan()
    two.admit(admit(1))
    two.begin_reading(1)
    two.fill(
        Row(1, 0, 32, (), False, stored=(b"a", b"b"), state=b"b", checkpoints=(Checkpoint(32, 2),)),
        memoryview(one.content(1)),
    )
    assert two.content(2) == one.content(1)
    assert torch.equal(two.states[0][1], one.states[0][2 + 1]), "behind the two slots"
    assert set(two.content(0)) != set(one.content(1)), "nothing else is written"
    assert runs_of(two, Row(1, 32, 5, (), True)) == [(5, 1, 1)]


def test_a_sequence_that_is_read_may_go_on_from_what_it_began_with():
    """Its checkpoint is written over meanwhile."""
    states = store()
    for state in states.states:
        state.copy_(torch.arange(state.numel()).reshape(state.shape))
    states.admit(admit(0, 16, checkpoint=2))
    states.admit(admit(1))
    before = states.content(2)
    for slot in (0, 1):
        states.begin_reading(slot)
        states.begin_reading(slot)  # of each row that reads
    states.states[0][4] = states.states[1][4] = -1.0
    assert b"".join(state[0].numpy().tobytes() for state in states.states) == before
    assert runs_of(states, Row(0, 16, 5, (), True), Row(1, 0, 5, (), True)) == [(5, 0, 0), (5, FROM_ZERO, 1)]
