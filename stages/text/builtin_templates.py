"""Chat templates that can be named instead of a file. Apart, and as Python, so that a change of one is a change of the code
that a result's fingerprint covers.

`chatml`, `llama3` and `gemma` need their control tokens in the tokenizer; `zephyr` and `inst` write roles as text and end a turn
with the tokenizer's own end-of-sequence token, so they fit every tokenizer that has one.
"""

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures stand within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + tool | tojson }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a JSON object with its name and arguments within <tool_call></tool_call>.' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- generation %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endgeneration %}
{%- else %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content | trim + '<end_of_turn>' }}
{%- endgeneration %}
{%- else %}
{{- message.content | trim + '<end_of_turn>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}
"""

ZEPHYR = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content + eos_token }}
{%- endgeneration %}
{%- else %}
{{- message.content + eos_token }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>\\n' }}
{%- endif %}
"""

INST = """\
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'system' %}
{{- '[SYS] ' + message.content + ' [/SYS]' }}
{%- elif message.role == 'assistant' %}
{%- generation %}
{{- ' ' + message.content + eos_token }}
{%- endgeneration %}
{%- else %}
{{- raise_exception('Only system, user and assistant turns are supported') }}
{%- endif %}
{%- endfor %}
"""

TEMPLATES = {"chatml": CHATML, "gemma": GEMMA, "inst": INST, "llama3": LLAMA3, "zephyr": ZEPHYR}
