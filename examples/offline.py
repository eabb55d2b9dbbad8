"""Many prompts at once: the library answers them in shared batches.

python examples/offline.py --prompts "hi, " "hello," "how" --max-new-tokens 100 --temperature 0.8 --do-sample
"""

from __future__ import annotations

from flags import params_of, parse

from penstock import LLM, SamplingParams


def main() -> None:
    """Run the example."""
    arguments = parse(__doc__)
    options = {name: getattr(arguments, name) for name in ("tokenizer", "device", "dtype")}
    with LLM(arguments.model, **options) as llm:
        if arguments.stream:
            show_as_they_come(llm, arguments.prompts, params_of(arguments))
            return
        for number, output in enumerate(llm.generate(arguments.prompts, params_of(arguments))):
            print(f"### request {number}\n{output.prompt}{output.outputs[0].text}\n")


def show_as_they_come(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    """Print the texts one after the other, piece by piece; all are computed at the same time."""
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    for number, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        print(f"### request {number}\n{prompt}", end="")
        for piece in llm.stream_text(request_id):
            print(piece, end="", flush=True)
        print("\n")


if __name__ == "__main__":
    main()
