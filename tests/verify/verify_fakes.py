"""Models and runners for trying the harness: one that is exact by construction, and many that are not.

`RowLM` computes every row by itself with operations whose shapes depend on that row alone, and `RowBackend` every
query by itself, so no batch, chunk or thread can touch a bit. Each violation changes one thing of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from penstock.contract.config import EngineConfig
from penstock.contract.model import GgufVocabulary, KvCacheSpec, ModelShape
from penstock.contract.plan import RowResult
from penstock.contract.scheduler_config import SchedulerConfig
from penstock.kernels.attention_spec import AttentionSpec
from penstock.kernels.torch_backend import TorchBackend
from penstock.loading import LoadedModel
from penstock.sim.fake_runner import FakeRunner
from penstock.text import TextModel, open_text
from penstock.verify import Budget, Target
from penstock.verify.vocab import Vocab

SHAPE = ModelShape(
    num_layers=2, hidden_size=24, num_heads=6, num_kv_heads=2, head_dim=5, vocab_size=97, max_positions=64
)
SPEC = AttentionSpec(SHAPE.head_dim**-0.5)
SMALL = Budget(requests=8, schedules=6, prompt_tokens=20, new_tokens=8)


LETTERS = "".join(chr(code) for code in range(33, 127))  # 94 of them


def text_model() -> TextModel:
    """A tokenizer of single letters, a space and two control tokens: 97 in all."""
    return open_text(
        GgufVocabulary(
            file="toy.gguf",
            model="gpt2",
            pre="gpt-2",
            tokens=(*LETTERS, "\u0120", "<|begin|>", "<|end|>"),
            token_types=(*[1] * 95, 3, 3),
            merges=(),
            scores=(),
            bos=95,
            eos=96,
            unknown=-1,
            add_bos=False,
            add_space_prefix=False,
            chat_template="",
        )
    )


TEXT = text_model()


class RowLM:
    """Two layers of grouped attention and a nonlinearity; weights large enough that every token matters."""

    shape = SHAPE

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        wide = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
        make = lambda *size: torch.randn(*size, generator=generator) / size[-1] ** 0.5  # noqa: E731
        self.embedding = make(SHAPE.vocab_size, SHAPE.hidden_size) * 4
        self.positions = make(SHAPE.max_positions, SHAPE.hidden_size) * 4
        self.qkv = [make(wide, SHAPE.hidden_size) * 2 for _ in range(SHAPE.num_layers)]
        self.out = [make(SHAPE.hidden_size, SHAPE.num_heads * SHAPE.head_dim) * 2 for _ in range(SHAPE.num_layers)]
        self.head = make(SHAPE.vocab_size, SHAPE.hidden_size) * 3

    def linear(self, rows, weight):
        return torch.stack([(weight * row).sum(-1) for row in rows])

    def forward(self, token_ids, positions, attend, adapted=()):
        x = self.embedding[token_ids] + self.positions[positions]
        for layer in range(SHAPE.num_layers):
            heads = self.linear(x, self.qkv[layer]).view(len(x), -1, SHAPE.head_dim)
            q, k, v = heads.split((SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads), dim=1)
            mixed = self.linear(attend(layer, q, k, v, SPEC).flatten(1), self.out[layer])
            x = x + torch.stack([row.clone().tanh() for row in mixed])
        return x

    def logits(self, hidden):
        return self.linear(hidden, self.head)


class BatchLM(RowLM):
    """Adds up in another order when more than three rows share the call, as library GEMMs do."""

    def linear(self, rows, weight):
        return _other_order(rows, weight) if len(rows) > 3 else super().linear(rows, weight)


class ThreadLM(RowLM):
    """Adds up in another order when there is more than one thread."""

    def linear(self, rows, weight):
        return _other_order(rows, weight) if torch.get_num_threads() > 1 else super().linear(rows, weight)


def _other_order(rows, weight):
    return torch.stack([(weight.flip(1) * row.flip(0)).sum(-1) for row in rows])


@dataclass(frozen=True, slots=True)
class RowBackend(TorchBackend):
    """The torch backend, except for attention."""

    split_at_chunk: bool = False

    def paged_attention(self, *arguments):
        return row_attention(*arguments, split_at_chunk=self.split_at_chunk)


def row_attention(q, k_cache, v_cache, q_start, kv_len, block_table, spec, sinks=None, *, split_at_chunk=False):
    """Attention with a backend's signature. `split_at_chunk` sums what lies before the chunk apart, a violation."""
    out = torch.empty(q.shape)
    bounds = q_start.tolist()
    for row, length in enumerate(kv_len.tolist()):
        first, last = bounds[row], bounds[row + 1]
        keys, values = (cache[block_table[row].long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        for at in range(first, last):
            seen = length - (last - at) + 1
            parts = [(0, seen)] if not split_at_chunk else [(0, length - (last - first)), (length - last + first, seen)]
            out[at] = _attend(q[at], keys[:seen].clone(), values[:seen].clone(), spec.scale, parts)
    return out


def _attend(q, keys, values, scale, parts):
    groups = SHAPE.num_heads // SHAPE.num_kv_heads
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))  # [L, Hq, D]
    weights = ((q * keys).sum(-1) * scale).exp()  # [L, Hq]
    total = sum(weights[a:b].sum(0) for a, b in parts if b > a)  # [Hq]
    mixed = sum((weights[a:b, :, None] * values[a:b]).sum(0) for a, b in parts if b > a)  # [Hq, D]
    return mixed / total[:, None]


def loaded(model: RowLM, *, split_at_chunk: bool = False) -> LoadedModel:
    files = SimpleNamespace(digest=b"a toy", path="toy", text=None)
    caches = (KvCacheSpec(SHAPE.num_kv_heads, SHAPE.head_dim),) * SHAPE.num_layers
    program = SimpleNamespace(caches=caches, window=None, states=(), looks_ahead=False, predictor=None)
    backend = RowBackend(split_at_chunk=split_at_chunk)
    config = EngineConfig(model="toy")
    return LoadedModel(files, program, model, backend, torch.float32, torch.float32, weight_bytes=0, config=config)


def target_of(model: RowLM, *, split_at_chunk: bool = False) -> Target:
    return Target.of(loaded(model, split_at_chunk=split_at_chunk), 1, TEXT)


class Wrapped:
    """A runner around another: `edit` may change the plan's admits, `spoil` the result. `log` is their memory."""

    def __init__(self, runner, edit=None, spoil=None):
        self._runner, self._edit, self._spoil, self.log = runner, edit, spoil, {}

    def run(self, plan):
        if self._edit is not None:
            plan = replace(plan, admits=tuple(self._edit(admit, self.log) for admit in plan.admits))
        result = self._runner.run(plan)
        return result if self._spoil is None else self._spoil(plan, result)


def wrapped(target: Target, edit=None, spoil=None) -> Target:
    """The target with every runner wrapped."""
    return replace(target, make_runner=lambda config: Wrapped(target.make_runner(config), edit, spoil))


class Follower(FakeRunner):
    """A runner that may replace one that was lost: it takes steps from wherever they are."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config, 97)
        self._began = False

    def start(self, plan):
        if not self._began:
            self._step, self._began = plan.step, True
        super().start(plan)


def fake_target(
    make: Callable[[SchedulerConfig], object] = Follower,
    window: int | None = None,
    stateful: bool = False,
) -> Target:
    """A target without a tensor: exact, whatever its plans."""
    return Target(97, 64, make, lambda threads: None, 2, b"fake", TEXT, window=window, stateful=stateful)


VOCAB = Vocab.of(fake_target())


# ---- violations that a runner may have, whatever is inside it


def choose_by_slot(admit, log):
    return replace(admit, choice=admit.slot)


def choose_anew_after_preemption(admit, log):
    """The draws of a recomputed sequence start over."""
    before = log.setdefault(admit.seq_id, len(admit.tokens))
    return replace(admit, choice=admit.choice + 7) if len(admit.tokens) > before else admit


def choose_otherwise_after_a_hit(admit, log):
    return replace(admit, choice=admit.choice + 7) if admit.computed else admit


def keep_a_stale_block(admit, log):
    """The block table of a slot keeps its previous owner's first entry."""
    stale = log.get(admit.slot)
    log[admit.slot] = admit.blocks[0]
    if stale is None or admit.computed or stale in admit.blocks:
        return admit
    return replace(admit, blocks=(stale, *admit.blocks[1:]))


def nudge_logprobs(plan, result):
    """One unit in the last place, when three rows share a step."""
    if len(plan.rows) < 3:
        return result
    return _each_token(result, lambda token: token._replace(logprob=math.nextafter(token.logprob, 1.0)))


def fail_in_company(plan, result):
    """The first row that samples fails when four rows share a step."""
    sampling = [row.slot for row in plan.rows if row.sample]
    if len(plan.rows) < 4 or not sampling:
        return result
    failed = RowResult(sampling[0], failure="not finite")
    return replace(result, rows=tuple(failed if row.slot == failed.slot else row for row in result.rows))


def mistake_output_for_prompt(admit, log):
    """What was generated before a preemption is taken for prompt: penalties on the output forget it."""
    return replace(admit, prompt_tokens=-1)


def misplace_ranks(plan, result):
    """Ranks start from 0 when three rows share a step."""
    if len(plan.rows) < 3:
        return result
    return _each_token(result, lambda token: token._replace(rank=token.rank - 1))


def _each_token(result, change):
    rows = (row._replace(tokens=tuple(map(change, row.tokens))) for row in result.rows)
    return replace(result, rows=tuple(rows))


def misread_prompts(plan, result):
    """Scores of prompts are one unit off in the last place when three rows share a step."""
    if len(plan.rows) < 3:
        return result
    rows = (row if row.prompt is None else row._replace(prompt=_nudged(row.prompt)) for row in result.rows)
    return replace(result, rows=tuple(rows))


def _nudged(scores):
    return replace(scores, logprobs=tuple(math.nextafter(p, 1.0) for p in scores.logprobs))
