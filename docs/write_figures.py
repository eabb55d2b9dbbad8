"""Writes the tables of figures in README.md, docs/figures.md and docs/tuning.md.

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`, and is made from the first record of its
kind that its page links to. To show a new record, change the link and run
`.venv/bin/python docs/write_figures.py`. With `--check` nothing is written, and the exit code is 1 if a page is not up
to date. Figures come from the single runs: a rate is the median of the rounds; a ratio is computed in each round, and
the median of these is shown.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from penstock.bench.batch import Run

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "figures.md", ROOT / "docs" / "tuning.md")
BLOCK = re.compile(r"(?<=<!-- figures: )(?P<name>[\w-]+) -->\n.*?(?=<!-- end of figures -->)", re.DOTALL)
RECORD = r"\(([./]*bench/results/[\w.-]+-{kind}-[\w.-]+\.json)\)"

Record = dict[str, Any]
Contender = dict[str, Any]

NAMES = {
    "penstock (file)": "Penstock, the 4-bit file",
    "penstock (file:int8-kv)": "Penstock, the same with an int8 KV cache",
    "penstock (int8)": "Penstock, int8",
    "penstock (bf16)": "Penstock, bf16",
    "llama.cpp": "llama.cpp, the same file",
    "openvino-genai:int8": "OpenVINO GenAI, int8 export",
    "openvino-genai:int4": "OpenVINO GenAI, int4 export",
}
"""Names of contenders; others are shown by their names in the record, with a comma for the colon."""

PAIRS = (
    ("file / llama.cpp on the same file", "penstock (file)", "llama.cpp"),
    ("int8 / llama.cpp Q8_0", "penstock (int8)", "llama.cpp:Q8_0"),
    ("bf16 / llama.cpp BF16", "penstock (bf16)", "llama.cpp:BF16"),
)
"""Ratios that are shown: of one of our weight formats to the same format of a peer."""

FORMS = (
    ("the 4-bit file", "penstock (file)", "penstock file"),
    ("`int8`", "penstock (int8)", "penstock int8"),
    ("`none` (bfloat16)", "penstock (bf16)", "penstock none, bfloat16"),
)
"""Weight formats on the tuning page: the page's name, and the names in records of `compare` and of `quality`."""

COSTS = (
    ("the 4-bit file", "penstock file", "llama.cpp"),
    ("the same with an int8 KV cache", "penstock file:int8-kv", ""),
    ("int8, Q8_0", "penstock int8", "llama.cpp:Q8_0"),
    ("bf16", "penstock none, bfloat16", ""),
)
"""Weight formats in the table of quality, with Penstock's and llama.cpp's names in the record."""


def written(page: Path) -> str:
    """Return the page with its tables made again.

    Raises:
        ValueError: the page links to no record of the kind that a table needs, or names a table that does not exist.
    """
    text = page.read_text(encoding="utf-8")

    def table(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in TABLES:
            raise ValueError(f"{page.name}: there is no table {name!r}")
        kind, make = TABLES[name]
        found = re.search(RECORD.format(kind=kind), text)
        if found is None:
            raise ValueError(f"{page.name}: no link to a record of {kind!r}, which the table {name!r} is made of")
        record = json.loads((page.parent / found[1]).read_text(encoding="utf-8"))
        return f"{name} -->\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in make(record))

    return BLOCK.sub(table, text)


# ---- from a record


def runs(contender: Contender, rate: str) -> list[list[float]]:
    """Return a contender's rates, `[streams][round]`."""
    return [[getattr(Run.read(run), f"{rate}_tok_s") for run in row["runs"]] for row in contender["rows"]]


def rates(contender: Contender, rate: str) -> list[float]:
    """Return the median of the rounds, for each number of streams."""
    return [statistics.median(rounds) for rounds in runs(contender, rate)]


def ratios(ours: Contender, theirs: Contender, rate: str) -> list[float]:
    """Return, for each number of streams, the median of the ratios of each round."""
    pairs = zip(runs(ours, rate), runs(theirs, rate), strict=True)
    return [statistics.median(a / b for a, b in zip(*rounds, strict=True)) for rounds in pairs]


def best_ratios(ours: list[Contender], theirs: list[Contender], rate: str) -> list[float]:
    """Return `ratios` of our fastest, by the median, to their fastest; for other streams these may be others."""
    found = []
    for index in range(len(ours[0]["rows"])):

        def speed(contender: Contender, index: int = index) -> float:
            return rates(contender, rate)[index]

        found.append(ratios(max(ours, key=speed), max(theirs, key=speed), rate)[index])
    return found


# ---- README and the page of figures


def speed_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the rates of all, the ratios, and the share of the machine's limit that ours reached: prefill, decode."""
    by_name = {each["name"]: each for each in record["contenders"]}
    ours, peers = ([each for each in by_name.values() if each["ours"] is own] for own in (True, False))
    streams = f"{_joined([str(count) for count in record['streams']])} streams"
    yield "tokens a second", f"prefill, {streams}", f"decode, {streams}"
    yield "---", "---", "---"
    for each in by_name.values():
        yield _cells(_shown(each), _rates, partial(rates, each))
    for title, own, their in PAIRS:
        if own in by_name and their in by_name:
            yield _cells(title, _ratios, partial(ratios, by_name[own], by_name[their]))
    for each in peers:
        if not each["name"].startswith("llama.cpp"):
            title = f"best of ours / {_shown(each).replace(',', '').removesuffix(' export')}"
            yield _cells(title, _ratios, partial(best_ratios, ours, [each]))
    yield _cells("best of ours / best of these peers", _ratios, partial(best_ratios, ours, peers))
    if record["limits"] is None:
        return
    yield f"**share of the machine's limit**, at {record['limits']['read_bytes'] / 1e9:.0f} GB/s", "", ""
    for each in ours:
        yield _cells(_shown(each).removeprefix("Penstock, "), _shares, partial(_limit_shares, each))


def q6_k_speed_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield the rows of `speed_rows` for a file in Q6_K."""
    for cells in speed_rows(record):
        yield tuple(cell.replace("4-bit", "Q6_K") for cell in cells)


def short_speed_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the rates of the 4-bit file, and the ratios of our best to each engine's best and to the best of all."""
    by_name = {each["name"]: each for each in record["contenders"]}
    ours, peers = ([each for each in by_name.values() if each["ours"] is own] for own in (True, False))
    streams = f"{_joined([str(count) for count in record['streams']])} streams"
    yield "", f"prefill, {streams}", f"decode, {streams}"
    yield "---", "---", "---"
    yield _cells("the 4-bit file, tokens a second", _rates, partial(rates, by_name["penstock (file)"]))
    for engine, title in (
        ("llama.cpp", "llama.cpp"),
        ("ik_llama.cpp", "ik_llama.cpp"),
        ("openvino-genai", "OpenVINO GenAI"),
    ):
        own = [each for each in peers if each["name"].partition(":")[0] == engine]
        if own:
            yield _cells(f"our best format / the best of {title}", _ratios, partial(best_ratios, ours, own))
    yield _cells("our best format / the best of these peers", _ratios, partial(best_ratios, ours, peers))


def cost_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the divergence of each weight format, ours and theirs."""
    divergence = {row["name"]: f"{row['kl_mean']:.4f}" for row in record["rows"]}
    yield f"nats a token, first {record['context'] * record['chunks']:,} tokens", "Penstock", "llama.cpp"
    yield "---", "---", "---"
    for title, own, their in COSTS:
        yield title, divergence[own], divergence[their] if their else ""


def file_cost_rows(record: Record) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield both engines' divergence on each of several files, and how often the top token is the same."""
    first = record["records"][0]
    yield f"nats a token, first {first['context'] * first['chunks']:,} tokens", "Penstock", "llama.cpp", "same", "same"
    yield "---", "---", "---", "---", "---"
    for each in record["records"]:
        own, their = ({row["name"]: row for row in each["rows"]}[name] for name in ("penstock file", "llama.cpp"))
        same = (f"{100 * row['same_top']:.1f} %" for row in (own, their))
        yield each["name"], f"{own['kl_mean']:.4f}", f"{their['kl_mean']:.4f}", *same


def same_token_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield on how many prompts both engines generate the same tokens in float32, and margins where they do not."""
    yield "file", "same tokens to the end", "log probabilities differ by at most", "margins where tokens differ"
    yield "---", "---", "---", "---"
    for each in record["files"]:
        prompts = each["prompts"]
        differing = [prompt for prompt in prompts if prompt["differs"]]
        margins = ", ".join(f"{prompt['our_margin'] or 0:.1e}" for prompt in differing)
        alike = f"{len(prompts) - len(differing)} of {len(prompts)}"
        yield each["name"], alike, f"{max(prompt['logprob_difference'] for prompt in prompts):.1e}", margins


def start_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield medians of each server's start, with the shortest and the longest in brackets, and of its memory."""
    yield "", "first answer after", "memory of its own", "mapped from files", "resident in all"
    yield "---", "---", "---", "---", "---"
    for name, rounds in record["servers"].items():
        seconds = [each["answered_seconds"] for each in rounds]
        memory = (f"{statistics.median(each[key] for each in rounds) / 1e6:,.0f} MB" for key in _MEMORY)
        spread = f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"
        yield name.replace("penstock", "Penstock"), spread, *memory


_MEMORY = ("anonymous", "file", "resident")


def on_cuda_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield prefill and decode rates by streams: tokens a second, and the share of what the device's limits allow."""
    rows = [row for row in record["found"]["rates"] if row["prompt"] == _CUDA_PROMPT]
    yield f"prompts of {_CUDA_PROMPT} tokens", *(_counted(row["streams"], "stream") for row in rows)
    yield "---", *("---" for _ in rows)
    for name, rate, share in _CUDA_RATES:
        yield name, *(f"{row[rate]['median']:,.0f} ({row[share]:.0%})" for row in rows)


_CUDA_PROMPT = 512
_CUDA_RATES = (
    ("prompts", "prompt_tokens_per_second", "share_of_products"),
    ("decode", "tokens_per_second", "share_of_bandwidth"),
)


def guess_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield what guesses save, by task and streams: the rate with guesses over the rate without."""
    ratios: dict[str, dict[int, float]] = {}
    for row in record["rows"]:
        ratios.setdefault(row["task"], {})[row["streams"]] = row["ratio"]
    streams = list(next(iter(ratios.values())))
    yield "", *(_counted(each, "stream") for each in streams)
    yield "---", *("---" for _ in streams)
    for task, by in ratios.items():
        yield _TASKS.get(task, task), *(f"{by[each]:.2f}" for each in streams)


_TASKS = {
    "code edit": "a file with one name changed",
    "JSON extraction": "records in JSON, by a schema",
    "summary with quotes": "a summary with quotes",
}


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def shape_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the share of the machine's limit that models of different shapes reach, each in a run of `bench batch`."""
    streams = f"{_joined([str(row['streams']) for row in record['records'][0]['rows']])} streams"
    yield "share of the machine's limit", f"prefill, {streams}", f"decode, {streams}"
    yield "---", "---", "---"
    for each in record["records"]:
        yield _cells(f"{each['name']}, {each['weights']}", _shares, partial(_limit_shares, each))


def _limit_shares(contender: Contender, rate: str) -> list[float]:
    return [row[f"{rate}_share_of_limit"] for row in contender["rows"]]


def _cells(title: str, shown: Callable[[list[float]], str], of: Callable[[str], list[float]]) -> tuple[str, str, str]:
    return title, shown(of("prefill")), shown(of("decode"))


# ---- the tuning page


def form_speed_rows(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the rates of each weight format."""
    by_name = {each["name"]: each for each in record["contenders"]}
    streams = _joined([str(count) for count in record["streams"]])
    yield "weights", f"decoding, tokens a second, {streams} streams", f"prompts, tokens a second, {streams} streams"
    yield "---", "---", "---"
    for title, name, _ in FORMS:
        yield title, _rates(rates(by_name[name], "decode")), _rates(rates(by_name[name], "prefill"))


def one_stream_rows(record: Record) -> Iterator[tuple[str, ...]]:
    """Yield, for several files and instruction sets at one stream, ours over the best peer, and the rounds' spread."""
    yield "one stream", "decode: ours / best peer", "prompt: ours / best peer", "decode, share of the limit"
    yield "---", "---", "---", "---"
    for each in record["records"]:
        cells = {best["rate"]: _spread(best["ours_over_theirs"]) + f", {best['peer']}" for best in each["best"]}
        row = next(contender for contender in each["contenders"] if contender["ours"])["rows"][0]
        name = each["model"].removesuffix(".gguf")
        share = _shares([row["decode_share_of_limit"]])
        yield f"{name}, {each['limits']['isa']}, {each['repeats']} rounds", cells["decode"], cells["prefill"], share


def form_cost_rows(record: Record) -> Iterator[tuple[str, str, str, str]]:
    """Yield the bytes and the cost of each weight format."""
    rows = {each["name"]: each for each in record["rows"]}
    yield "weights", "bytes of weights", "divergence", "same top token"
    yield "---", "---", "---", "---"
    for title, _, name in FORMS:
        row = rows[name]
        yield title, f"{row['weight_bytes'] / 1e6:.0f} MB", f"{row['kl_mean']:.4f}", f"{100 * row['same_top']:.1f} %"


TABLES: dict[str, tuple[str, Callable[[Record], Iterator[tuple[str, ...]]]]] = {
    "speed": ("compare", speed_rows),
    "speed-of-1b": ("compare-llama-1b", speed_rows),
    "speed-of-1b-q6-k": ("compare-q6_k", q6_k_speed_rows),
    "speed-of-moe": ("compare-moe", speed_rows),
    "speed-with-avx2": ("compare-avx2", speed_rows),
    "speed-with-avx2-q6-k": ("compare-avx2-q6_k", q6_k_speed_rows),
    "speed-with-avx2-moe": ("compare-avx2-moe", speed_rows),
    "speed-beside-vllm": ("compare-vllm-transformers", speed_rows),
    "speed-with-avx2-small": ("compare-avx2-smollm2", speed_rows),
    "speed-with-amx": ("compare-amx", speed_rows),
    "one-stream": ("one-stream", one_stream_rows),
    "speed-in-short": ("compare", short_speed_rows),
    "cost": ("quality", cost_rows),
    "cost-of-files": ("quality-of-files", file_cost_rows),
    "cost-of-kinds": ("quality-of-kinds", file_cost_rows),
    "same-tokens": ("same-tokens", same_token_rows),
    "same-tokens-random": ("same-tokens-random", same_token_rows),
    "start": ("start", start_rows),
    "shapes": ("shapes", shape_rows),
    "on-cuda": ("cuda", on_cuda_rows),
    "on-cuda-h100": ("cuda-h100", on_cuda_rows),
    "guesses": ("speculate", guess_rows),
    "guesses-with-amx": ("speculate-amx", guess_rows),
    "speed-of-forms": ("compare", form_speed_rows),
    "cost-of-forms": ("quality", form_cost_rows),
}
"""The tables by name: the kind of record that each is made from, and the function that makes it."""


# ---- numbers in words


def _shown(contender: Contender) -> str:
    return NAMES.get(contender["name"], contender["name"].replace(":", ", "))


def _joined(texts: list[str]) -> str:
    return " / ".join(texts)


def _rates(values: list[float]) -> str:
    return _joined([f"{value:,.0f}" for value in values])


def _ratios(values: list[float]) -> str:
    """Show two decimals below 2, one from 2 on."""
    return _joined([f"{value:.2f}" if round(value, 2) < 2 else f"{value:.1f}" for value in values])


def _spread(of: tuple[float, float, float]) -> str:
    """Show the median and extremes of ratios."""
    median, lowest, highest = of
    return f"{median:.2f} ({lowest:.2f} to {highest:.2f})"


def _shares(values: list[float]) -> str:
    return f"{_joined([f'{100 * value:.0f}' for value in values])} %"


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` print which are not up to date; returns the exit code."""
    stale = {page: text for page in PAGES if (text := written(page)) != page.read_text(encoding="utf-8")}
    if arguments == ["--check"]:
        for page in stale:
            print(f"{page.name} is not what the records say: run docs/write_figures.py")  # noqa: T201
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
