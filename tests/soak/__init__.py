"""Hunts that take hours: they look for what breaks where a user starts it. ``make soak`` runs all."""
