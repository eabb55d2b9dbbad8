"""Compute certified answers again, each alone, and compare them with their certificates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.answer_contract import config_for
from penstock.app import Assembly, assemble
from penstock.certificates import (
    BadCertificate,
    Certificate,
    CertifiedChoice,
    Difference,
    contract_differences,
    first_difference,
    read,
)
from penstock.contract.answer_contract import ARITHMETIC, AnswerContract
from penstock.contract.config import EngineConfig
from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.events import RequestFailed, RequestFinished
from penstock.engine import Certifying, resolved_request

__all__ = ["Recomputed", "Recomputing", "open_recomputing"]

_REQUEST = "certified"


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The result of computing a certified answer again.

    Attributes:
        arithmetic: (field, certified, here) for each field of the contract in which the arithmetic here differs from
            the certified one. Log probabilities, and with them tokens, may then differ without any tampering.
        difference: the first place that differs; None if nothing does.
        same_tokens: whether every token, and how each choice ended, is the same.
        refused: why the answer could not be computed; "" if it was.
    """

    arithmetic: tuple[tuple[str, str, str], ...] = ()
    difference: Difference | None = None
    same_tokens: bool = True
    refused: str = ""

    @property
    def confirmed(self) -> bool:
        """Whether the answer is what the certificate says, computed with the arithmetic that it names."""
        return not (self.arithmetic or self.difference or self.refused)

    @property
    def refuted(self) -> bool:
        """Whether the certificate is wrong. If it is neither confirmed nor refuted, this machine cannot tell."""
        return bool(self.refused) or (self.difference is not None and not self.arithmetic)

    def explain(self) -> str:
        """The result in words, on one line."""
        if self.refused:
            return f"differs: it cannot be computed: {self.refused}"
        if not self.arithmetic:
            return "equal" if self.difference is None else f"differs at {self.difference.explain()}"
        other = ", ".join(f"{name} was {theirs} and is {ours}" for name, theirs, ours in self.arithmetic)
        if self.difference is None:
            return f"equal, although other bits would be no surprise: {other}"
        if self.same_tokens:
            return f"tokens equal, log probabilities not ({self.difference.explain()}), which can be rounding: {other}"
        return f"cannot be told: {self.difference.explain()}, which can be rounding: {other}"


class Recomputing:
    """Computes certified answers with one model. Owned by one caller; see `open_recomputing`."""

    def __init__(self, assembly: Assembly, contract: AnswerContract) -> None:
        self._assembly = assembly
        self._contract = contract

    def recompute(self, certificate: Certificate) -> Recomputed:
        """Compute one answer again, alone.

        Raises:
            ConfigError: the certificate is of another model than this one, or does not fit here.
        """
        arithmetic = []
        for name, theirs, ours in contract_differences(certificate.contract, self._contract):
            if name not in ARITHMETIC:
                raise ConfigError(
                    "--certificate", f"is of another model: its {name} is {theirs}, and here it is {ours}"
                )
            arithmetic.append((name, theirs, ours))
        try:
            computed = self._compute(certificate)
        except (BadCertificate, RequestError) as error:
            return Recomputed(tuple(arithmetic), refused=str(error))
        return Recomputed(
            tuple(arithmetic),
            first_difference(certificate.answer, computed),
            first_difference(certificate.answer, computed, tokens_only=True) is None,
        )

    def _compute(self, certificate: Certificate) -> Sequence[CertifiedChoice]:
        """The answer to a certificate's request. Raises BadCertificate and RequestError."""
        assembly = self._assembly
        engine, grammars = assembly.engine, assembly.computing.grammars
        request = certificate.request
        engine.submit(
            resolved_request(request, _REQUEST, assembly.text, assembly.card, grammars, engine.adapters.known)
        )
        while engine.has_work:
            for _, output in engine.step():
                if isinstance(output, RequestFailed):
                    raise BadCertificate(output.message)
                if isinstance(output, RequestFinished):
                    return read(output.certificate.encode()).answer
        raise AssertionError("the engine left a request unanswered")


@contextmanager
def open_recomputing(
    config: EngineConfig, contract: AnswerContract, cache_dir: Path | None = None
) -> Iterator[Recomputing]:
    """Open the operator's model in the form that a contract names, to compute plainly: no cache and no drafts.

    Raises:
        SetupError: the model cannot be used, or its answers cannot be certified here.
    """
    alone = replace(
        config_for(contract, config),
        max_num_seqs=1,
        prefix_caching=False,
        kv_store="off",
        speculate=False,
        step_target_ms=0,
    )
    assembly = assemble(alone, cache_dir)
    try:
        facts = assembly.computing.facts
        if facts.contract is None:
            raise ConfigError("--certificate", f"cannot be verified here: {facts.uncertified}")
        yield Recomputing(assembly, Certifying(facts.contract, assembly.text).contract)
    finally:
        assembly.close()
