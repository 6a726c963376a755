"""Tests of gateway/desk."""
