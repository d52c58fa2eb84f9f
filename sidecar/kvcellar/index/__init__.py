"""Which KV chunk lies where: the chunk index and its replacement policies.

Belongs here: bookkeeping over keys and chunk ids, in the memory of one process. Does not belong
here: files, device memory, tensors, vLLM. `chunks.ChunkIndex` is what callers use; `policy`
decides what is evicted; `idlists` and `keytable` are the two data structures below both. Numpy is
used for the arrays handed out, nothing else from outside the standard library.
"""
