"""`bench/planted_guesses.py`: the formula, and that the planted share of guesses is right, the same ones each time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import planted_guesses
from penstock.contract.plan import Admit, GuessWork, RowResult, SampledToken

GREEDY = planted_guesses.GREEDY


class Wrong:
    """A draft model that guesses three tokens, all of them wrong."""

    kv = None

    def admit(self, admit):
        self.admitted = admit

    def follow(self, rows, results, hidden):
        return tuple(result._replace(guess=(99, 99, 99), lag=0) for result in results), GuessWork(0.5, 3, 4)


def test_the_formula():
    assert planted_guesses.expected(0.0, [1.0, 1.1, 1.2]) == (1.0, 0)
    times, length = planted_guesses.expected(0.5, [1.0, 1.1, 1.2])
    assert (times, length) == (pytest.approx(1.75 / 1.2), 2)
    assert planted_guesses.expected(0.9, [2.0, 2.0, 8.0]) == (pytest.approx(1.9), 1)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.8, 1.0])
def test_guesses_are_right_as_often_as_planted_and_at_the_same_places_again(right):
    answer, prompt = [at % 50 for at in range(3000)], (1, 2, 3)
    found = []
    for _ in range(2):
        planted = planted_guesses.PlantedGuesses(Wrong(), {prompt: answer}, right, 100)
        planted.admit(Admit(0, "a", (*prompt, *answer[:4]), (), 0, GREEDY, 0, prompt_tokens=3))
        hits = []
        for drawn in range(4, 2000):
            (result,), work = planted.follow((), (RowResult(0, (SampledToken(answer[drawn]),)),), {})
            hits.append([token == answer[drawn + 1 + at] for at, token in enumerate(result.guess)])
        found.append(hits)
    assert found[0] == found[1]
    assert work.passes == 3
    assert sum(hit[0] for hit in found[0]) / len(found[0]) == pytest.approx(right, abs=0.03)
    assert all(before[1] == after[0] for before, after in zip(found[0], found[0][1:], strict=False)), "by its place"


def test_no_more_is_guessed_than_the_answer_has():
    planted = planted_guesses.PlantedGuesses(Wrong(), {(1,): [5, 6]}, 1.0, 100)
    planted.admit(Admit(0, "a", (1,), (), 0, GREEDY, 0, prompt_tokens=1))
    (result,), _ = planted.follow((), (RowResult(0, (SampledToken(5),)),), {})
    assert result.guess == (6,)


def test_it_measures_two_models_and_compares_every_answer(tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    for name, value in {"LARGE": sizes, "SMALL": sizes | {"num_hidden_layers": 1}, "VOCABULARY": 512}.items():
        monkeypatch.setattr(planted_guesses, name, value)
    monkeypatch.setattr(planted_guesses, "NEW", 96)
    monkeypatch.setattr(planted_guesses, "WARM", 4)
    target = tmp_path / "record.json"
    arguments = SimpleNamespace(streams=[2], right=[0.9], rounds=1, json=target)
    monkeypatch.setattr(planted_guesses.argparse.ArgumentParser, "parse_args", lambda _: arguments)
    planted_guesses.main()
    assert "2 streams, 0.90 right" in capsys.readouterr().out
    assert '"measured_by_formula"' in target.read_text()
