"""Whatever a client sends as its prompt becomes the tokens that the model reads: text, token ids, or a conversation.

    TextPrompt ──▶ tokenise          ChatPrompt ──▶ the model's template ──▶ tokenise          TokenPrompt ──▶ as it is

Does not know how long a prompt may be, or what is done with it.
"""

from __future__ import annotations

from router.exchange import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.text.model_card import ModelCard
from router.text.template_processes import TemplateProcesses


class Prompter:
    """One per router. Owns nothing: the processes that render are the server's."""

    def __init__(self, card: ModelCard, templates: TemplateProcesses) -> None:
        self.card = card
        self._templates = templates

    def reads_at_once(self, prompt: Prompt) -> bool:
        """Whether its `token_ids` are there without waiting for a thread or a process."""
        match prompt:
            case TextPrompt(text):
                return self.card.tokenizer.encodes_at_once(text)
            case ChatPrompt():
                return False
            case TokenPrompt():
                return True

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Raises InvalidRequest when the model has no template or the template refuses the conversation."""
        match prompt:
            case TextPrompt(text, add_special_tokens):
                return await self.card.tokenizer.encode_text(text, add_special_tokens)
            case ChatPrompt(conversation, add_special_tokens):
                template = self.card.template_for(conversation)
                text = await self._templates.render(template, conversation)
                return await self.card.tokenizer.encode_text(text, add_special_tokens)
            case TokenPrompt(token_ids):
                return token_ids

    async def warm_up(self) -> None:
        """Let the first conversation not wait for a process and the template's compiling."""
        if self.card.chat_template is not None:
            await self._templates.warm_up(self.card.chat_template)
