"""Real vLLM engines with tiny models, for ``kvcellar demo`` and for the tests.

- ``main`` is the command, ``story`` what it does and checks, step by step, ``passes`` and
  ``measure`` what it counts, ``report`` what it prints.
- ``sandbox`` gives a private /dev/shm; ``inside`` is the program that it starts there.
- ``models`` writes checkpoints. ``engine_config`` says what an engine is started with,
  ``client`` starts and kills it, ``engine`` is the program that runs in vLLM's environment,
  and ``answers`` is what comes back.
- ``sidecar`` starts and kills a sidecar; ``processes`` looks at and ends process trees.

Nothing here is imported by the other parts of kvcellar, and only ``engine`` may load vLLM.
"""
