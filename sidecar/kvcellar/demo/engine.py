"""One vLLM engine, driven over a socket: the program that `client` starts.

It runs by its path under the interpreter of vLLM's environment, so it imports nothing of
kvcellar and needs nothing installed but vLLM; whatever is to be tested (a plug-in) must be
importable there. The engine is an ordinary offline `vllm.LLM` with the scheduler and the
workers in processes of their own, as a server has them.

Protocol, on one stream socket whose descriptor is the only argument, one JSON object a line.
The first line from the parent is the arguments of `vllm.LLM`; the first answer has the
versions and times. Each later line is ``{"command": NAME, ...}``, answered in order by
``{"result": ...}`` or ``{"error": "..."}``. At the end of the stream, which is also what a
dead parent looks like, the engine shuts down.

vLLM starts its processes by ``spawn``, which imports this file again in each of them: what it
imports stands inside its functions, and its top does nothing but ease importing vLLM.
"""

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from vllm import LLM

Json: TypeAlias = dict[str, Any]

# Collecting garbage while thousands of modules are imported costs each of the three or four
# processes about 1.5 of 9 s (measured 2026-12 on two cores of an EPYC).
gc.set_threshold(100_000, 50, 50)

_SHUTDOWN_TIMEOUT_S = 30.0


class Driver:
    """The commands, each a method that takes the line's fields and returns the result."""

    def __init__(self, llm: "LLM") -> None:
        """Keep the loaded engine."""
        self._llm = llm

    def generate(self, prompts: list[list[int]], max_tokens: int, together: bool = False) -> Json:
        """Greedy answers to prompts of token ids, one request at a time or all at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        groups = [requests] if together else [[request] for request in requests]
        began = time.monotonic()
        outputs = [
            output
            for group in groups
            for output in self._llm.generate(group, sampling, use_tqdm=False)
        ]
        return {
            "took_s": time.monotonic() - began,
            "answers": [
                {
                    "token_ids": list(output.outputs[0].token_ids),
                    "cached_tokens": output.num_cached_tokens or 0,
                    "finish_reason": output.outputs[0].finish_reason,
                }
                for output in outputs
            ],
        }

    def settle(self) -> Json:
        """Run a request too short to be cached.

        Stores of earlier requests are submitted and counted in steps after their answers,
        and their metrics come along with the output of a later request only.
        """
        self.generate([[8, 9]], max_tokens=3)
        return {}

    def reset_prefix_cache(self) -> Json:
        """Forget what the device holds, and nothing of what a connector holds."""
        return {"done": bool(self._llm.reset_prefix_cache())}

    def metrics(self) -> Json:
        """All samples of vLLM's Prometheus metrics but for buckets and creation times."""
        # By way of vLLM, since it is vLLM's environment that has prometheus_client.
        from vllm.v1.metrics.reader import REGISTRY

        return {
            "samples": [
                {"name": sample.name, "labels": sample.labels, "value": sample.value}
                for family in REGISTRY.collect()
                for sample in family.samples
                if sample.name.startswith("vllm:")
                and not sample.name.endswith(("_bucket", "_created"))
            ]
        }

    def shutdown(self) -> Json:
        """Let the scheduler and the workers end by themselves, as at SIGTERM to a server."""
        began = time.monotonic()
        self._llm.llm_engine.engine_core.shutdown(timeout=_SHUTDOWN_TIMEOUT_S)
        return {"took_s": time.monotonic() - began}


def _serve(driver: Driver, lines: Iterator[bytes], answer: Callable[[Json], None]) -> None:
    commands: dict[str, Callable[..., Json]] = {
        "generate": driver.generate,
        "settle": driver.settle,
        "reset_prefix_cache": driver.reset_prefix_cache,
        "metrics": driver.metrics,
        "shutdown": driver.shutdown,
    }
    for line in lines:
        fields = json.loads(line)
        name = fields.pop("command")
        try:
            answer({"result": commands[name](**fields)})
        # The parent decides what a failure means, and the engine may be usable after it.
        except Exception as error:  # noqa: BLE001
            answer({"error": f"{name}: {type(error).__name__}: {error}"})
        if name == "shutdown":
            return
    driver.shutdown()


def main() -> int:
    """Start the engine and serve commands until told to stop."""
    began = time.monotonic()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)

    def answer(message: Json) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    lines = iter(channel.makefile("rb").readline, b"")
    arguments = json.loads(next(lines))
    try:
        from vllm import LLM, __version__

        imported = time.monotonic()
        llm = LLM(**arguments)
    except Exception as error:  # noqa: BLE001  it goes to the parent, which has the log too
        answer({"error": f"start: {type(error).__name__}: {error}"})
        return 1
    started = {
        "version": __version__,
        "import_s": imported - began,
        "start_s": time.monotonic() - began,
    }
    answer({"result": started})
    _serve(Driver(llm), lines, answer)
    return 0


if __name__ == "__main__":
    # vLLM leaves threads and finalizers that can hang an orderly exit.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
