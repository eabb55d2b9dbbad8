"""Joins core, text and a runner: an engine stepped by hand, a thread that steps it, and a client to talk to it."""

from penstock.engine.adapter_folder import AdapterFolder
from penstock.engine.admission import QueueLimits
from penstock.engine.answer_cache import AnswerCache, CachedAnswers
from penstock.engine.certifier import certified_request, resolved_request
from penstock.engine.certifying import Certifying
from penstock.engine.client import LocalClient
from penstock.engine.engine import Engine, StepOutputs
from penstock.engine.intake import Intake, ResolvedRequest
from penstock.engine.intake_threads import IntakeThreads
from penstock.engine.interrupts import interrupts_held
from penstock.engine.loop import EngineLoop
from penstock.engine.output_queue import OutputQueue, WaitingRoom
from penstock.engine.profile import Profiles
from penstock.engine.recorder import NoRecorder, Recorder

__all__ = [
    "AdapterFolder",
    "AnswerCache",
    "CachedAnswers",
    "Certifying",
    "Engine",
    "EngineLoop",
    "Intake",
    "IntakeThreads",
    "LocalClient",
    "NoRecorder",
    "OutputQueue",
    "Profiles",
    "QueueLimits",
    "Recorder",
    "ResolvedRequest",
    "StepOutputs",
    "WaitingRoom",
    "certified_request",
    "interrupts_held",
    "resolved_request",
]
