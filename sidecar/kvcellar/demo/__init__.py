"""Real vLLM engines with tiny models, for ``kvcellar demo`` and for the tests.

``models`` writes checkpoints, ``sandbox`` gives a private /dev/shm, ``client`` starts and
kills engines, ``engine`` is the program that it starts inside vLLM's environment, and
``processes`` looks at and ends process trees. Nothing here is imported by the other parts
of kvcellar, and only ``engine`` may load vLLM.
"""
