"""The commands that talk to a scheduler: `everystop generate`, `everystop chat`, `everystop status`."""

from everystop.commands.chatting import chat
from everystop.commands.generating import generate
from everystop.commands.watching import status

__all__ = ["chat", "generate", "status"]
