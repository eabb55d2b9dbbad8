"""Every family through the real scheduler and runner: embeddings are transformers' pooled states, however computed."""

from __future__ import annotations

import pytest
import torch
from test_e2e_golden_paths import IN_SHORT, Bench, draw_prompts
from tiny_checkpoints import VARIANTS, load_model, long_factors_from_the_start, write_checkpoint

from penstock.contract.embedding import EmbeddingSpec, Pooling, vector_floats
from penstock.contract.events import Embedded
from penstock.contract.request import SequenceRequest

CASES = [
    pytest.param((family, next(iter(variants))), id=family, marks=[] if family in IN_SHORT else pytest.mark.deep)
    for family, variants in VARIANTS.items()
]
LENGTHS = (1, 7, 16, 90)
TOLERANCE = 1e-4


def embedded(bench, prompts, pooling):
    """The vector of each prompt, unscaled."""
    spec = EmbeddingSpec(pooling, normalize=False)
    for name, prompt in enumerate(prompts):
        fresh = not pooling.takes_cached
        bench.scheduler.submit(SequenceRequest(str(name), tuple(prompt), fresh_prompt=fresh, embedding=spec))
    found = {}
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan()
        for event in bench.scheduler.commit(plan, bench.runner.run(plan)):
            if isinstance(event, Embedded):
                found[event.seq_id] = torch.tensor(vector_floats(event.vector))
    bench.scheduler.check()
    return [found[str(name)] for name in range(len(prompts))]


@pytest.fixture(scope="module", params=CASES)
def golden(request, tmp_path_factory):
    """A model, prompts, and transformers' last hidden states of each prompt."""
    from transformers import AutoModel

    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), *request.param)
    theirs, model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval(), load_model(directory)
    prompts = draw_prompts(model.shape.vocab_size, LENGTHS)
    with torch.no_grad(), long_factors_from_the_start(theirs):
        states = [theirs(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    return model, prompts, states


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [{}, {"tokens": 6, "seqs": 4, "block_size": 5}])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_they_are_the_pooled_states_of_transformers(golden, pooling, sizes):
    model, prompts, states = golden
    bench = Bench(model, **sizes)
    for _ in range(2):  # the second time with a warm cache
        for found, theirs in zip(embedded(bench, prompts, pooling), states, strict=True):
            expected = {Pooling.MEAN: theirs.mean(0), Pooling.LAST: theirs[-1], Pooling.CLS: theirs[0]}[pooling]
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
