"""Chat templates, which are programs: run in worker processes with budgets of processor time and memory.

`Renderer` orders; `worker` is the process's program, and `language` what templates are written in. Only those two know
Jinja, and nothing here knows messages or tokens.
"""

from __future__ import annotations

from penstock.rendering.renderer import Renderer, TemplateFault, TemplateRefusal, shared_renderer

__all__ = ["Renderer", "TemplateFault", "TemplateRefusal", "shared_renderer"]
