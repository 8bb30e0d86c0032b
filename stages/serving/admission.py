"""From a well-formed request to token ids and sampling that this model can honour. Apart from the app, because these rules
need the model (context length, chat template, vocabulary), and they must refuse before anything is queued."""

from stages.serving.generate import Sampling
from stages.serving.model import LoadedModel
from stages.serving.protocol import ApiError, ChatRequest, CompletionRequest, Request
from stages.text.rendering import ChatRefused


def tokenize(loaded: LoadedModel, request: Request) -> list[list[int]]:
    """Token ids of each prompt. Takes a while for a long text: call it in a thread."""
    if isinstance(request, ChatRequest):
        return [_apply_template(loaded, request)]
    assert isinstance(request, CompletionRequest)
    prompts = []
    for prompt in request.prompts():
        if isinstance(prompt, list):
            if any(not 0 <= token < loaded.vocab_size for token in prompt):
                raise ApiError(400, f"a token id is outside 0..{loaded.vocab_size - 1}", param="prompt")
            prompts.append(prompt)
            continue
        ids = loaded.tokenizer(prompt).input_ids
        if not ids and loaded.start_id is None:
            raise ApiError(400, "prompt is empty, and this model has no token that starts a document", param="prompt")
        prompts.append(ids or [loaded.start_id])
    return prompts


def _apply_template(loaded: LoadedModel, request: ChatRequest) -> list[int]:
    """In the very tokens of training. Control tokens that a client typed are text."""
    if loaded.template is None:
        message = "this model has no chat template: use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    try:
        return loaded.template.prompt_ids([{"role": part.role, "content": part.text()} for part in request.messages])
    except ChatRefused as refusal:
        message = f"the model's chat template refuses these messages ({refusal.reason})"
        raise ApiError(400, message, param="messages") from refusal


def make_sampling(loaded: LoadedModel, request: Request, prompt_tokens: int, cap: int | None, param: str) -> Sampling:
    context, asked = loaded.context_length, request.length()
    room = context - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{asked or 0} tokens for the answer and {prompt_tokens} in the {param}. Please reduce one of them.",
            param=param,
            code="context_length_exceeded",
        )
    if cap is not None and asked is not None and asked > cap:
        raise ApiError(400, f"max_tokens is {asked}, this server allows at most {cap}", param="max_tokens")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    special = {
        token.content: number for number, token in loaded.tokenizer.added_tokens_decoder.items() if token.special
    }

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Sampling(
        max_tokens=asked or min(room, cap or room),
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=given(request.min_p, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        min_tokens=request.min_tokens or 0,
        ignore_eos=bool(request.ignore_eos),
        seed=request.seed,
        stop=tuple(stop),
        stop_ids=frozenset(special[text] for text in stop if text in special),
    )
