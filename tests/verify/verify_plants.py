"""Bugs that `penstock verify` must find, and the program that runs it with one of them planted.

    python tests/verify/verify_plants.py BUG FIRST_SEED COUNT -- [arguments of penstock verify]

Each bug wraps one function of the package, in this process alone, and shows only in company: a request that runs alone
gets its right answer. A function that is not where a bug expects it is an AssertionError, so that a bug cannot be lost
when code moves. The program prints a JSON object a seed: the exit code, how often the bug took effect, and the lines of
the report that name what was found.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

Wrap = Callable[[Callable[..., Any], Callable[[], None]], Callable[..., Any]]
"""Makes the faulty function of the right one; it calls its second argument whenever the bug takes effect."""


@dataclass(frozen=True)
class Bug:
    """A bug to plant.

    Attributes:
        does: what goes wrong, in a sentence.
        place: the function that is wrapped, as `module:name` or `module:Class.name`.
        wrap: makes the faulty one.
        windowed: whether it can show only in a model whose layers all have windows.
        stateful: whether it can show only in a model that carries recurrent state.
    """

    does: str
    place: str
    wrap: Wrap
    windowed: bool = False
    stateful: bool = False


def place_of(bug: Bug) -> tuple[Any, str]:
    """The module or class that has the function, and the function's name in it.

    Raises:
        AssertionError: there is no such function.
    """
    module_name, _, path = bug.place.partition(":")
    owner_path, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        owner = attrgetter(owner_path)(module) if owner_path else module
        inspect.getattr_static(owner, name)
    except (AttributeError, ModuleNotFoundError) as error:
        raise AssertionError(f"{bug.place} is not there any more: plant the bug elsewhere") from error
    return owner, name


def plant(bug: Bug) -> Callable[[], int]:
    """Plant a bug wherever its function is bound; returns a function that counts how often the bug took effect.

    Raises:
        AssertionError: there is no such function.
    """
    owner, name = place_of(bug)
    original = inspect.getattr_static(owner, name)
    effects = 0

    def take_effect() -> None:
        nonlocal effects
        effects += 1

    faulty = functools.wraps(original)(bug.wrap(original, take_effect))
    setattr(owner, name, faulty)
    for other in [each for key, each in sys.modules.items() if key.startswith("penstock.")]:
        for alias, value in list(vars(other).items()):
            if value is original:  # imported by name
                setattr(other, alias, faulty)
    return lambda: effects


def _shift_the_table_after_a_hit(admit: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, given: Any) -> None:
        if given.computed:
            cached = given.computed * len(given.blocks) // (len(given.blocks) * self._block_size)
            given = replace(given, blocks=(*given.blocks[:cached], given.blocks[cached - 1], *given.blocks[cached:-1]))
            took_effect()
        admit(self, given)

    return faulty


def _read_one_too_far(batch: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, rows: Any, device: Any) -> Any:
        found = batch(self, rows, device)
        if len(rows) <= 4:
            return found
        took_effect()
        reach = found.block_table.shape[1] * self._block_size
        return replace(found, kv_len=(found.kv_len + 1).clamp(max=reach))

    return faulty


def _rotate_chunks_one_off(batch: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, rows: Any, device: Any) -> Any:
        found = batch(self, rows, device)
        positions, bounds = found.positions.clone(), found.q_start.tolist()
        for row, first, end in zip(rows, bounds, bounds[1:], strict=False):
            if row.start and row.count > 1:
                took_effect()
                positions[first:end] -= 1
        return replace(found, positions=positions)

    return faulty


def _add_the_row_to_the_number(choose: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(cpu: Any, logits: Any, metadata: Any, uniform: Any = None) -> Any:
        import torch

        if uniform is not None and len(uniform) > 1:
            took_effect()
            uniform = (uniform + 0.137 * torch.arange(len(uniform), dtype=uniform.dtype)) % 1.0
        return choose(cpu, logits, metadata, uniform)

    return faulty


def _keep_the_batch_s_parameters(choose: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    kept: dict[int, Any] = {}

    def faulty(cpu: Any, logits: Any, metadata: Any, uniform: Any = None) -> Any:
        stale = kept.get(len(logits))
        if len(kept) > 8:
            kept.clear()
        kept[len(logits)] = metadata
        if len(logits) < 2 or stale is None or stale is metadata or stale.random != metadata.random:
            return choose(cpu, logits, metadata, uniform)
        took_effect()
        return choose(cpu, logits, stale, uniform)

    return faulty


def _share_a_mask(matcher: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    """Masks share one buffer, and a matcher's mask is written anew only if that matcher was also the last to use it."""
    last_of: dict[str, Any] = {"matcher": None}

    class Stale:
        def __init__(self, right: Any) -> None:
            self._right, self._mask = right, b""
            self.take, self.take_at_once, self.closing = right.take, right.take_at_once, right.closing

        def mask(self) -> bytes:
            fresh: bytes = self._right.mask()
            other, last_of["matcher"] = last_of["matcher"], self
            if self._mask and other is not self and fresh != self._mask:
                took_effect()
                return self._mask
            self._mask = fresh
            return fresh

    return lambda *given: Stale(matcher(*given))


def _keep_the_last_owner_s_prompt(admit: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    """Penalties on the output, and the prompt's scores, take the prompt to end where the slot's last owner's did."""
    last: dict[tuple[int, int], int] = {}

    def faulty(self: Any, given: Any) -> None:
        place = id(self), given.slot
        kept = last.get(place, given.prompt_tokens)
        last[place] = given.prompt_tokens
        if kept < given.prompt_tokens:
            took_effect()
            given = replace(given, prompt_tokens=kept)
        admit(self, given)

    return faulty


def _take_recomputed_output_for_prompt(
    admit: Callable[..., Any], took_effect: Callable[[], None]
) -> Callable[..., Any]:
    def faulty(self: Any, given: Any) -> None:
        if len(given.tokens) > given.prompt_tokens:
            took_effect()
            given = replace(given, prompt_tokens=len(given.tokens))
        admit(self, given)

    return faulty


def _name_a_block_by_its_own_tokens(key: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(parent: bytes, tokens: Any) -> Any:
        took_effect()
        return key(b"", tokens)

    return faulty


def _leave_a_block_too_many(left_behind: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, computed: int) -> int:
        right: int = left_behind(self, computed)
        early: int = left_behind(self, computed + self.block_size)
        if early > right:
            took_effect()
        return early

    return faulty


def _restore_another_checkpoint(admit: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, given: Any) -> None:
        places = len(self.states[0]) - self._num_slots
        if given.computed and places > 1:
            took_effect()
            given = replace(given, checkpoint=(given.checkpoint + 1) % places)
        admit(self, given)

    return faulty


def _restore_nothing(admit: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, given: Any) -> None:
        if given.computed:
            took_effect()
            given = replace(given, computed=0, checkpoint=-1)
        admit(self, given)

    return faulty


def _go_on_behind_wrong_drafts(source: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, row: Any) -> int:
        if row.resume >= 0:
            took_effect()
            row = replace(row, resume=-1)
        return source(self, row)

    return faulty


def _resume_from_another_place(source: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, row: Any) -> int:
        places = len(self.states[0]) - self._first_spare
        if row.resume >= 0 and places > 1:
            took_effect()
            row = replace(row, resume=(row.resume + 1) % places)
        return source(self, row)

    return faulty


def _compute_steps_twice(forward: Callable[..., Any], took_effect: Callable[[], None]) -> Callable[..., Any]:
    def faulty(self: Any, token_ids: Any, positions: Any, attend: Any, *more: Any) -> Any:
        if len(attend.kv_len) > 4:  # as if the step had been broken off when it was nearly done
            took_effect()
            forward(self, token_ids, positions, attend, *more)
        return forward(self, token_ids, positions, attend, *more)

    return faulty


BUGS: dict[str, Bug] = {
    "table-off-by-one-after-hit": Bug(
        "The block table of a sequence that found a cached prefix is off by one behind it.",
        "penstock.exec.batch:SlotTables.admit",
        _shift_the_table_after_a_hit,
    ),
    "attention-one-too-far": Bug(
        "Attention reads one position too far in steps of more than four rows.",
        "penstock.exec.batch:SlotTables.batch",
        _read_one_too_far,
    ),
    "row-in-random-number": Bug(
        "The compiled sampler's random numbers depend on the row's index in the batch.",
        "penstock.kernels.native_sampler:choose",
        _add_the_row_to_the_number,
    ),
    "stale-sampling-parameters": Bug(
        "The compiled sampler uses the parameters of the last batch with as many rows.",
        "penstock.kernels.native_sampler:choose",
        _keep_the_batch_s_parameters,
    ),
    "stale-grammar-mask": Bug(
        "A grammar's mask is that of the step before if another answer's mask was computed in between.",
        "penstock.grammar.library:GrammarLibrary.matcher",
        _share_a_mask,
    ),
    "slot-keeps-prompt-length": Bug(
        "A reused slot keeps the prompt length of its last owner, so that penalties count prompt as output.",
        "penstock.exec.batch:SlotTables.admit",
        _keep_the_last_owner_s_prompt,
    ),
    "block-key-without-parent": Bug(
        "A block is found in the prefix cache by its own tokens, whatever comes before them.",
        "penstock.core.block_keys:block_key",
        _name_a_block_by_its_own_tokens,
    ),
    "chunk-rotated-one-off": Bug(
        "Positions of a chunk that does not start the sequence are one too low.",
        "penstock.exec.batch:SlotTables.batch",
        _rotate_chunks_one_off,
    ),
    "recomputed-output-is-prompt": Bug(
        "Output that is recomputed after a preemption counts as prompt, so that penalties forget it.",
        "penstock.exec.batch:SlotTables.admit",
        _take_recomputed_output_for_prompt,
    ),
    "block-given-back-too-early": Bug(
        "A sequence gives a block back while its next position still sees it.",
        "penstock.core.block_pool:BlockPool._left_behind",
        _leave_a_block_too_many,
        windowed=True,
    ),
    "checkpoint-of-another": Bug(
        "A sequence goes on from the checkpoint beside its own.",
        "penstock.exec.state_store:StateStore.admit",
        _restore_another_checkpoint,
        stateful=True,
    ),
    "state-not-restored": Bug(
        "A sequence that found a cached prefix begins with an empty state.",
        "penstock.exec.state_store:StateStore.admit",
        _restore_nothing,
        stateful=True,
    ),
    "state-of-wrong-drafts": Bug(
        "A sequence with a wrong draft goes on from the state behind it.",
        "penstock.exec.state_store:StateStore._source",
        _go_on_behind_wrong_drafts,
        stateful=True,
    ),
    "state-before-another-draft": Bug(
        "A sequence with a wrong draft goes on from the spare place beside its own.",
        "penstock.exec.state_store:StateStore._source",
        _resume_from_another_place,
        stateful=True,
    ),
    "state-advanced-twice": Bug(
        "A step of more than four rows is computed again on the state that it has left.",
        "penstock.nn.compiled:CompiledExecutor.forward",
        _compute_steps_twice,
        stateful=True,
    ),
}


def run_verify(arguments: list[str]) -> tuple[int, list[str], str]:
    """`penstock verify` in this process: its exit code, what it printed, and the invariant that stopped it, if any."""
    from penstock.cli import main

    sys.argv = ["penstock", "verify", *arguments]
    said, complained, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    faults = (line for line in complained.getvalue().splitlines() if " crashed after " in line)
    return code, said.getvalue().splitlines(), next(faults, "")


def main() -> None:
    """Plant a bug and run `penstock verify` with one seed after another."""
    name, first, count, dashes, *arguments = sys.argv[1:]
    assert dashes == "--", sys.argv
    effects = plant(BUGS[name]) if name != "none" else lambda: 0
    before = 0
    for seed in range(int(first), int(first) + int(count)):
        code, lines, fault = run_verify([*arguments, "--seed", str(seed)])
        named = next((line for line in lines if line.startswith("first mismatch: ")), fault)
        found = {"seed": seed, "code": code, "effects": effects() - before, "first": named, "last": lines[-1]}
        before = effects()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
