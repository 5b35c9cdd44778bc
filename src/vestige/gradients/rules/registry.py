"""Every rule by the torch function it covers."""

from typing import Any

from vestige.gradients.capture import Rule
from vestige.gradients.rules import attention, elementwise, layers, linear, recurrent

RULES: dict[Any, Rule] = {}
for _room in (linear, layers, elementwise, attention, recurrent):
    RULES.update(_room.TABLE)
