"""What products hand out when people ask for their data. Apart from the formats for training, because nobody made these for it."""

from typing import Any

from stages.text.chats import Message, Texts, refuse_attached, role_of
from stages.text.faults import Fault, kind, word


def thread(mapping: Any, current: Any, texts: Texts) -> list[Message]:
    """ChatGPT keeps every conversation as a tree (an edited question is a branch): the messages from its root to the current
    one, without what it hides itself and without those of its tools, which are not in the form of calls and answers."""
    if not isinstance(mapping, dict) or not isinstance(current, str) or current not in mapping:
        raise Fault("broken_export", "current_node")
    found: list[Message] = []
    seen: set[Any] = set()
    node: Any = current
    while node is not None:
        if not isinstance(node, str) or not isinstance(mapping.get(node), dict) or node in seen:
            raise Fault("broken_export", "mapping")
        seen.add(node)
        if (message := _message(mapping[node].get("message"), texts)) is not None:
            found.append(message)
        node = mapping[node].get("parent")
    found.reverse()
    first = next((index for index, message in enumerate(found) if message["role"] != "system"), len(found))
    return [*found[max(first - 1, 0) : first], *(message for message in found[first:] if message["role"] != "system")]


def _message(message: Any, texts: Texts) -> Message | None:
    if not isinstance(message, dict):
        return None
    author, content, about = (_object(message.get(name)) for name in ("author", "content", "metadata"))
    hidden = about.get("is_visually_hidden_from_conversation")
    role = role_of(author.get("role"))
    if hidden or role not in ("system", "user", "assistant") or message.get("recipient", "all") != "all":
        return None
    refuse_attached(about, "mapping.metadata.", ("attachments",))  # a file's content stands elsewhere, if anywhere
    type = content.get("content_type")
    if type not in ("text", "multimodal_text"):
        if role == "user" and isinstance(type, str) and type != "user_editable_context":  # his standing instructions
            raise Fault("unsupported_content_part", "mapping", word(type))
        return None  # the assistant's code, its browsing, its thoughts
    said = []
    parts = content.get("parts")
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, str):
            found = part.get("content_type") if isinstance(part, dict) else part
            raise Fault("unsupported_content_part", "mapping", word(found))
        said.append(texts.take(part, "mapping"))
    return {"role": role, "content": "".join(said)} if any(said) else None


def turns(messages: Any, texts: Texts) -> list[Message]:
    """Claude keeps a list of {sender, text or parts}; files that were attached are named there, but not what is in them."""
    if not isinstance(messages, list):
        raise Fault("not_a_list", "chat_messages", kind(messages))
    found: list[Message] = []
    for index, message in enumerate(messages):
        at = f"chat_messages[{index}]"
        if not isinstance(message, dict):
            raise Fault("not_a_message", at, kind(message))
        role = role_of(message.get("sender"))
        if role is None:
            raise Fault("unknown_role", at, word(message.get("sender")))
        if message.get("attachments") or message.get("files"):
            raise Fault("attachment", at)
        found.append({"role": role, **_said(message.get("content"), message.get("text"), at, texts)})
    return found


def _said(content: Any, text: Any, at: str, texts: Texts) -> Message:
    """`content` has the parts of a message; `text` is the same in one, but for what it has no words for (tools, thoughts)."""
    said: list[str] = []
    thoughts: list[str] = []
    for part in content if isinstance(content, list) else []:
        match type := _object(part).get("type"):
            case "text":
                said.append(texts.take(part.get("text"), at))
            case "thinking":
                thoughts.append(texts.take(part.get("thinking"), at))
            case "token_budget":  # says nothing
                pass
            case _:
                raise Fault("unsupported_content_part", at, word(type))
    if not said:
        text = content if isinstance(content, str) and not text else text
        said.append("" if text is None else texts.take(text, at))
    thought = "".join(thoughts)
    return {"content": "".join(said)} | ({"reasoning_content": thought} if thought else {})


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
