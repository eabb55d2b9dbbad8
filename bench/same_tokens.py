"""Generates from quantised files in Penstock and in llama.cpp, both in float32, and compares token by token.

    python bench/make_quantised.py CHECKPOINT FOLDER --format Q4_K_M --format Q6_K
    python bench/same_tokens.py FOLDER/*-Q*.gguf --json bench/results/FILE.json

Penstock serves the quantised file with `--dtype float32 --quantization none`, so it decodes the blocks with its own
code; llama.cpp serves the F32 file that its own quantiser makes from the same file. Both are greedy, on prompts of
token ids from the corpus. The engines add in different orders, so logits differ in the last bits. Where the two best
tokens are closer to each other than this difference, either may win. The margin explains such a place: the difference
of the log probabilities of the two best tokens, in both engines, beside the largest difference between the engines on
the tokens before it, on which they agree.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.llama_server import Greedy, ask, serving
from peers.process import NotInstalledError, program, run, version_of
from penstock import LLM, SamplingParams
from penstock.bench.machine import provenance
from penstock.bench.quality import CORPUS, cut
from penstock.contract.errors import EngineFault, SetupError
from penstock.exec.device import compute_threads
from penstock.models import gguf_dialect
from penstock.text import open_text
from penstock.weights.files import open_model
from penstock.weights.locate import default_cache_dir

__all__ = ["Comparison", "compare", "main", "our_answers", "their_answers"]

SERVER_OPTIONS = ("-c", "1024", "-np", "1", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-ui", "--cache-ram", "0")


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the engines' answers to one prompt compare.

    Attributes:
        tokens: how many leading tokens are equal in both answers.
        differs: whether the answers differ after these tokens.
        logprob_difference: the largest between the engines on these tokens, as far as both report it.
        our_margin: between the two best tokens at the place that differs, in Penstock; None if nothing differs, or if
            Penstock's answer ended there.
        their_margin: the same in llama.cpp; None also if it does not report it.
    """

    tokens: int
    differs: bool
    logprob_difference: float
    our_margin: float | None = None
    their_margin: float | None = None


def compare(ours: Greedy, theirs: Greedy) -> Comparison:
    """How far two answers agree; if one ends earlier, they differ there, with the margin of the other alone."""
    pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
    same = next((place for place, (own, their) in enumerate(pairs) if own != their), len(pairs))
    chosen = zip(ours.logprobs[:same], theirs.logprobs[:same], strict=False)
    difference = max((abs(own - their) for own, their in chosen), default=0.0)
    if same == len(ours.tokens) == len(theirs.tokens):
        return Comparison(same, differs=False, logprob_difference=difference)
    own, their = (each.margins[same] if same < len(each.margins) else None for each in (ours, theirs))
    return Comparison(same, True, difference, own, their)


def cut_prompts(model: Path, count: int, length: int) -> list[list[int]]:
    """Token ids of pieces of the corpus that are far from each other."""
    text = open_text(open_model(model, gguf_dialect).text)
    pieces = cut(text, CORPUS.read_text(encoding="utf-8"), length).tokens
    return [list(pieces[place * len(pieces) // count]) for place in range(count)]


def our_answers(model: Path, prompts: list[list[int]], new_tokens: int, threads: int) -> list[Greedy]:
    """What Penstock generates; `threads` as for `--threads`."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, logprobs=2)
    exact = {"dtype": "float32", "quantization": "none", "generation_config": "none"}
    with LLM(str(model), max_model_len=1024, threads=threads, **exact) as llm:
        return [_greedy(answer.outputs[0]) for answer in llm.generate(prompts, params, use_tqdm=False)]


def _greedy(output: Any) -> Greedy:
    own, margins = [], []
    for token, choices in zip(output.token_ids, output.logprobs, strict=True):
        chosen = choices[token].logprob
        own.append(chosen)
        margins.append(chosen - max(each.logprob for other, each in choices.items() if other != token))
    return Greedy(tuple(output.token_ids), tuple(own), tuple(margins))


def their_answers(
    model: Path, prompts: Sequence[Sequence[int]], new_tokens: int, threads: int, peers: Path
) -> list[Greedy]:
    """What llama.cpp generates from the same file in F32; the F32 file is written for it and removed afterwards."""
    server, quantiser = (program(peers, "llama.cpp", name) for name in ("llama-server", "llama-quantize"))
    with tempfile.TemporaryDirectory(prefix="f32-", dir=model.parent) as work:
        plain = Path(work) / "f32.gguf"
        run([str(quantiser), "--allow-requantize", str(model), str(plain), "F32"])
        with serving(server, plain, [*SERVER_OPTIONS, "-t", str(compute_threads(threads))]) as served:
            return [ask(served, prompt, new_tokens) for prompt in prompts]


def _line(name: str, found: Sequence[Comparison]) -> str:
    differing = [each for each in found if each.differs]
    said = ", ".join(f"after {each.tokens} by {each.our_margin} / {each.their_margin}" for each in differing)
    whole = f"{len(found) - len(differing)} of {len(found)} alike"
    largest = max(each.logprob_difference for each in found)
    return f"{name}: {whole}, log probabilities within {largest:.1e}" + (f"; others differ {said}" if said else "")


def main() -> None:
    """Compare the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--prompts", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="tokens of each (default: 48)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate (default: 64)")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of both (default: all cores)")
    parser.add_argument("--peers-dir", type=Path, help="where llama.cpp is; by default in the cache")
    parser.add_argument("--json", type=Path, help="where the record is written")
    options = parser.parse_args()
    peers = options.peers_dir or default_cache_dir(os.environ) / "peers"
    try:
        version = version_of(program(peers, "llama.cpp", "llama-server"))
        record = {"kind": "same-tokens", **provenance(), "llama.cpp": version, "files": []}
        for file in options.files:
            prompts = cut_prompts(file, options.prompts, options.prompt_tokens)
            ours = our_answers(file, prompts, options.new_tokens, options.threads)
            theirs = their_answers(file, prompts, options.new_tokens, options.threads, peers)
            found = [compare(*both) for both in zip(ours, theirs, strict=True)]
            print(_line(file.stem, found), flush=True)
            record["files"].append({"name": file.stem, "prompts": [asdict(each) for each in found]})
    except NotInstalledError as missing:
        hint = "run: python bench/compare.py --install --peer llama.cpp"
        raise SystemExit(f"llama-server or llama-quantize is not installed in {peers}; {hint}") from missing
    except (EngineFault, SetupError, OSError) as error:
        raise SystemExit(str(error)) from error
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
