"""The best mixtures of both sides of a game in which what one side gains the other loses."""

import numpy as np

from autoshard.schedule.waves import Floats, Ints


def game(payoff: Floats) -> tuple[Floats, Floats]:
    """Return the mixture of rows whose least column is largest, and the mixture of columns whose largest row is least.

    >>> [side.round(2).tolist() for side in game(np.array([[3.0, 0.0], [0.0, 1.0]]))]
    [[0.25, 0.75], [0.25, 0.75]]
    """
    above = payoff - payoff.min() + 1e-3 * (np.ptp(payoff) or 1.0)
    rows, columns = payoff.shape
    table = np.zeros((rows + 1, columns + rows + 1))  # the simplex method, from the basis of all slacks
    table[:rows, :columns], table[:rows, columns:-1], table[:rows, -1] = above / above.max(), np.eye(rows), 1.0
    table[rows, :columns] = -1.0
    basis: Ints = np.arange(columns, columns + rows, dtype=np.int64)
    for _ in range(8 * (rows + columns)):  # wherever it ends is a mixture, if not the best one
        enters = int(table[rows, :-1].argmin())
        column = table[:rows, enters]
        if table[rows, enters] >= -1e-9 or column.max() <= 1e-10:
            break
        leaves = int(np.where(column > 1e-10, table[:rows, -1] / np.maximum(column, 1e-10), np.inf).argmin())
        pivot = table[leaves] / table[leaves, enters]
        table -= table[:, enters, None] * pivot
        table[leaves], basis[leaves] = pivot, enters
    weights, places = np.maximum(table[rows, columns:-1], 0.0), np.zeros(columns + rows)
    places[basis] = np.maximum(table[:rows, -1], 0.0)
    return weights / weights.sum(), places[:columns] / places[:columns].sum()
