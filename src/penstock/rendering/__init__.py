"""Runs chat templates, which are programs, in worker processes with budgets of CPU time and memory.

`Renderer` sends orders to the workers, whose program is `worker`; `language` defines the language of templates. Only
the workers load Jinja, and nothing here knows messages or tokens.
"""

from __future__ import annotations

from penstock.rendering.renderer import Renderer, TemplateFault, TemplateRefusal, shared_renderer

__all__ = ["Renderer", "TemplateFault", "TemplateRefusal", "shared_renderer"]
