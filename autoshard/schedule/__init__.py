"""Pipeline schedules as data: actions, builders, closed forms, proof of order."""
