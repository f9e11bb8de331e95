"""What a report prints where there is no terminal."""

from rich.console import RenderableType

from autoshard.report.terminal import WIDTH, make_console


def printed(*parts: RenderableType) -> str:
    """Print to text without spaces at the ends of lines; no line is wider than the width."""
    console = make_console()
    with console.capture() as capture:
        console.print(*parts)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, lines), default=0) <= WIDTH
    return "".join(f"{line}\n" for line in lines)
