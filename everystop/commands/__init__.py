"""The commands that talk to a running scheduler."""

from everystop.commands.chatting import chat
from everystop.commands.draining import drain
from everystop.commands.generating import generate
from everystop.commands.watching import status

__all__ = ["chat", "drain", "generate", "status"]
