"""Converts a model to another form, for `penstock quantize`. One module for each format that can be written."""

from __future__ import annotations

from penstock.quantizing.directory import DIRECTORY_FORMS, DirectoryPlan, plan_directory, write_directory
from penstock.quantizing.gguf import Plan, plan_file, write_file

__all__ = [
    "DIRECTORY_FORMS",
    "DirectoryPlan",
    "Plan",
    "plan_directory",
    "plan_file",
    "write_directory",
    "write_file",
]
