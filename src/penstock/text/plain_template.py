"""The chat template for models that have none: the conversation as plain text.

A model that was never trained on conversations, such as GPT-2, reads them as a written dialogue:

    [system]
    You are a helpful assistant.

    User: Hello!

    Assistant:

Any other role is written in brackets, like the system's. Such a model does not stop by itself before the user's next
turn; the stop string "User:" makes it stop.
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
