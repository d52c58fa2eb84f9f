"""Every exception of the box.

- ``BoxError``: the root; also a start, a stop or a build that failed
    - ``NoGoToolchain``: this machine cannot build the programs
    - ``CommandFailed``: kubectl, helm or another command ended with a status that is not 0
    - ``ApiError``: the API server refused a request
"""

from collections.abc import Sequence


class BoxError(Exception):
    """The root of the tree; its message says what was tried and where to look."""


class NoGoToolchain(BoxError):
    """There is no Go to build the programs with."""


class CommandFailed(BoxError):
    """A command ended with a status that is not 0."""

    def __init__(self, argv: Sequence[str], status: int, stdout: str, stderr: str) -> None:
        super().__init__(f"{' '.join(argv)}: status {status}\n{stdout}{stderr}")
        self.status = status
        self.stdout = stdout
        self.stderr = stderr


class ApiError(BoxError):
    """The API server answered a request with an error.

    ``reason`` is its word for it, such as ``NotFound`` or ``Invalid``; ``status`` the HTTP status.
    """

    def __init__(self, request: str, status: int, reason: str, message: str) -> None:
        super().__init__(f"{request}: {status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
