"""One file per sampling parameter; validation, documentation, HTTP schema and the sampler's stages derive from them.

Decides which sampling requests are valid and what they mean; executes nothing (that is `exec`) and never imports a
tensor library: a stage calls only methods of the tensors that it is given.
"""

from __future__ import annotations

from penstock.sampling.model_defaults import read_model_defaults
from penstock.sampling.parameter import Home, Parameter, RowStage, Stage
from penstock.sampling.parameters import PARAMETERS, STAGES
from penstock.sampling.params import SamplingParams
from penstock.sampling.row_views import RowViews
from penstock.sampling.uniform import uniform

__all__ = [
    "Home",
    "PARAMETERS",
    "Parameter",
    "RowStage",
    "RowViews",
    "STAGES",
    "SamplingParams",
    "Stage",
    "read_model_defaults",
    "uniform",
]
