"""Everystop: LLM inference with continuous batching, split into a scheduler and an executor that talk gRPC.

This package is what both services and every user import. It never imports torch, triton or transformers.
"""

__version__ = "0.1.0"
