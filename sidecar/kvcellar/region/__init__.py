"""The region: what the bytes are, who owns them and who is attached.

Belongs here: geometry, the metadata page, the files, the locks and the limits on memory. Everything
works on plain descriptors and the standard library. Must not know: torch, numpy, vLLM, HTTP.
"""
