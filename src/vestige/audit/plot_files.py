"""Where plots go: checked before the work, written at once or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from vestige.errors import ConfigError
from vestige.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".png", ".pdf", ".svg")


def check_plot(path: Path) -> None:
    """ConfigError unless a plot could be written there."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"plot {str(path)!r} has no known image format: let it end in {', '.join(_FORMATS)}."
        )
    if not path.parent.is_dir() or path.is_dir():
        raise ConfigError(
            f"plot {str(path)!r} cannot be written: give a file in a folder that exists."
        )


def write_plot(figure: Figure, path: Path) -> None:
    """Draw the figure into the file; an interrupt leaves no half of it."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower(), dpi=130)
    write_whole(path, image.getvalue())
