"""What an hour costs the user: dollars of a node, or of a chip, in the place of the list price."""

import re
from collections.abc import Sequence
from dataclasses import replace

from autoshard.errors import InputError, inside, require
from autoshard.spec.cluster import Cluster

_PRICE = re.compile(r"\$?([0-9]{1,9}(?:\.[0-9]{1,6})?)(?:/(node|chip|gpu))?")
_KEY, _SOURCE = "price_usd_per_node_hour", "--price"  # the source of a price that the user states
_FORM = "is not a price. Write the dollars of a node hour, like 21.5, or of a chip hour, like 2.5/chip"


def hour_price(text: str) -> tuple[float, bool]:
    """Return the dollars of an hour, and whether they are for one chip instead of a node.

    >>> hour_price("21.5"), hour_price("$2.49/GPU")
    ((21.5, False), (2.49, True))
    """
    match = _PRICE.fullmatch(text.strip().lower())
    usd = float(match[1]) if match else 0.0
    if match is None or usd <= 0:
        raise InputError.of("", f"{text.strip()!r} {_FORM}")
    return usd, match[2] in ("chip", "gpu")


def checked_prices(price: float | str | None) -> None:
    """Refuse what is no price, or no list of prices with commas between them."""
    for text in str(price).split(",") if price is not None else ():
        hour_price(text)


def with_user_price(cluster: Cluster, price: float | str | None) -> Cluster:
    """Return a cluster with the user's price of an hour; None leaves the price that the cluster has.

    >>> from autoshard.spec.cluster_catalogue import load_cluster
    >>> [with_user_price(load_cluster("h100"), price).price_usd_per_node_hour for price in (20, "$20", "2.5/chip")]
    [20.0, 20.0, 20.0]
    """
    if price is None:
        return cluster
    require(("," not in str(price), "--price", f"one cluster has one price, not {price}"))
    with inside("--price"):
        usd, of_chip = hour_price(str(price))
    return replace(
        cluster,
        price_usd_per_node_hour=round(usd * (cluster.chips_per_node if of_chip else 1), 6),
        price_date=None,
        sources={**cluster.sources, _KEY: _SOURCE},
    )


def at_user_price(cluster: Cluster) -> bool:
    """Say whether the price of a cluster is the user's."""
    return cluster.sources.get(_KEY) == _SOURCE


def price_of_each(price: float | str | None, names: Sequence[str], what: str) -> Sequence[str | None]:
    """Return the price of each of several clusters: one for each, or one for all where all are the same.

    >>> price_of_each("20,98", ["trn1", "p5"], "cluster"), price_of_each(20, ["trn1", "trn1"], "plan")
    (['20', '98'], ['20', '20'])
    """
    if price is None:
        return [None] * len(names)
    prices = [text.strip() for text in str(price).split(",")]
    if len(prices) == 1 and len(set(names)) == 1:
        return prices * len(names)
    form = ",".join(["N"] * len(names))
    message = f"type one price for each {what}, with commas between them: {form}; found {price}"
    require((len(prices) == len(names), "--price", message))
    return prices
