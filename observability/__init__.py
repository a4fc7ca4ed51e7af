"""Metric names, request stages, logging: what every process says about itself. Imports nothing of ours."""
