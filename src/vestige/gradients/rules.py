"""Every rule by the torch function it covers."""

from typing import Any

from vestige.gradients import attention, elementwise, layers, linear, recurrent
from vestige.gradients.capture import Rule

RULES: dict[Any, Rule] = {}
for _room in (linear, layers, elementwise, attention, recurrent):
    RULES.update(_room.TABLE)
