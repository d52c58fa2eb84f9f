"""What tests ask a vLLM in a pod of `vllm_pods`."""

import http.client
import json
import urllib.error
import urllib.request

START_S = 300.0
"""Measured on 2 cores: 30 s with nothing else running, 150 s beside ten busy processes."""
_WORDS = 397


def prompt(number: int = 0) -> str:
    """One of many prompts of 397 words, of which no two begin alike."""
    return " ".join(f"w{3 + (number + n) % _WORDS}" for n in range(_WORDS))


def answer(address: str, asked: str) -> str:
    """What vLLM makes of a prompt; nothing while it does not serve."""
    body = {"model": "tiny", "prompt": asked, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://{address}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - http it is
            return str(json.load(response)["choices"][0]["text"])
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
        return ""
