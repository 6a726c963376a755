"""Tests of the chart's templates."""
