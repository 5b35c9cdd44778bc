"""Writes docs/options.md: the options of every command, from the fields that declare them.

python docs/options.py > docs/options.md
"""

import textwrap

from vestige.cli.app import COMMANDS, load
from vestige.privacy.options import rule
from vestige.train.config import TrainConfig

HEAD = """# Options

What `vestige COMMAND --help` says, on one page. `python docs/options.py > docs/options.md` writes
it from the fields that declare the options.
"""


def commands():
    """Every command with its name in full; those of a group one by one."""
    for name, purpose in COMMANDS.items():
        command = load(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, purpose, command
        else:
            for each in inner.values():
                yield f"{name} {each.name}", each.help, each


def line(name, parameter):
    """One option: its name, its default, what it is, and which values it takes."""
    is_option = parameter.param_type_name == "option"
    words = [f"`{parameter.opts[0]}`" if is_option else f"`{parameter.name}`"]
    if parameter.required:
        words.append("(required)")
    elif parameter.default is not None and parameter.default is not False:
        words.append(f"(default: {parameter.default})")
    said = f"{' '.join(words)}: {' '.join((parameter.help or '').split())}"
    field = TrainConfig.model_fields.get(parameter.name) if name == "train" else None
    values = rule(field) if field is not None else ""
    if "number" in values:
        said += f" {values[0].upper()}{values[1:]}."
    return textwrap.fill(
        said, 98, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )


def page():
    """The whole page."""
    parts = [HEAD]
    for name, purpose, command in commands():
        lines = [line(name, parameter) for parameter in command.params]
        parts.append("\n".join([f"## vestige {name}\n", f"{textwrap.fill(purpose, 98)}\n", *lines]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
