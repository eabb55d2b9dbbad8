"""Measures Penstock on a CUDA device: whether answers are right, whether they depend on the batch, and how fast it is.

    python bench/on_cuda.py [--json FILE] [--sections limits right products attention exact rates steps] [--quick]
        [--device cuda]

Each section is written to the record when it ends, and if one fails the others still run:

limits: the device's memory bandwidth (a large copy, read and written) and its rate of bfloat16 matrix products.
products: for which numbers of rows a product has the same bits; in which pieces it is computed, and how long they take.
attention: the time of a decode step's and of a prompt's attention in one layer, beside the limits.
right: small random models of several families in float32: logits beside transformers on the same device and beside
Penstock on the CPU, and greedy tokens beside transformers.
exact: the same requests alone and all together, in float32 and bfloat16: tokens and log probabilities that differ.
rates: a random model in the shape of a Llama of a billion weights: tokens a second, beside the limits and transformers.
steps: where the time of a decode step goes: launches, and the share of the time in which the device computes.

Models are made here, from a seed; nothing is fetched. With `--device cpu --quick` everything runs small and without a
GPU, to find errors in this script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from make_random_checkpoint import configure, write_checkpoint
from penstock import LLM, SamplingParams
from penstock.bench.machine import provenance
from penstock.exec.device import open_backend
from penstock.kernels import row_pieces
from penstock.kernels.attention_spec import AttentionSpec

Record = dict[str, Any]

COMMON = {"vocab_size": 512, "max_position_embeddings": 512, "num_hidden_layers": 4, "hidden_size": 256}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
FAMILIES: dict[str, Record] = {
    "llama": {**COMMON, **HEADS},
    "qwen3": {**COMMON, **HEADS},
    "gemma2": {**COMMON, **HEADS, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {**COMMON, **HEADS, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "gpt_oss": {
        **COMMON,
        **HEADS,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "qwen3_moe": {**COMMON, **HEADS, **EXPERTS},
    "lfm2": {
        **{name: value for name, value in (COMMON | HEADS).items() if name != "head_dim"},
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
}
LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SMALL_1B = {**LLAMA_1B, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1024}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        streams: numbers of answers at once, in `rates`.
        prompts: tokens of each prompt, in `rates`.
        answer: tokens of each answer, in `rates`.
        rounds: rounds of each measurement.
        requests: number of requests in `exact`.
        peer_tokens: tokens of each answer of transformers.
        copy_bytes: size of the copied array.
        product: rows and columns of the matrices that are multiplied.
    """

    streams: tuple[int, ...] = (1, 8, 32, 128)
    prompts: tuple[int, ...] = (128, 512)
    answer: int = 128
    rounds: int = 3
    requests: int = 32
    peer_tokens: int = 24
    copy_bytes: int = 1 << 32
    product: int = 8192


QUICK = Sizes((1, 4), (24,), 6, 2, 6, 4, 1 << 24, 256)


class Bench:
    """What sections share: the device, the folder of the models, and what was found so far."""

    def __init__(self, device: torch.device, sizes: Sizes, folder: Path, until: float, quick: bool) -> None:
        self.device = device
        self.sizes = sizes
        self.folder = folder
        self.until = until
        self.quick = quick
        self.found: Record = {}

    @property
    def late(self) -> bool:
        """Whether the time for the whole run is used up."""
        return time.monotonic() > self.until

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 10) -> float:
        """The median of `repeats` runs, after two that do not count."""
        taken = []
        for turn in range(repeats + 2):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            if turn > 1:
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype)

    @contextmanager
    def llm(self, model: Path, device: str = "", **options: Any) -> Iterator[LLM]:
        """Open a model; its memory is given back when the block ends."""
        with LLM(str(model), device=device or self.device.type, kv_store="off", **options) as llm:
            yield llm
        self.free()

    def free(self) -> None:
        """Give back memory that nothing holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def limits(bench: Bench) -> Iterator[Record]:
    """Bytes a second, read and written, and floating-point operations a second of matrix products."""
    yield {"bytes_per_second": _copied_bytes(bench)}
    bench.free()
    width = bench.sizes.product
    one, other = bench.random(width, width), bench.random(width, width)
    yield {"bf16_flops_per_second": 2 * width**3 / bench.seconds(lambda: one @ other)}


def _copied_bytes(bench: Bench) -> float:
    source = torch.empty(bench.sizes.copy_bytes // 2, dtype=torch.bfloat16, device=bench.device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source))


def products(bench: Bench) -> Iterator[Record]:
    """Which numbers of rows give the same bits, and the time by number of rows, for the shapes of the larger model."""
    shapes = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)]
    shapes = [(96, 64), (64, 512)] if bench.quick else shapes
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048]
    for dtype in (torch.bfloat16, torch.float32):
        for outputs, inputs in shapes:
            weight, x = bench.random(outputs, inputs, dtype=dtype), bench.random(2048, inputs, dtype=dtype)
            whole = {count: torch.nn.functional.linear(x[:count], weight)[0] for count in counts}
            classes: list[list[int]] = []
            for count in counts:
                like = next((each for each in classes if torch.equal(whole[each[0]], whole[count])), None)
                if like is None:
                    classes.append([count])
                else:
                    like.append(count)
            pieced = row_pieces.linear_in_pieces(x, weight)
            same = all(
                torch.equal(row_pieces.linear_in_pieces(x[first:last], weight), pieced[first:last])
                for first, last in ((0, 1), (0, 33), (7, 8), (100, 2000), (63, 65), (2047, 2048))
            )
            record: Record = {"shape": [outputs, inputs], "dtype": str(dtype), "alike": classes, "pieces_exact": same}
            record["pieces"] = row_pieces.alike_sizes(x[: max(row_pieces.SIZES)], weight, None, dtype)
            if dtype == torch.bfloat16:
                record["seconds"] = _product_times(bench, x, weight)
            yield {"products": [record]}


def _product_times(bench: Bench, x: Tensor, weight: Tensor) -> Record:
    """Seconds of a product by number of rows, in pieces and at once."""
    taken = {}
    for rows in (1, 64, 128, 256, 2048):
        of = row_pieces.empty_with_room(x, (rows, x.shape[1])).copy_(x[:rows])
        taken[f"{rows} at once"] = bench.seconds(lambda of=of: torch.nn.functional.linear(of, weight), 20)
        taken[f"{rows} in pieces"] = bench.seconds(lambda of=of: row_pieces.linear_in_pieces(of, weight), 20)
    return taken


def attention(bench: Bench) -> Iterator[Record]:
    """Attention in one layer of the larger model: single queries of many sequences, and a prompt."""
    config = SMALL_1B if bench.quick else LLAMA_1B
    heads, kv_heads, width = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    backend, size = open_backend(bench.device, 1), 16
    spec = AttentionSpec(width**-0.5)
    for rows, count, length in [(1, 1, 512), (32, 1, 1024), (128, 1, 1024), (1, 1, 16384), (1, 2048, 2048)]:
        blocks = -(-length // size)
        cache = [bench.random(rows * blocks, size, kv_heads, width) for _ in range(2)]
        table = torch.randperm(rows * blocks, device=bench.device).int().view(rows, blocks)
        q = bench.random(rows * count, heads, width)
        bounds = torch.arange(0, rows * count + 1, count, dtype=torch.int32)
        given = (q, *cache, bounds, torch.full((rows,), length, dtype=torch.int32), table)
        seconds = _device_seconds(bench, partial(backend.paged_attention, *given, spec))
        record: Record = {"rows": rows, "queries": count, "length": length, "seconds": seconds}
        if count == 1:
            record["bytes_per_second"] = sum(each.nbytes for each in cache) / seconds
        else:
            record["flops_per_second"] = 2 * heads * width * length * length / seconds  # causal: half of each square
        yield {"attention": [record]}


def _device_seconds(bench: Bench, work: Callable[[], object], repeats: int = 20) -> float:
    """As `Bench.seconds`, without the host's share, by many calls in one graph."""
    if bench.device.type != "cuda":
        return bench.seconds(work, 1)
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    return bench.seconds(graph.replay) / repeats


def right(bench: Bench) -> Iterator[Record]:
    """Each family's log probabilities and greedy tokens beside transformers' and the CPU's, in float32."""
    for family, settings in FAMILIES.items():
        try:
            yield {"right": {family: _right(bench, family, settings)}}
        except (Exception, SystemExit):  # a config that makes no model raises SystemExit
            yield {"right": {family: {"failed": traceback.format_exc()}}}


def _right(bench: Bench, family: str, settings: Record) -> Record:
    model = bench.folder / family
    write_checkpoint(model, configure(family, settings))
    _spread(model)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(256, (length,), generator=draw).tolist() for length in (3, 17, 40, 64)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    options = {"dtype": "float32", "kv_cache_memory": 1 << 26, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    answers = {}
    for device in (bench.device.type, "cpu"):
        with bench.llm(model, device, **options) as llm:
            answers[device] = llm.generate(prompts, params, use_tqdm=False)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    peer = peer.eval().to(bench.device)
    largest: dict[str, float] = {}
    wrong = {"transformers": 0, "cpu": 0}
    for ours, on_cpu, prompt in zip(answers[bench.device.type], answers["cpu"], prompts, strict=True):
        tokens = ours.outputs[0].token_ids
        sequence = [*prompt, *tokens]
        with torch.inference_mode():
            logits = peer(torch.tensor([sequence], device=bench.device), use_cache=False).logits[0].float()
        scores = logits.double().log_softmax(-1)
        theirs = scores[:-1].gather(1, torch.tensor(sequence[1:], device=bench.device)[:, None])[:, 0].tolist()
        wrong["transformers"] += sum(
            one != other for one, other in zip(tokens, logits[len(prompt) - 1 : -1].argmax(-1).tolist(), strict=True)
        )
        wrong["cpu"] += sum(one != other for one, other in zip(tokens, on_cpu.outputs[0].token_ids, strict=True))
        _note(largest, "transformers", _scores(ours, sequence), theirs)
        if tokens == on_cpu.outputs[0].token_ids:
            _note(largest, "cpu", _scores(ours, sequence), _scores(on_cpu, sequence))
    return {"largest_difference_of_logprobs": largest, "tokens_differing": wrong, "tokens": 24 * len(prompts)}


def _spread(model: Path) -> None:
    """Multiply matrices by ten, so that every operation shows in the logits."""
    for file in model.glob("*.safetensors"):
        tensors = {name: tensor * (4.0 if tensor.ndim > 1 else 1.0) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def _scores(output: Any, sequence: Sequence[int]) -> list[float]:
    """The log probability of each token of a sequence except the first, as an answer reports it."""
    given = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return [each[token].logprob for token, each in zip(sequence[1:], given, strict=True)]


def _note(largest: dict[str, float], name: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    gaps = [
        (abs(one - other), abs(one - other) / max(abs(other), 1e-9)) for one, other in zip(ours, theirs, strict=True)
    ]
    for kind, place in (("absolute", 0), ("relative", 1)):
        key = f"{name}, {kind}"
        largest[key] = max(largest.get(key, 0.0), *(gap[place] for gap in gaps))


def exact(bench: Bench) -> Iterator[Record]:
    """Requests alone and together: how many tokens and bits of log probabilities differ."""
    names = ["llama"] if bench.quick else ["large", "llama", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", "lfm2"]
    for name in names:
        model = _large(bench) if name == "large" else bench.folder / name
        if not model.exists():
            write_checkpoint(model, configure(name, FAMILIES[name]))
        for dtype in ("bfloat16", "float32"):
            try:
                yield {"exact": {f"{name}, {dtype}": _exact(bench, model, dtype)}}
            except (Exception, SystemExit):
                yield {"exact": {f"{name}, {dtype}": {"failed": traceback.format_exc()}}}


def _exact(bench: Bench, model: Path, dtype: str) -> Record:
    draw = torch.Generator().manual_seed(7)
    count, answer = bench.sizes.requests, 8 if bench.quick else 16
    lengths = torch.randint(1, 200, (count,), generator=draw).tolist()
    prompts = [torch.randint(256, (length,), generator=draw).tolist() for length in lengths]
    params = [
        SamplingParams(temperature=0.0 if at % 2 else 1.0, seed=at, max_tokens=answer, ignore_eos=True, logprobs=0)
        for at in range(count)
    ]
    options = {"dtype": dtype, "max_num_batched_tokens": 300, "prefix_caching": False, "max_num_seqs": count}
    with bench.llm(model, kv_cache_memory=1 << 28, **options) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        alone = [
            llm.generate([prompt], [each], use_tqdm=False)[0] for prompt, each in zip(prompts, params, strict=True)
        ]
    return {"tokens": count * answer, "alone": _differing(together, alone), "again": _differing(together, again)}


def _differing(one: Sequence[Any], other: Sequence[Any]) -> Record:
    tokens = bits = 0
    for left, right_one in zip(one, other, strict=True):
        before, after = left.outputs[0], right_one.outputs[0]
        pairs = list(zip(before.token_ids, after.token_ids, strict=True))
        tokens += sum(first != second for first, second in pairs)
        for place, (first, second) in enumerate(pairs):
            if first != second:
                break
            bits += before.logprobs[place][first].logprob != after.logprobs[place][second].logprob
    return {"tokens_differing": tokens, "logprobs_differing": bits}


def _large(bench: Bench) -> Path:
    """The larger model, made on the device, where random numbers are quick to draw."""
    model = bench.folder / "large"
    if model.exists():
        return model
    small = bench.folder / "large-settings"
    config = configure("llama", SMALL_1B if bench.quick else LLAMA_1B)
    write_checkpoint(small, configure("llama", {**SMALL_1B, "num_hidden_layers": 1}))
    model.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((small / name).read_bytes())
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = {}
    for name, tensor in empty.state_dict().items():
        if name != "lm_head.weight":
            drawn = bench.random(*tensor.shape).mul_(0.02) if tensor.ndim > 1 else torch.ones(tensor.shape)
            tensors[name] = drawn.to(device="cpu", dtype=torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def rates(bench: Bench) -> Iterator[Record]:
    """Tokens a second of the larger model, by streams and prompts; then the same with transformers."""
    sizes, model = bench.sizes, _large(bench)
    began = time.perf_counter()
    options = {"max_num_seqs": max(sizes.streams), "max_num_batched_tokens": 8192, "prefix_caching": False}
    with bench.llm(model, speculate=False, **options) as llm:
        yield {"load_seconds": time.perf_counter() - began}
        for length in sizes.prompts:
            for streams in sizes.streams:
                if bench.late:
                    yield {"rates": [{"prompt": length, "streams": streams, "left_out": "no time left"}]}
                    continue
                yield {"rates": [_rate(bench, llm, length, streams)]}
    yield from _peer_rates(bench, model)


def _rate(bench: Bench, llm: LLM, length: int, streams: int) -> Record:
    """Tokens a second of prompts, until their first tokens, and of answers, in steps in which every stream decodes."""
    sizes = bench.sizes
    draw = torch.Generator().manual_seed(length + streams)
    prompts, answers = [], []
    rounds = sizes.rounds if streams < 128 else 2
    for turn in range(rounds + 1):
        drawn = torch.randint(256, (streams, length), generator=draw).tolist()
        for prompt in drawn:
            llm.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=sizes.answer, ignore_eos=True))
        told: dict[str, int] = {}  # tokens of each answer
        first_at, first_tokens, began = 0.0, 0, time.perf_counter()
        while llm.has_unfinished_requests():
            moved = [(each.request_id, len(each.outputs[0].token_ids)) for each in llm.step()]
            told |= {name: tokens for name, tokens in moved if tokens}
            if not first_at and len(told) == streams:
                first_at, first_tokens = time.perf_counter(), sum(told.values())
        ended = time.perf_counter()
        if turn:  # the first one warms up
            prompts.append(streams * length / (first_at - began))
            answers.append((sum(told.values()) - first_tokens) / (ended - first_at))
    record: Record = {"prompt": length, "streams": streams, "prompt_tokens_per_second": _spread_of(prompts)}
    return record | {"tokens_per_second": _spread_of(answers)} | _shares(bench, length, streams, prompts, answers)


def _shares(bench: Bench, length: int, streams: int, prompts: Sequence[float], answers: Sequence[float]) -> Record:
    """Medians as shares of what the device's limits allow: bytes for a decode step, operations for a prompt."""
    config = SMALL_1B if bench.quick else LLAMA_1B
    heads = config["head_dim"] * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    body = layers * hidden * (heads + 3 * config["intermediate_size"])
    head = config["vocab_size"] * hidden
    kv = 2 * 2 * layers * config["head_dim"] * config["num_key_value_heads"] * (length + bench.sizes.answer / 2)
    found = bench.found
    record = {"step_bytes": 2 * (body + head) + streams * kv, "prompt_flops_per_token": 2 * body}
    if "bytes_per_second" in found:
        best = streams * found["bytes_per_second"] / record["step_bytes"]
        record["share_of_bandwidth"] = statistics.median(answers) / best
    if "bf16_flops_per_second" in found:
        best = found["bf16_flops_per_second"] / record["prompt_flops_per_token"]
        record["share_of_products"] = statistics.median(prompts) / best
    return record


def _spread_of(values: Sequence[float]) -> Record:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _peer_rates(bench: Bench, model: Path) -> Iterator[Record]:
    """Transformers' `generate` on the same model and batches: the difference of two lengths is the steps' time."""
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to(bench.device)
    length = bench.sizes.prompts[0]
    for streams in bench.sizes.streams:
        if bench.late:
            yield {"transformers": [{"prompt": length, "streams": streams, "left_out": "no time left"}]}
            continue
        ids = torch.randint(256, (streams, length), device=bench.device)
        values = []
        for turn in range(bench.sizes.rounds):
            short, long = (_generated(bench, peer, ids, count) for count in (2, 2 + bench.sizes.peer_tokens))
            if turn:
                values.append(streams * bench.sizes.peer_tokens / (long - short))
        yield {"transformers": [{"prompt": length, "streams": streams, "tokens_per_second": _spread_of(values)}]}
    del peer
    bench.free()


def _generated(bench: Bench, peer: Any, ids: Tensor, count: int) -> float:
    bench.wait()
    began = time.perf_counter()
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        peer.generate(
            ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    bench.wait()
    return time.perf_counter() - began


def steps(bench: Bench) -> Iterator[Record]:
    """A few decode steps under torch's profiler: launches, time on the device and on the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 8192, "prefix_caching": False, "speculate": False}
    with bench.llm(_large(bench), **options) as llm:
        for streams in (1, 32):
            for _ in range(streams):
                params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
                llm.add_request(list(range(128 if not bench.quick else 16)), params)
            for _ in range(6):
                llm.step()
            count = 8
            bench.wait()
            began = time.perf_counter()
            for _ in range(count):
                llm.step()
            bench.wait()
            plain = (time.perf_counter() - began) / count
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(count):
                    llm.step()
                bench.wait()
            while llm.has_unfinished_requests():
                llm.step()
            yield {"steps": [{"streams": streams, "seconds": plain} | _profiled(profile, count, plain)]}


def _profiled(profile: Any, count: int, seconds: float) -> Record:
    on_device = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(each.self_device_time_total for each in on_device) / 1e6 / count
    kinds: dict[str, list[float]] = {}
    for each in on_device:
        kinds.setdefault(each.name[:80], []).append(each.self_device_time_total)
    longest = sorted(kinds.items(), key=lambda item: -sum(item[1]))[:15]
    return {
        "launches": len(on_device) / count,
        "device_seconds": busy,
        "device_share": busy / seconds,
        "longest": [[name, len(times) / count, sum(times) / count] for name, times in longest],
        "waits": sum(each.name == "cudaStreamSynchronize" for each in profile.events()) / count,
    }


SECTIONS: dict[str, Callable[[Bench], Iterator[Record]]] = {
    "limits": limits,
    "right": right,
    "products": products,
    "attention": attention,
    "exact": exact,
    "rates": rates,
    "steps": steps,
}


def _merge(into: Record, part: Record) -> None:
    for name, value in part.items():
        if isinstance(value, list):
            into.setdefault(name, []).extend(value)
        elif isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def _device_facts(device: torch.device) -> Record:
    facts: Record = {"torch": torch.__version__, "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        facts |= {"multiprocessors": properties.multi_processor_count}
    return facts


def main() -> None:
    """Run the sections, print what each finds, and write the record after each finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small sizes, for trying this script")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=240.0, help="after which rates are left out (default: 240)")
    parser.add_argument("--json", type=Path, help="where the record is written")
    given = parser.parse_args()
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    record: Record = {"kind": "cuda", **provenance(), "accelerator": _device_facts(device), "seconds": {}}
    with tempfile.TemporaryDirectory() as folder:
        until = time.monotonic() + given.seconds
        bench = Bench(device, QUICK if given.quick else Sizes(), Path(folder), until, given.quick)
        for name in given.sections:
            began = time.monotonic()
            print(f"== {name}", flush=True)
            try:
                for part in SECTIONS[name](bench):
                    _merge(bench.found, part)
                    print(json.dumps(part), flush=True)
                    _write(given.json, record | {"found": bench.found})
            except (Exception, SystemExit):
                bench.found.setdefault("failed", {})[name] = traceback.format_exc()
                traceback.print_exc()
            bench.free()
            record["seconds"][name] = time.monotonic() - began
            print(f"   {record['seconds'][name]:.1f} s", flush=True)
            _write(given.json, record | {"found": bench.found})
    if "failed" in bench.found:
        raise SystemExit(f"failed: {', '.join(bench.found['failed'])}")


def _write(path: Path | None, record: Record) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
