"""How the messages of a chat fit each other: who may follow whom, which call is answered, and whether there is anything to learn.
Apart from the messages, each of which is read alone.
"""

from stages.text.chats import Message
from stages.text.faults import Fault


def require_order(chat: list[Message], field: str, before: int = 0) -> None:
    """One system message at most, and first; a tool answers a call that was made; each call is answered before others speak.
    So many messages `before` do not stand in the field itself."""
    if not chat:
        raise Fault("empty_conversation", field)
    ids: set[str] = set()
    calls: list[Message] = []
    waiting: list[Message] = []
    for index, message in enumerate(chat):
        at, role = f"{field}[{index - before}]" if index >= before else "prompt", message["role"]
        if role == "system" and index:
            raise Fault("role_order", at, "system behind the first message")
        if role == "tool":
            if not calls:
                raise Fault("role_order", at, "tool without a call before it")
            # Where all are answered, this may be more of an answer.
            answered = _answered(message, waiting or calls, ids, at)
            waiting = [call for call in waiting if all(call is not one for one in answered)]
            continue
        if waiting:
            raise Fault("unanswered_tool_call", at)
        calls = waiting = message.get("tool_calls", [])
        ids |= {call["id"] for call in calls if call.get("id")}


def _answered(answer: Message, calls: list[Message], ids: set[str], at: str) -> list[Message]:
    """Which of these calls a tool answers: that of its id (none: it was answered before); without an id the next of its function's
    name; without either all of them, since one message may bring several results. `ids` are those of all calls so far."""
    if ids and (wanted := answer.get("tool_call_id")):
        if wanted not in ids:
            raise Fault("orphan_tool_call_id", at)
        return [call for call in calls if call.get("id") == wanted][:1]
    if name := answer.get("name"):
        calls = [call for call in calls if call["function"]["name"] == name][:1]
        if not calls:
            raise Fault("orphan_tool_call_id", at, "no open call of a function of this name")
    return calls


def require_assistant(chat: list[Message], field: str, before: int = 0) -> None:
    """Somebody answers, and no answer is empty: a model would learn to end its turn at once."""
    if not any(m["role"] == "assistant" and (m["content"].strip() or m.get("tool_calls")) for m in chat):
        raise Fault("no_assistant_turn", field)
    for index, message in enumerate(chat):
        said = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
        if message["role"] == "assistant" and not said:
            raise Fault("empty_answer", f"{field}[{index - before}]")
