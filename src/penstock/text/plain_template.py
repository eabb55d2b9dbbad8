"""The chat template of models that have none: the conversation as plain text.

A model that was never trained on conversations, such as GPT-2, reads them as a written dialogue:

    [system]
    You are a helpful assistant.

    User: Hello!

    Assistant:

Roles other than these stand in brackets, as the system's does. Nothing tells such a model to stop before the user's
next turn; a `stop` of "User:" does.
"""

from __future__ import annotations

__all__ = ["PLAIN_TEMPLATE"]

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
User: {{ message.content }}
{%- elif message.role == 'assistant' -%}
Assistant: {{ message.content }}
{%- else -%}
[{{ message.role }}]{{ "\\n" }}{{ message.content }}
{%- endif -%}
{{ "\\n\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}
Assistant:
{%- endif -%}
"""
