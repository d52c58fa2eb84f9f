"""Text from elsewhere, made safe to show: on a terminal, in a table, in a log line."""


def printable(text: str) -> str:
    r"""The text with each character that is not printed written as its escape, such as `\x1b`.

    What other processes and other people's programs say may hold control characters, which would move a
    terminal's cursor, colour it or forge a line; line ends, and marks that turn the direction of writing,
    are among them. Doing it twice changes nothing.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
