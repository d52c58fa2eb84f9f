"""What the vLLM plug-in decides, without a line of vLLM: settings, identity, the scheduler's book.

`kvcellar.vllm` puts vLLM's types around it. Nothing here may import vLLM or torch, so that all of it is
tested without an engine.
"""
