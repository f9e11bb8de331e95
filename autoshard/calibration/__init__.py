"""Measured runs against the cost model: reading rows, fitting constants, stating errors."""
