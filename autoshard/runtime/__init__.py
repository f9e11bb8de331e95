"""Obeys a plan: starts its ranks, feeds an engine, measures. Decides nothing."""
