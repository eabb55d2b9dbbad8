"""Tensor parallelism: the processes that divide a model's weights on one host, and how they compute together."""

from penstock.ranks.divided_model import DividedModel
from penstock.ranks.follower import Share, follow
from penstock.ranks.gloo_group import GlooGroup
from penstock.ranks.processes import RankProcesses
from penstock.ranks.stores import MirroredStates

__all__ = ["DividedModel", "GlooGroup", "MirroredStates", "RankProcesses", "Share", "follow"]
