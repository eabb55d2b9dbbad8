"""Continuous batching, watched step by step: requests join and leave while others decode.

Starts with the given prompts, adds "Hello, world!" after two steps; at most four decode at once.

    python examples/online.py --prompts "hi, " "hello," "how" --max-new-tokens 100 --temperature 0.8 --do-sample
"""

from __future__ import annotations

from flags import params_of, parse

from penstock import LLM, SamplingParams

LATE_PROMPT = "Hello, world!"
LATE_STEP = 2


def main() -> None:
    """Run the example."""
    arguments = parse(__doc__)
    options = {name: getattr(arguments, name) for name in ("tokenizer", "device", "dtype")}
    with LLM(arguments.model, max_num_seqs=4, **options) as llm:
        ids = run(llm, arguments.prompts, params_of(arguments), stream=arguments.stream)
        for number, request_id in enumerate(ids):
            if not llm.is_finished(request_id):
                print(f"### request {number} is not finished\n")
                continue
            output = llm.pop_output(request_id)
            print(f"### request {number}\n{output.prompt}{output.outputs[0].text}\n")


def run(llm: LLM, prompts: list[str], params: SamplingParams, *, stream: bool) -> list[str]:
    """Step while any request is unfinished; returns the ids of the requests in the order in which they were added."""
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    steps = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            if stream:
                print(f"step {steps}, request {output.request_id}: {output.outputs[0].text!r}")
        steps += 1
        if steps == LATE_STEP:
            ids.append(llm.add_request(LATE_PROMPT, params))
    return ids


if __name__ == "__main__":
    main()
