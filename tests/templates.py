"""Chat templates of the kinds there are, made up, on a tokenizer with one token per byte."""

from __future__ import annotations

from producers.chat import TemplateChat

QWEN = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

THINKS = """
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + (m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n')) }}
{{- '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
"""Thinking is left out of earlier answers."""

LLAMA = """
{%- macro head(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|begin_of_text|>' + head('system') + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if loop.first and tools %}{{ head('user') }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{{ m.content + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- head('assistant') + '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{ head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ head(m.role) + m.content + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']</s>' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('results follow calls') }}{% endif %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"""

TAGS = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' }}{{ value }}{{ '\n</parameter>\n' }}{% endfor %}
{{- '</function>\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Calls in tags, whose values are text."""

XML = """
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<invoke name=' + call.function.name + '/>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Calls in a format that is no JSON."""

PLAIN = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Knows no tools."""

USERS_ONLY = PLAIN.replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
)

CLOSES = """
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '\n' + m.content }}
{%- if m.role == 'assistant' %}{{ '<|im_start|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant\n' }}{% endif %}"""
"""Closes an answer before it ends it."""

DROPS = QWEN.replace("m.role == 'tool'", "m.role == 'never'")
"""Takes tools and says nothing of their results."""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>")
ENDS = {LLAMA: "<|eot_id|>", MISTRAL: "</s>"}


def byte_chat(
    template: str | None, tool_format: str = "auto", merges: tuple[tuple[str, str], ...] = ()
) -> TemplateChat:
    """A tokenizer of bytes and of `merges`, in the byte-level alphabet, with this template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=list(merges))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    end = ENDS.get(template or "", "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    tokenizer.chat_template = template
    return TemplateChat(tokenizer, (tokenizer.eos_token_id,), tool_format)
