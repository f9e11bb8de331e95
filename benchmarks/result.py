"""What a benchmark answers, as JSON and as a row of a table."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import require

Extra = float | int | str | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured value against its bar; ``extras`` holds what helps to understand it."""

    name: str
    value: float
    unit: str
    bar: float | None
    holds: bool
    extras: Mapping[str, Extra] = field(default_factory=dict[str, Extra])

    def __post_init__(self) -> None:
        """Refuse an extra that would hide a field."""
        taken = sorted({"name", "value", "unit", "bar", "holds"} & set(self.extras))
        require((not taken, "extras", f"{', '.join(taken)} would hide a field; choose another name"))

    def row(self) -> dict[str, Extra]:
        """Return the flat record that is printed and logged.

        >>> Result(name="idle", value=0.5, unit="s", bar=1.0, holds=True, extras={"runs": 3}).row()
        {'name': 'idle', 'value': 0.5, 'unit': 's', 'bar': 1.0, 'holds': True, 'runs': 3}
        """
        fields: dict[str, Extra] = {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "holds": self.holds,
        }
        return fields | dict(self.extras)

    def as_json(self) -> str:
        """Print as one line of JSON."""
        return json.dumps(self.row())
