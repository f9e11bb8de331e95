"""How quantities are printed: bytes, seconds, FLOPs, counts."""

import math

GIB = 2**30
DAY_S = 86_400

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = (  # below how many seconds, the unit, its name and its digits
    (1e-3, 1e-6, "us", 1),
    (1.0, 1e-3, "ms", 1),
    (600.0, 1.0, "s", 2),
    (3600.0, 60.0, "min", 1),
)
_FEW_MINUTES = 10  # which are written so only beside more
_SHORT_S = 10.0  # below which parts of a second are worth a word
_LEAST_ALIKE = 0.1  # of a unit: what is less takes a smaller one than the number beside it
_DECIMAL = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def format_bytes(num_bytes: float, beside: float = 0) -> str:
    """Print a number of bytes with a binary unit: that of the number ``beside`` it, unless it is under a tenth of one.

    >>> format_bytes(512), format_bytes(3 * 2**29), format_bytes(-2**20)
    ('512 B', '1.50 GiB', '-1.00 MiB')
    >>> format_bytes(2**29, 3 * 2**29), format_bytes(2**20, 3 * 2**29)
    ('0.50 GiB', '1.00 MiB')
    """
    return _scaled(num_bytes, 1024, _BYTES, beside)


def format_count(count: float, unit: str = "") -> str:
    """Print a large number with a decimal prefix.

    >>> format_count(70_553_706_496), format_count(2.4e15, "FLOP")
    ('70.55 G', '2.40 PFLOP')
    """
    return _scaled(count, 1000, tuple(prefix + unit for prefix in _DECIMAL)).rstrip()


def format_seconds(time_s: float, beside: float = 0) -> str:
    """Print a duration with the unit in which it reads best, or in that of the duration ``beside`` it.

    A tenth of that unit is the least; what is shorter keeps its unit. Few minutes have three digits, as many have.

    >>> format_seconds(0.0000021), format_seconds(0.25), format_seconds(9.876), format_seconds(4000)
    ('2.1 us', '250.0 ms', '9.88 s', '1.11 h')
    >>> format_seconds(207, 828), format_seconds(0.25, 9.9), format_seconds(0.02, 9.9), format_seconds(0, 9.9)
    ('3.45 min', '0.25 s', '20.0 ms', '0 s')
    """
    if time_s == 0:
        return "0 s"
    unit_s, unit, digits = _time_unit(max(abs(time_s), abs(beside)))
    if abs(time_s) < _LEAST_ALIKE * unit_s:
        unit_s, unit, digits = _time_unit(abs(time_s))
    digits += unit == "min" and abs(time_s) < _FEW_MINUTES * unit_s
    return f"{time_s / unit_s:.{digits}f} {unit}"


def format_training(time_s: float) -> str:
    """Print how long a training takes: in days from two on, else as other durations.

    >>> format_training(30 * DAY_S), format_training(3.2 * 3600)
    ('30.0 days', '3.20 h')
    """
    return f"{time_s / DAY_S:,.1f} days" if time_s >= 2 * DAY_S else format_seconds(time_s)


def format_wait(time_s: float) -> str:
    """Print a time that somebody waits, as people say it: no parts of a second from ten on, and two units at most.

    >>> format_wait(2.5), format_wait(45.9), format_wait(275.97), format_wait(11_530), format_wait(200_000)
    ('2.50 s', '46 s', '4 min 36 s', '3 h 12 min', '2 d 8 h')
    """
    if time_s < _SHORT_S:
        return format_seconds(time_s)
    sizes = ((DAY_S, "d"), (3600, "h"), (60, "min"), (1, "s"))
    first = next(place for place, (size_s, _) in enumerate(sizes) if round(time_s) >= size_s)
    (large_s, large), (small_s, small) = sizes[first], sizes[min(first + 1, 3)]
    count = round(time_s / small_s)
    whole, rest = divmod(count, large_s // small_s)
    return f"{whole} {large} {rest} {small}" if rest and first < 3 else f"{whole} {large}"


def _time_unit(size_s: float) -> tuple[float, str, int]:
    """Return the unit in which a duration reads best, its name, and its digits."""
    fitting = ((unit_s, unit, digits) for limit_s, unit_s, unit, digits in _TIMES if size_s < limit_s)
    return next(fitting, (3600.0, "h", 2))


def format_at_most(share: float) -> str:
    """Write a share that is an upper bound in percent, never rounded down.

    >>> format_at_most(0.00011), format_at_most(0.0136), format_at_most(0.0)
    ('0.02%', '1.36%', '0.00%')
    """
    return f"{math.ceil(share * 1e4 - 1e-6) / 100:.2f}%"


def format_change(share: float, digits: int = 1) -> str:
    """Write in percent by how much something differs, with its sign; what is too little to be written has none.

    >>> format_change(0.0123), format_change(-0.35, 0), format_change(-0.0004), format_change(4e-4, 0)
    ('+1.2%', '-35%', '0.0%', '0%')
    """
    return f"{share:+.{digits}%}" if round(share, digits + 2) else f"{0:.{digits}%}"


def format_dollars(usd: float) -> str:
    """Print an amount of money: cents where they count, two digits of what is less than a cent.

    >>> format_dollars(2627.4), format_dollars(22.037), format_dollars(0.0004127)
    ('$2,627', '$22.04', '$0.00041')
    """
    if usd >= 1000:
        return f"${usd:,.0f}"
    digits = 2 if usd >= 0.1 or usd <= 0 else 1 - math.floor(math.log10(usd))
    return f"${usd:.{digits}f}"


def format_named(name: str, value: float, beside: float = 0) -> str:
    """Print a number by the unit in its name, in that of the number ``beside`` it; one without a unit as it is.

    >>> format_named("step_time_s", 0.25), format_named("peak_bytes", 2**20), format_named("bandwidth_bytes_per_s", 1e9)
    ('250.0 ms', '1.00 MiB', '1.00 GB/s')
    >>> format_named("mfu", 0.381), format_named("usd_per_step", 22.037), format_named("layers", 1024)
    ('38.1%', '$22.04', '1,024')
    """
    if name.endswith("_per_s"):
        return format_count(value, "B/s" if name.endswith("_bytes_per_s") else "")
    if "usd" in name.split("_"):
        return format_dollars(value)
    if name.startswith("mfu"):
        return f"{value:.1%}"
    texts = {"_bytes": format_bytes, "_s": format_seconds}
    plain = f"{value:,}" if isinstance(value, int) else f"{value:.12g}"
    return next((text(value, beside) for unit, text in texts.items() if name.endswith(unit)), plain)


def _scaled(value: float, base: int, units: tuple[str, ...], beside: float = 0) -> str:
    power = _power(max(abs(value), abs(beside)), base, len(units))
    if abs(value) < _LEAST_ALIKE * base**power:
        power = _power(abs(value), base, len(units))
    digits = 0 if power == 0 and float(value).is_integer() else 2
    return f"{value / base**power:.{digits}f} {units[power]}"


def _power(size: float, base: int, num_units: int) -> int:
    """Return the number of the largest unit that is no larger than a size."""
    return next((power for power in range(num_units - 1) if size < base ** (power + 1)), num_units - 1)


def counted(count: int, noun: str, plural: str = "s", *, form: str = "d") -> str:
    """Write a number, in a format, with its noun.

    >>> counted(1, "rank"), counted(2, "micro-batch", "es"), counted(4096, "token", form=",")
    ('1 rank', '2 micro-batches', '4,096 tokens')
    """
    return f"{count:{form}} {noun}{'' if count == 1 else plural}"
