"""`everystop chaos`: every process may die, every client may misbehave, and every stream stays exact."""

from everystop_lab.chaos.command import chaos

__all__ = ["chaos"]
