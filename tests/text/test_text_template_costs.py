"""A chat template gets its share of time and memory and no more, whatever it does; others do not wait for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker_killing import killed_again_and_again

from penstock.contract.errors import InvalidParameter, ModelFileError, Overloaded, Unavailable
from penstock.contract.request import ChatPrompt, Message
from penstock.rendering import Renderer
from penstock.text import ChatTemplate, ControlTokens

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GROWING = (
    "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = "
    + " ~ ".join(["ns.x"] * 32)
    + " %}{% endfor %}"
)
"""Beyond all memory in six rounds, of which the first five write little: the time for them must not be the limit."""
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HELLO = ChatPrompt((Message("user", "hi"),))
BOMBS = 8
PATIENCE = 60.0


@pytest.fixture(scope="module")
def renderer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.rendering.renderer.WALL_SECONDS", 300.0)  # processor time must decide, not the machine
        one = Renderer()
    yield one
    one.close()


def template(source: str, renderer: Renderer) -> ChatTemplate:
    return ChatTemplate(
        source,
        file="/models/m/chat_template.jinja",
        special_tokens={},
        control_tokens=ControlTokens(()),
        renderer=renderer,
    )


@pytest.mark.parametrize(
    ("source", "budget"),
    [
        ("{{ 'x'.ljust(2000000000) }}", "256 MiB of memory"),
        ("{{ messages[0].content.center(2000000000) }}", "256 MiB of memory"),
        ("{{ '{:2000000000}'.format(messages[0].content) }}", "256 MiB of memory"),
        ("{{ messages[0].content | indent(2000000000, first=true) }}", "256 MiB of memory"),
        ("{{ messages * 1000000000 }}", "256 MiB of memory"),
        (GROWING, "memory"),
        (NESTED, "s of processor time"),
        ("{{ (messages | length + 8) ** 99999999 }}", "s of processor time"),
        ("{{ range(99999) | batch(1) | map('sum') | list | length }}" * 40, "s of processor time"),
    ],
)
def test_a_template_that_takes_too_much_is_told_so_by_name(source, budget, renderer):
    with pytest.raises(InvalidParameter, match=budget) as refused:
        template(source, renderer).render_prompt(HELLO)
    assert (refused.value.param, refused.value.code) == ("messages", "chat_template_too_costly")
    assert "(chat_template.jinja) takes more than" in refused.value.message
    assert "/models" not in refused.value.message
    assert template(CHATML, renderer).render_prompt(HELLO).text == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    "source", ["{{ 9 ** 99999999 }}", "{{ 'x' | center(2000000000) | length }}", "{{ 'x' * 10 ** 9 }}"]
)
def test_a_template_that_takes_too_much_to_compile_is_refused_with_its_file(source, renderer):
    """Jinja computes constant expressions when it compiles."""
    with pytest.raises((ModelFileError, InvalidParameter), match=r"chat_template\.jinja.* takes more than"):
        template(source, renderer).render_prompt(HELLO)


def test_blocks_nested_deeper_than_python_takes_are_refused(renderer):
    with pytest.raises(ModelFileError, match="nested too deeply"):
        template("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, renderer)


def test_a_conversation_that_is_long_has_more_time(renderer):
    """A loop over characters that takes longer than a short conversation is allowed."""
    slow = template("{% for c in messages[0].content %}{% set d = c ~ c ~ c %}{% endfor %}done", renderer)
    assert slow.render_prompt(ChatPrompt((Message("user", "x" * 1_000_000),))).text == "done"


def test_who_sends_eight_bombs_delays_nobody_else(renderer):
    bomb, plain = template(NESTED, renderer), template(CHATML, renderer)
    begun, ended = threading.Barrier(BOMBS + 1), []

    def explode() -> None:
        begun.wait(PATIENCE)
        with pytest.raises((InvalidParameter, Overloaded)):  # on a busy machine they wait too long for each other
            bomb.render_prompt(HELLO, tenant="a")
        ended.append(time.monotonic())

    with ThreadPoolExecutor(BOMBS) as threads:
        bombs = [threads.submit(explode) for _ in range(BOMBS)]
        begun.wait(PATIENCE)
        while not renderer._turns.waiting:  # as many explode as may run at once
            time.sleep(0.001)
        for _ in range(10):
            plain.render_prompt(HELLO, tenant="b")
        assert len(ended) < BOMBS - 1
        for each in bombs:
            each.result(PATIENCE)


def test_nothing_is_computed_any_more_when_the_bombs_are_refused(renderer):
    with pytest.raises(InvalidParameter):
        template(NESTED, renderer).render_prompt(HELLO)
    template(CHATML, renderer).render_prompt(HELLO)  # the replaced workers have started
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        before = [ticks(pid) for pid in renderer.pids]
        time.sleep(0.3)
        if [ticks(pid) for pid in renderer.pids] == before:
            return
    raise AssertionError("workers go on computing")


def ticks(pid: int) -> int:
    """Processor time of a process, in the system's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_workers_that_somebody_kills_make_no_verdict_on_the_template(renderer):
    chat = template(CHATML, renderer)
    lost = pytest.raises(Unavailable, match="renders chat templates was lost")
    with killed_again_and_again(lambda: renderer.pids), lost:
        chat.render_prompt(HELLO)
    assert chat.render_prompt(HELLO).text.startswith("<|im_start|>user")
